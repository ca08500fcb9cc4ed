"""Predicted values with the range that the measured ones are expected in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from workbench.analysis.check import shown
from workbench.analysis.rerun import Outcome
from workbench.trace import Trace

NUM_DRAWS = 8
"""Number of repeated simulations whose range an interval holds."""

RANGES = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847}
"""Expected range of some draws from a normal distribution, in standard deviations, by their number."""

MIN_SPREAD = 0.02
"""Smallest relative half-width of an interval: two runs of one server differ by that much."""


AGREE = 0.85
"""Share of repeated simulations that have the direction of a change of which it is certain."""

FIRST = ("ttft_mean", "ttft_p99", "itl_mean", "output_throughput")
"""Values in the repr of a prediction."""


@dataclass(frozen=True)
class Interval:
    """A predicted value, with the range that the measured one is expected in.

    Attributes:
        value: The prediction in seconds; tokens per second for "output_throughput".
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """A run under one configuration.

    Attributes:
        changes: The changed fields; empty for the unchanged configuration.
        outcome: The simulated run, without noise.
        intervals: Every value of this run by name, with its interval.
        draws: Every value by name in each of the repeated simulations; the k-th of all predictions share one draw.
        notes: Sentences that limit its use, such as a note on an extrapolation.
        seen: The values up to the end of a recording in which requests had not ended; empty if all had.
        obstacle: Why nobody can use the setting, which is the first of the notes: it would hang, or the server refuses
            it; "" for nothing.
    """

    changes: Mapping[str, Any]
    outcome: Outcome
    intervals: Mapping[str, Interval]
    draws: Mapping[str, list[float]]
    notes: tuple[str, ...]
    _simulate: Callable[..., Trace]
    seen: Mapping[str, float] = field(default_factory=dict)
    obstacle: str = ""

    def __getitem__(self, name: str) -> Interval:
        return self.intervals[name]

    def __repr__(self) -> str:
        """One line: the changes, and the values that people ask for first with their intervals."""
        changes = ", ".join(f"{name}={value!r}" for name, value in self.changes.items()) or "unchanged"
        known = [name for name in FIRST if name in self.intervals]
        ranges = (
            f"{name} {shown(name, each.value)} ({shown(name, each.low)} to {shown(name, each.high)})"
            for name, each in zip(known, map(self.intervals.__getitem__, known))
        )
        return f"Prediction({changes}: {', '.join(ranges)}; {len(self.intervals)} values in .intervals)"

    @cached_property
    def trace(self) -> Trace:
        """The simulated run, step by step, without noise."""
        return self._simulate(**self.changes)


def interval_of(value: float, draws: Sequence[float], error: float) -> Interval:
    """A value with the range of it, of NUM_DRAWS draws, and of it without the error of the unchanged prediction.

    Fewer draws span less: their distances from the mean are enlarged by the ratio of the expected ranges.

    Args:
        value: The value.
        draws: The value in each draw.
        error: Relative error of the unchanged prediction.
    """
    known = [one for one in draws if math.isfinite(one)]
    if known:
        mean = fmean(known)
        factor = RANGES[NUM_DRAWS] / RANGES.get(len(known), RANGES[NUM_DRAWS])
        known = [mean + factor * (one - mean) for one in known]
    corrected = value / (1 + error) if error > -0.9 else value
    values = (value, corrected, *known)
    return Interval(value, min(values) * (1 - MIN_SPREAD), max(values) * (1 + MIN_SPREAD))


def widened(intervals: Mapping[str, Interval], others: Mapping[str, float]) -> dict[str, Interval]:
    """Intervals that also hold what another simulation of the same setting gives.

    Args:
        intervals: The intervals.
        others: The values of the other one.
    """
    wider = dict(intervals)
    for name, known in intervals.items():
        if math.isfinite(other := others.get(name, math.nan)):
            wider[name] = Interval(known.value, min(known.low, other), max(known.high, other))
    return wider


def range_of(value: float, draws: Sequence[float]) -> Interval:
    """A value that is not a time, and its range in the draws."""
    return Interval(value, min(value, *draws), max(value, *draws)) if draws else Interval(value, value, value)


def is_certain(pairs: Sequence[tuple[float, float]], least: float = 0.0) -> bool:
    """Whether the direction of a change from one setting to another is certain.

    Args:
        pairs: The value under both settings, without noise and then in each of the repeated simulations.
        least: Relative change up to which not even its direction counts.

    Example:
        >>> is_certain([(10.0, 8.0), (11.0, 8.5), (9.0, 8.8)]), is_certain([(10.0, 8.0), (9.0, 9.1)])
        (True, False)
    """
    first, *draws = (after / before - 1 if before else math.inf * after if after else 0.0 for before, after in pairs)
    return abs(first) > least and (
        not draws or fmean(math.copysign(one, one * first) > least for one in draws) >= AGREE
    )
