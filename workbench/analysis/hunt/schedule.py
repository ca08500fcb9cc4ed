"""The schedule of a workload: what a scheduler decided in each step, as plain data that can be compared.

A step is ``{"chunks": [{"id", "start", "num_tokens", "num_drafts"}], "hits": {id: tokens}, "preempted": [id],
"blocks": {id: [a block table per group]}, "finished": {id: "length" | "stop"}, "free_blocks": number}``. ``hits`` has
the requests that are admitted or resumed in the step, with the tokens whose KV is there already. If it is asked for and
the scheduler tells it, ``"cached"`` has the blocks that can be found in the prefix cache at the end of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from workbench.analysis.hunt.drive import LiveRequest, Run
from workbench.analysis.hunt.target import MAX_STEPS, Target, crash_of, time_limit
from workbench.analysis.hunt.workloads import length_of

Step = dict[str, Any]


class Kept:
    """Keeps the steps of a run.

    Args:
        cache: Keep what the prefix cache contains, too.
    """

    def __init__(self, *, cache: bool = False) -> None:
        self.steps: list[Step] = []
        self._cache = cache

    def added(self, request: LiveRequest) -> None:
        """A request is known by its chunks."""

    def proposed(self, drafts: Any) -> None:
        """Drafts are known by the chunks that verify them."""

    def scheduled(self, run: Run, plan: Any) -> None:
        """Keep what was decided."""
        names = {*plan.admitted, *plan.resumed}
        self.steps.append(
            {
                "chunks": [
                    {"id": c.request_id, "start": c.start, "num_tokens": c.num_tokens, "num_drafts": len(c.drafts)}
                    for c in plan.chunks
                ],
                "hits": {chunk.request_id: chunk.start for chunk in plan.chunks if chunk.request_id in names},
                "preempted": list(plan.preempted or ()),
                "blocks": {
                    chunk.request_id: [list(table) for table in run.scheduler.block_tables(chunk.request_id)]
                    for chunk in plan.chunks
                },
                "finished": {},
                "free_blocks": run.num_free(),
            }
        )
        self._keep_cache(run)

    def _keep_cache(self, run: Run) -> None:
        if self._cache and (cached := _cached_blocks(run.scheduler)) is not None:
            self.steps[-1]["cached"] = sorted(cached)

    def updated(self, run: Run, plan: Any, latest: Any, ended: Mapping[str, str]) -> None:
        """Keep who ended with the output that came in at the end of the step."""
        self.steps[-1] |= {"finished": dict(ended), "free_blocks": run.num_free()}
        self._keep_cache(run)


def _cached_blocks(scheduler: Any) -> Collection[int] | None:
    """The blocks that the prefix cache can find; None if the scheduler does not tell."""
    if hasattr(scheduler, "state"):
        known: Collection[int] | None = scheduler.state().cached_blocks
        return known
    return scheduler.pool().get("cached_blocks") if hasattr(scheduler, "pool") else None


def schedule_of(
    target: Target, workload: dict[str, Any], kept: Kept | None = None, dropped: set[str] | None = None
) -> tuple[list[Step], str]:
    """Run a workload through a scheduler.

    Args:
        target: The scheduler.
        workload: The workload, in the format of ``simulate()``.
        kept: Keeps the steps; None for a `Kept`.
        dropped: Takes the settings that this version of the scheduler does not have.

    Returns:
        The steps, and how the run ended: "done"; "stuck" if requests wait forever; "max_steps"; "refused: " and
        the reason; or "crash: " and the line that failed.
    """
    kept = kept or Kept()
    max_model_len = workload["config"].get("max_model_len")
    if max_model_len and any(length_of(request["prompt"]) >= max_model_len for request in workload["requests"]):
        return [], "refused: a prompt leaves no room for a token"
    try:
        scheduler = target.make(workload["config"])
    except Exception as problem:  # what a version does not have ends its constructor in many ways
        return [], f"refused: {type(problem).__name__}: {problem}"
    if dropped is not None:
        dropped.update(getattr(scheduler, "dropped", ()))
    run = Run(scheduler, workload, kept)
    try:
        with time_limit():
            end: str = run.drive(MAX_STEPS)
    except Exception as problem:
        if isinstance(problem, ValueError) and run.in_add:
            return kept.steps, f"refused: {problem}"
        end = f"crash: {crash_of(problem, run.step, target.folders).place}"
    finally:
        if hasattr(scheduler, "close"):
            scheduler.close()
    return kept.steps, end


def said(step: Mapping[str, Any], name: str) -> str:
    """An aspect of a step."""
    if not step:
        return "no such step"
    if name == "chunks":
        chunks = [f"{c['id']} [{c['start']}, {c['start'] + c['num_tokens']})" for c in step["chunks"]]
        drafts = [f"{c['id']} {c.get('num_drafts', 0)}" for c in step["chunks"] if c.get("num_drafts")]
        return (", ".join(chunks) or "no chunks") + (f" with drafts {', '.join(drafts)}" if drafts else "")
    if name == "hits":
        return "cached " + (", ".join(f"{key} {value}" for key, value in step.get(name, {}).items()) or "none")
    return f"{name} {step.get(name) or 'none'}"


def sentence(step: Mapping[str, Any]) -> str:
    """A step in one line."""
    parts = [said(step, name) for name in ("chunks", "hits") if step.get(name)]
    parts += [f"{name} {', '.join(step[name])}" for name in ("preempted", "finished") if step.get(name)]
    parts += [f"tables {key}: {tables}" for key, tables in step.get("blocks", {}).items()]
    return "; ".join(parts) or "nothing"
