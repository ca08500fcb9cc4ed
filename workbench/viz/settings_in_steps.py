"""Other settings for the run on display, counted in steps and KV blocks, when its times cannot be predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from workbench.base.text import settings_text
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.two_sides import UNEQUAL, most_blocks
from workbench.trace.trace import Trace

MAX_SHOWN = 5
"""Maximum number of settings beside the recorded one."""

ALWAYS = ("steps", "most KV blocks")
"""Counts that are shown even if they are 0 for every setting."""

NOTE = f"{UNEQUAL[0].upper()}{UNEQUAL[1:]}, so there are counts, and no latencies in steps."
"""The settings that `tune` varies are those that bound what a step holds."""


@dataclass(frozen=True)
class _Counted:
    """A simulated setting; ``changes`` are empty for the recorded one.

    Attributes:
        changes: The fields that differ from the recorded setting.
        counts: Numbers of steps, KV blocks and tokens by name.
        schedule: The chunks of all steps: equal ones show that the changes do nothing here.
    """

    changes: dict[str, Any]
    counts: dict[str, int]
    schedule: list[tuple[tuple[str, int, int], ...]]

    def values(self, counts: Iterable[str]) -> dict[str, str]:
        """Its numbers as texts, by column."""
        return {name: f"{self.counts[name]:,}" for name in counts if name in self.counts}


def settings_in_steps(
    trace: Trace, fork: Callable[..., Trace], reason: str, tell: Callable[[int, int], None]
) -> dict[str, Any]:
    """Simulate the run under settings that differ in one field each.

    Args:
        trace: The run.
        fork: Simulates it without times, such as ``Engine.fork``.
        reason: Why seconds cannot be predicted, as the beginning of a sentence.
        tell: Called with the number of settings simulated and to simulate; it may raise KeyboardInterrupt.

    Returns:
        The same as `workbench.viz.pareto.tuning_facts`, without pictures. Nobody is told to take a setting, because
        a target in seconds cannot be judged.

    Raises:
        ValueError: No request has a token yet.
    """
    from workbench.analysis.flags import Server
    from workbench.analysis.fork import why_hung

    settings = list(_settings(trace))
    found, hanging = [], []
    for place, changes in enumerate(settings):
        tell(place, len(settings))
        forked = fork(at_step=trace[0].step, **changes)
        if changes and why_hung(forked):
            hanging.append(settings_text(changes))
        elif (counted := _count(forked, changes)) is not None:
            found.append(counted)
    if not found or found[0].changes:
        raise ValueError("no request of this run has a token yet: let the engine run on")
    now = found[0]
    others = sorted(
        (each for each in found[1:] if each.schedule != now.schedule), key=lambda each: each.counts["steps"]
    )
    alike = [settings_text(each.changes) for each in found[1:] if each.schedule == now.schedule]
    server = Server.of(trace)
    named = [("now", now), *((f"{place}.", each) for place, each in enumerate(others[:MAX_SHOWN], 1))]
    shown = [each for _, each in named]
    columns = [name for name in now.counts if name in ALWAYS or any(each.counts[name] for each in shown)]
    counts = "this counts steps and KV blocks, and cannot say which setting meets a target in seconds"
    notes = [NOTE] if shown[1:] else []
    notes += [f"Requests would wait forever with {' or '.join(hanging)}."] if hanging else []
    notes += [f"Every step stays as it is with {' or '.join(alike)}."] if alike else []
    return {
        "verdict": f"{reason}: {counts}.",
        "costs": "",
        "losers": "",
        "notes": notes,
        "candidates": [
            {
                "words": words,
                "setting": settings_text(each.changes) or "as recorded, simulated",
                "values": each.values(columns),
                "flags": server.flags(each.changes),
            }
            for words, each in named
        ],
    }


def _settings(trace: Trace) -> Iterator[dict[str, Any]]:
    """The recorded setting, and every other value of the fields that `tune` varies, one at a time; none refused."""
    from workbench.analysis.flags import Server
    from workbench.analysis.fork import recorded_config
    from workbench.analysis.tune import default_grid

    yield {}
    config, server = recorded_config(trace), Server.of(trace)
    for name, values in default_grid(trace).items():
        settings = ({name: value} for value in values if value != getattr(config, name))
        yield from (changes for changes in settings if not server.refusal(changes))


def _count(simulated: Trace, changes: dict[str, Any]) -> _Counted | None:
    """The values of a simulated run; None for one in which no request gets a token."""
    summary = metrics(simulated).summary
    if summary.ttft.mean is None:
        return None
    blocks = most_blocks(simulated)
    return _Counted(
        changes,
        {
            "steps": summary.num_steps,
            **({"most KV blocks": blocks} if blocks is not None else {}),
            "preemptions": summary.num_preemptions,
            "cached tokens": summary.num_cached_tokens,
            "recomputed tokens": summary.num_recomputed_tokens,
        },
        [tuple((chunk.request_id, chunk.start, chunk.num_tokens) for chunk in record.chunks) for record in simulated],
    )
