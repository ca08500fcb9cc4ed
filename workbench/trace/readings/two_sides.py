"""Two runs of the same requests: both values of a request and of a measure, and the change as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from workbench.base.text import significant
from workbench.trace.readings.metrics import amount, number, percentile
from workbench.trace.readings.metrics_collector import metrics

if TYPE_CHECKING:
    from workbench.trace.readings.divergence import Divergence, TokenDifference
    from workbench.trace.readings.metrics import RequestMetrics
    from workbench.trace.trace import Trace

BOUNDS = frozenset({"max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold"})
"""The settings that bound what a step holds: the token budget, the number of seats and the chunk cap."""

UNEQUAL = "steps of two token budgets, numbers of seats or chunk caps do not last equally long"
"""Why latencies in steps are not compared between two values of one of BOUNDS."""

UNEQUAL_STEPS = f"{UNEQUAL}, so this compares counts, and no latencies in steps"
"""The note of a comparison without times of such runs."""

ROUNDING = 1e-9
"""A change by this share of the values is rounding: two sums of the same durations differ by less."""

UNSERVED = {"num_no_first_token": "requests without a first token", "num_aborted": "aborted requests"}
"""Numbers of requests that did not get what they asked for, by their names among values, with the words of a reader."""

LITTLE_CHANGE = 0.03
"""Relative change of a measure from which on a verdict names it."""

NOTHING = "nothing changes, every step is as before"
"""The verdict of two runs with equal steps, and with equal times if they have any."""


def minus(x: float, y: float) -> float:
    """A change, 0 if it is no more than rounding."""
    return x - y if abs(x - y) > ROUNDING * max(abs(x), abs(y)) else 0.0


def change_of(x: float | None, y: float | None) -> float | None:
    """The same of values that may be missing."""
    return None if x is None or y is None else minus(x, y)


class Measure(NamedTuple):
    """A measure of two runs.

    Attributes:
        name: Such as "P99 TTFT", or "output tokens per s".
        a: Its value in the first run.
        b: The same in the second run.
        unit: "s" or "steps" of a latency, "" of a number.
    """

    name: str
    a: float
    b: float
    unit: str

    def values(self) -> tuple[str, str]:
        """Both values as text, with their unit."""
        first, second = ((amount(each, self.unit) if self.unit else number(each)) for each in (self.a, self.b))
        return first, second

    @property
    def is_of_unserved(self) -> bool:
        """Whether it is a number of UNSERVED requests."""
        return self.name in UNSERVED.values()

    @property
    def share(self) -> float:
        """The relative change from the first run to the second; 0 if it is rounding, or reads as none."""
        change = minus(self.b, self.a)
        if not change or len(set(self.values())) == 1:
            return 0.0
        return change / self.a if self.a else math.inf

    @property
    def words(self) -> str:
        """The change from the first run to the second, such as "12% shorter"; "no change" if it is rounding.

        Example:
            >>> Measure("mean TTFT", 2.0, 1.5, "s").words, Measure("output tokens per s", 10.0, 30.0, "").words
            ('25% shorter', '3 times as many')
        """
        if not self.share:
            return "no change"
        if not self.a:
            return "0 before"
        ratio = self.b / self.a
        more, fewer, times = ("longer", "shorter", "long") if self.unit else ("more", "fewer", "many")
        if ratio >= 2:
            return f"{significant(ratio)} times as {times}"
        share = f"{abs(ratio - 1):.0%}" if abs(ratio - 1) >= 0.01 else "less than 1%"
        return f"{share} {more if ratio > 1 else fewer}"


def extremes(measures: Sequence[Measure], least: float = LITTLE_CHANGE) -> str:
    """Of times and rates of two runs, the one that gets worst and the one that gets best, if they change enough.

    Changed numbers of UNSERVED requests come first: the times of the others say nothing about them. The run with more
    of them is better in no measure, as its values are those of fewer requests.

    Args:
        measures: The measures.
        least: Relative change from which on a measure is named.

    Example:
        >>> extremes([Measure("mean TTFT", 2.0, 1.5, "s"), Measure("longest pause", 0.1, 0.3, "s")])
        'worse: longest pause 100 ms -> 300 ms (3 times as long); better: mean TTFT 2 s -> 1.5 s (25% shorter)'
        >>> extremes([Measure("mean TTFT", 2.0, 2.02, "s"), Measure("longest pause", 0.1, 0.1, "s")])
        'neither mean TTFT nor longest pause changes by 3% or more'
    """
    changed = [each for each in measures if each.is_of_unserved and each.share]
    unserved = [f"{each.name} {' -> '.join(each.values())}" for each in changed]
    measures = [each for each in measures if not each.is_of_unserved]
    if not measures:
        return "; ".join(unserved)

    def loss(each: Measure) -> float:
        share = each.share
        return share if each.unit else Measure("", each.b, each.a, "").share if share else 0.0

    ends = {"worse": max(measures, key=loss), "better": min(measures, key=loss)}
    if changed:
        ends.pop("better" if served_by_b(changed) == "fewer" else "worse")
    told = [
        f"{word}: {each.name} {' -> '.join(each.values())} ({each.words})"
        for word, each in ends.items()
        if (loss(each) if word == "worse" else -loss(each)) >= least
    ]
    names = [each.name for each in measures]
    neither = f"neither {', '.join(names[:-1])} nor {names[-1]} changes" if names[1:] else f"{names[0]} does not change"
    by = f" by {least:.0%} or more" if any(each.share for each in measures) else ""
    return "; ".join([*unserved, *told]) or f"{neither}{by}"


@dataclass(frozen=True)
class RequestComparison:
    """One request in both traces.

    Deltas are b minus a, so a negative delta is an improvement in b; None if one of the values is missing.

    Attributes:
        request_id: The request.
        a: Its metrics in the first trace.
        b: Its metrics in the second trace.
        divergence: The first step that scheduled it differently; None if there is no such step.
        token_difference: The first output token that differs; None if the outputs agree up to the shorter one.
        ttft_a: Time to first token in the first trace, in the comparison's unit.
        ttft_b: The same in the second trace.
        itl_a: Mean inter-token latency in the first trace.
        itl_b: The same in the second trace.
    """

    request_id: str
    a: RequestMetrics
    b: RequestMetrics
    divergence: Divergence | None
    token_difference: TokenDifference | None
    ttft_a: float | None
    ttft_b: float | None
    itl_a: float | None
    itl_b: float | None

    @property
    def ttft_delta(self) -> float | None:
        """Change of the time to first token."""
        return change_of(self.ttft_b, self.ttft_a)

    @property
    def lost_first_token(self) -> int:
        """1 if only the first run gives it a first token, -1 if only the second one does, else 0."""
        return (self.b.waited is not None) - (self.a.waited is not None)

    @property
    def itl_delta(self) -> float | None:
        """Change of the mean inter-token latency."""
        return change_of(self.itl_b, self.itl_a)

    @property
    def waste_delta(self) -> int:
        """Change of the number of tokens recomputed."""
        return self.b.num_recomputed_tokens - self.a.num_recomputed_tokens


def has_unequal_steps(a: Trace, b: Trace) -> bool:
    """Whether a number of steps of one run is another time in the other.

    So it is if they differ in one of BOUNDS, and in what a step holds: a bound that no step reaches changes nothing.
    """
    bounds = [(a.config.get(name), b.config.get(name)) for name in BOUNDS]
    if not any(None not in both and both[0] != both[1] for both in bounds):
        return False
    held = [[(len(record.chunks), record.num_tokens) for record in run] for run in (a, b)]
    return held[0] != held[1]


def most_blocks(run: Trace) -> int | None:
    """The largest number of KV blocks that were in use in a step; None if the size of the pool is not known."""
    if not run.num_blocks:
        return None
    return run.num_blocks - 1 - min((record.free_blocks for record in run), default=run.num_blocks - 1)


def counts_of(a: Trace, b: Trace) -> list[Measure]:
    """The numbers of two runs that are not times: of steps, of KV blocks in use, of preemptions and of tokens."""
    blocks, sides = (most_blocks(a), most_blocks(b)), [metrics(run).summary for run in (a, b)]
    rows = {
        "steps": [side.num_steps for side in sides],
        "most KV blocks in use": blocks,
        "preemptions": [side.num_preemptions for side in sides],
        "cached tokens": [side.num_cached_tokens for side in sides],
        "recomputed tokens": [side.num_recomputed_tokens for side in sides],
    }
    return [Measure(name, float(x), float(y), "") for name, (x, y) in rows.items() if x is not None and y is not None]


def measures_of(a: Trace, b: Trace, requests: Sequence[RequestComparison], unit: str) -> list[Measure]:
    """Mean and P99 of the time to first token and of the gaps between tokens, and the output per second or step.

    All gaps of all requests count alike, as in the summary of a run: a request with many tokens has many of them.

    Without times, runs whose steps do not last equally long have counts alone: see `has_unequal_steps`.

    The seconds are those of both runs without idle time if one of them has any, and the name of the measure says so.

    Args:
        a: The first run.
        b: The second run.
        requests: The requests of both.
        unit: Unit of latencies: "s" or "steps".

    Returns:
        Those that both runs have, and numbers of UNSERVED requests that differ.
    """
    unserved = unserved_of(*(unserved_values([getattr(each, side) for each in requests]) for side in "ab"))
    if unit == "steps" and has_unequal_steps(a, b):
        return [*counts_of(a, b), *unserved]
    found: list[Measure] = []

    def add(name: str, sides: Iterable[float], unit: str) -> None:
        a, b = sides
        found.append(Measure(name, a, b, unit))

    if ttft := _of_both((each.ttft_a, each.ttft_b) for each in requests):
        add("mean TTFT", map(fmean, ttft), unit)
        add("P99 TTFT", (percentile(sorted(side), 99) for side in ttft), unit)
    sides = [[each.a for each in requests], [each.b for each in requests]]
    gaps = [sorted(gap for request in side for gap in request.gaps(unit)) for side in sides]
    if all(gaps):
        add("mean ITL", map(fmean, gaps), unit)
        add("P99 ITL", (percentile(side, 99) for side in gaps), unit)
    outputs = [sum(request.num_output_tokens for request in side) for side in sides]
    clocks = [metrics(run).summary.clock for run in (a, b)]
    lengths = [clock.at_work for clock in clocks] if unit == "s" else [float(len(run)) for run in (a, b)]
    if all(length > 0 for length in lengths):
        rates = (tokens / length for tokens, length in zip(outputs, lengths))
        idle = " without idle time" if unit == "s" and any(clock.idle for clock in clocks) else ""
        add(f"output tokens per {'s' if unit == 's' else 'step'}{idle}", rates, "")
    return [*found, *unserved]


def unserved_values(requests: Iterable[RequestMetrics]) -> dict[str, float]:
    """The numbers of UNSERVED among some requests, by name."""
    found = [(each.waited is not None, each.finish_reason == "abort") for each in requests]
    return {name: float(sum(each[place] for each in found)) for place, name in enumerate(UNSERVED)}


def unserved_of(a: Mapping[str, float], b: Mapping[str, float]) -> list[Measure]:
    """The numbers of UNSERVED requests of two runs, by name, that differ."""
    return [
        Measure(words, a[name], b[name], "")
        for name, words in UNSERVED.items()
        if name in a and name in b and a[name] != b[name]
    ]


def served_by_b(unserved: Sequence[Measure]) -> str:
    """The word "fewer" or "more" if another number of requests has latencies in the second of two runs; "" for as many.

    Args:
        unserved: The numbers that differ, see `unserved_of`.
    """
    return "" if not unserved else "fewer" if any(each.b > each.a for each in unserved) else "more"


def longest_of(requests: Sequence[RequestComparison], unit: str) -> list[Measure]:
    """The longest time to first token and the longest gap between two tokens of both runs; those that both have.

    Args:
        requests: The requests of both.
        unit: Unit of the times: "s" or "steps".
    """
    ttft = _of_both((each.ttft_a, each.ttft_b) for each in requests)
    sides = [each.a for each in requests], [each.b for each in requests]
    gaps = [max((gap for request in side for gap in request.gaps(unit)), default=None) for side in sides]
    found = [Measure("longest TTFT", max(ttft[0]), max(ttft[1]), unit)] if ttft else []
    if gaps[0] is not None and gaps[1] is not None:
        found.append(Measure("longest pause", gaps[0], gaps[1], unit))
    return found


def _of_both(values: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, ...]]:
    """The values of each side, of the requests that have both; empty if there is none."""
    pairs = [(a, b) for a, b in values if a is not None and b is not None]
    return list(zip(*pairs))
