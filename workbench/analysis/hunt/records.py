"""A run as a trace, to be shown: every step up to the one that broke a law."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from workbench.analysis.hunt.drive import LiveRequest, Plan, PlannedChunk, Run, live_request
from workbench.analysis.hunt.target import MAX_STEPS, Target
from workbench.analysis.hunt.watch import Watch, whole_config
from workbench.trace import StepRecord, Trace, TraceMeta
from workbench.trace.kv_groups import read_groups
from workbench.trace.lines import RequestInfo
from workbench.trace.records import Chunk, Layout, TableChange


def record_run(target: Target, workload: dict[str, Any], laws: Collection[str] | None = None) -> Trace:
    """Run a workload again up to its fault, and keep the steps."""
    scheduler = target.make(workload["config"])
    config = whole_config(workload["config"])
    source = "simulation" if target.is_ours else f"{target.name} {target.version}".strip()
    trace = Trace(TraceMeta(source=source, config=config, versions={target.name.partition(":")[0]: target.version}))
    keeper = _Keeper(trace, Watch(scheduler, workload["config"], laws=laws, allow_exceptions=target.allows))
    run = Run(scheduler, workload, keeper)
    trace.end = "cut"  # unless it comes to its own end
    with contextlib.suppress(Exception):  # the law was broken, or the scheduler crashed: the finding says so
        trace.end = run.drive(MAX_STEPS)
    keeper.finish()
    if hasattr(scheduler, "close"):
        scheduler.close()
    infos = [live_request(index, given) for index, given in enumerate(workload["requests"])]
    for name in dict.fromkeys(name for record in keeper.records for name in record.arrived):
        trace.add_request(_info(next(info for info in infos if info.request_id == name)))
    for record in keeper.records:
        trace.append(record)
    return trace


class _Keeper:
    """Makes the record of each step when it is complete."""

    def __init__(self, trace: Trace, watch: Watch) -> None:
        self.records: list[StepRecord] = []
        self._watch = watch
        groups = read_groups(trace.config)
        self._layout = Layout.of(groups, trace.config["block_size"])
        self._in_flight: list[Any] = []
        self._before: dict[str, list[list[int]]] = {}
        self._changes: dict[int, dict[str, list[TableChange]]] = {}

    def added(self, request: LiveRequest) -> None:
        self._watch.added(request)

    def scheduled(self, run: Run, plan: Any) -> None:
        self._in_flight.append(plan)
        if isinstance(plan, Plan):
            self._changes[plan.step] = {chunk.request_id: self._change(plan, chunk) for chunk in plan.chunks}
        self._watch.scheduled(run, plan)

    def proposed(self, drafts: Any) -> None:
        """Drafts are in the records of the chunks that verify them."""

    def updated(self, run: Run, plan: Any, latest: Any, ended: Mapping[str, str]) -> None:
        self._watch.updated(run, plan, latest, ended)
        self._keep(self._in_flight.pop(0))

    def finish(self) -> None:
        """Keep the steps whose output never came in."""
        for plan in self._in_flight:
            self._keep(plan)

    def _change(self, plan: Plan, chunk: PlannedChunk) -> list[TableChange]:
        admitted = chunk.request_id in (*plan.admitted, *plan.resumed)
        tables = plan.tables[chunk.request_id]
        before = [] if admitted else self._before.get(chunk.request_id, [])
        self._before[chunk.request_id] = tables
        changes = []
        for index, table in enumerate(tables):
            old = before[index] if index < len(before) else []
            removed = tuple(place for place, block in enumerate(old) if block and not table[place])
            changes.append(TableChange(tuple(table[len(old) :]), removed))
        return changes

    def _keep(self, plan: Any) -> None:
        if not isinstance(plan, Plan):
            self.records.append(plan.to_record())
            return
        changes = self._changes.pop(plan.step)
        record = StepRecord(
            step=plan.step,
            chunks=tuple([_chunk(chunk, changes[chunk.request_id]) for chunk in plan.chunks]),
            arrived=plan.arrived,
            admitted=tuple(plan.admitted),
            resumed=tuple(plan.resumed),
            preempted=tuple(plan.preempted or ()),
            finished=tuple(plan.finish_reasons),
            aborted=plan.aborted,
            running=plan.running,
            waiting=plan.waiting,
            finish_reasons=plan.finish_reasons,
            free_blocks=plan.free_blocks,
            free_blocks_end=plan.free_blocks_end,
            token_budget=self._watch.limits.token_budget,
        )
        tables = [[(table, len(table)) for table in plan.tables[chunk.request_id]] for chunk in plan.chunks]
        record.attach_tables_of_groups(self._layout, tables)
        self.records.append(record)


def _chunk(chunk: PlannedChunk, changes: list[TableChange]) -> Chunk:
    arm = "decode" if not chunk.num_cached_tokens and chunk.num_tokens == 1 + len(chunk.drafts) else "new_final"
    return Chunk(
        chunk.request_id,
        chunk.start,
        chunk.num_tokens,
        chunk.is_partial_prefill,
        "intermediate" if chunk.is_partial_prefill else arm,  # type: ignore[arg-type]
        chunk.sampled,
        "complete" if chunk.samples else "token_budget",
        changes[0].new_block_ids,
        num_cached_tokens=chunk.num_cached_tokens,
        drafts=chunk.drafts,
        sampled_before=chunk.sampled_before,
        num_accepted=chunk.num_accepted,
        discarded=chunk.discarded,
        removed=changes[0].removed,
        other_groups=tuple(changes[1:]),
    )


def _info(request: LiveRequest) -> RequestInfo:
    prompt = tuple(request.token_ids)
    return RequestInfo(
        request.request_id,
        len(prompt),
        prompt,
        max_tokens=request.max_tokens,
        arrival_step=request.arrival_step,
        arrival_time=request.arrival_time,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
