"""Other settings for the run on display, counted in steps and KV blocks, when its times cannot be predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from workbench.trace.readings.metrics import number, percent
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.trace import Trace

MAX_SHOWN = 5
"""Maximum number of settings beside the recorded one."""

NOTE = (
    "Steps do not last equally long: a smaller token budget takes more and shorter ones. Compare steps between "
    "settings of one budget, and KV blocks between all."
)


@dataclass(frozen=True)
class _Counted:
    """A simulated setting; ``changes`` are empty for the recorded one."""

    changes: dict[str, Any]
    mean: float
    p99: float
    longest: float
    num_steps: int
    peak_kv_use: float | None

    @property
    def values(self) -> dict[str, str]:
        steps = {"mean TTFT": self.mean, "P99 TTFT": self.p99, "longest pause": self.longest}
        texts = {f"{name} (steps)": number(value) for name, value in steps.items()}
        return {**texts, "steps": f"{self.num_steps:,}", "most KV blocks": percent(self.peak_kv_use)}


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
        The same as `workbench.viz.pareto.tuning_facts`, without a picture. Nobody is told to take a setting, because
        a target in seconds cannot be judged.

    Raises:
        ValueError: No request has a token yet.
    """
    from workbench.analysis.flags import Server

    settings = list(_settings(trace))
    found = []
    for place, changes in enumerate(settings):
        tell(place, len(settings))
        if (counted := _count(fork(at_step=trace[0].step, **changes), changes)) is not None:
            found.append(counted)
    if not found or found[0].changes:
        raise ValueError("no request of this run has a token yet: let the engine run on")
    now, others = found[0], sorted(found[1:], key=lambda each: (each.p99, each.mean, each.num_steps))
    server = Server.of(trace)
    named = [("now", now), *((f"{place}.", each) for place, each in enumerate(others[:MAX_SHOWN], 1))]
    counts = "this counts steps and KV blocks, and cannot say which setting meets a target in seconds"
    return {
        "verdict": f"{reason}: {counts}.",
        "losers": "",
        "notes": [NOTE],
        "candidates": [
            {
                "words": words,
                "setting": ", ".join(f"{name}={value}" for name, value in each.changes.items())
                or "as recorded, simulated",
                "values": each.values,
                "flags": server.flags(each.changes),
            }
            for words, each in named
        ],
    }


def _settings(trace: Trace) -> Iterator[dict[str, Any]]:
    """The recorded setting, and every other value of the fields that `tune` varies, one at a time."""
    from workbench.analysis.fork import recorded_config
    from workbench.analysis.tune import default_grid

    yield {}
    config = recorded_config(trace)
    for name, values in default_grid(trace).items():
        yield from ({name: value} for value in values if value != getattr(config, name))


def _count(simulated: Trace, changes: dict[str, Any]) -> _Counted | None:
    """The values of a simulated run; None for one in which no request gets a token."""
    found = metrics(simulated)
    firsts, summary = found.summary.ttft, found.summary
    if firsts.mean is None or firsts.p99 is None:
        return None
    longest = max((gap for request in found.requests.values() for gap in request.gaps("steps")), default=0.0)
    return _Counted(changes, firsts.mean, firsts.p99, float(longest), len(simulated), summary.peak_kv_use)
