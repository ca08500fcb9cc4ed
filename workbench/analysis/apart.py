"""Properties that set the slowest requests of a run apart: many of them have it, and few of the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.trace import Trace
from workbench.trace.readings.metrics import RequestMetrics, percentile
from workbench.trace.readings.metrics_collector import metrics

SLOWEST = 0.01
"""Share of the requests that are the slowest."""

MIN_SLOWEST = 5
"""Minimum number of the slowest: fewer show no pattern."""

MIN_OTHERS = 20
"""Minimum number of other requests to compare with."""

USUAL = 90.0
"""A property is unusual above this percentile of the other requests."""

TIMES_AS_OFTEN = 3.0
"""An unusual property sets the slowest apart if it is this many times as frequent among them."""

BURST_SECONDS = 2.0
"""Requests that arrive within this time before a request are its burst."""


@dataclass(frozen=True)
class Difference:
    """A property that many of the slowest requests have, and few of the others.

    Attributes:
        property: The property, such as "more than 1200 prompt tokens".
        num_slowest: Number of the slowest that have it, of
        of_slowest: the number of the slowest.
        num_others: Number of the others that have it, of
        of_others: the number of the others.
    """

    property: str
    num_slowest: int
    of_slowest: int
    num_others: int
    of_others: int

    def __str__(self) -> str:
        share = self.num_others / self.of_others
        return f"{self.num_slowest} of the {self.of_slowest} slowest {self.property}, {share:.0%} of the others do"


def apart(trace: Trace, by: str = "ttft", num_slowest: int | None = None) -> tuple[Difference, ...]:
    """Properties that set the slowest requests apart, the most telling first.

    Args:
        trace: A trace; one of few requests shows nothing.
        by: "ttft" or "e2e".
        num_slowest: Number of the slowest, fewer than `MIN_SLOWEST` show nothing; None for 1% of the requests, at least
            `MIN_SLOWEST`.

    Example:
        >>> from workbench import simulate
        >>> lengths = [900 if i % 10 == 0 else 20 for i in range(60)]
        >>> requests = [{"id": f"r{i}", "prompt": {"len": n}, "arrival_step": 30 * i} for i, n in enumerate(lengths)]
        >>> print(apart(simulate({"config": {"max_num_batched_tokens": 100}, "requests": requests}))[0])
        5 of the 5 slowest have more than 20 prompt tokens, 2% of the others do
    """
    unit = metrics(trace).summary.unit
    known = [
        (latency.seconds if unit == "s" else latency.steps, request)
        for request in metrics(trace).requests.values()
        if (latency := request.at_least(by)) is not None
    ]
    known.sort(key=lambda pair: -float(pair[0] or 0))
    if num_slowest is None:
        num_slowest = max(MIN_SLOWEST, round(SLOWEST * len(known)))
    slowest, others = ([request for _, request in part] for part in (known[:num_slowest], known[num_slowest:]))
    if num_slowest < MIN_SLOWEST or len(others) < MIN_OTHERS:
        return ()
    found = [
        difference
        for words, measure in _measures(trace, by)
        if (difference := _difference(words, measure, slowest, others)) is not None
    ]
    return tuple(sorted(found, key=lambda one: -one.num_slowest))


def _measures(trace: Trace, by: str) -> list[tuple[str, Callable[[RequestMetrics], int]]]:
    """Properties of a request, each with a sentence for a value above a limit."""
    unit = metrics(trace).summary.unit
    infos = trace.requests
    times = sorted(info.arrival_time if unit == "s" else info.arrival_step for info in infos.values())

    def burst(request: RequestMetrics) -> int:
        info = infos[request.request_id]
        at = info.arrival_time if unit == "s" else info.arrival_step
        return bisect_right(times, at) - bisect_left(times, at - BURST_SECONDS) - 1

    measures: list[tuple[str, Callable[[RequestMetrics], int]]] = [
        ("have more than {} prompt tokens", lambda request: request.num_prompt_tokens),
        (
            "have more than {} prompt tokens that were not in the prefix cache",
            lambda request: request.num_prompt_tokens - request.num_cached_tokens,
        ),
        (f"arrived within {BURST_SECONDS:g} {unit} after more than {{}} others", burst),
        ("were preempted more than {} times", lambda request: request.num_preemptions),
    ]
    if by == "e2e":
        measures.append(("have more than {} output tokens", lambda request: request.num_output_tokens))
    return measures


def _difference(
    words: str,
    measure: Callable[[RequestMetrics], int],
    slowest: Sequence[RequestMetrics],
    others: Sequence[RequestMetrics],
) -> Difference | None:
    of_others = sorted(map(measure, others))
    limit = round(percentile(of_others, USUAL))
    num_slowest = sum(measure(request) > limit for request in slowest)
    num_others = sum(value > limit for value in of_others)
    is_frequent = num_slowest / len(slowest) >= TIMES_AS_OFTEN * num_others / len(others)
    if num_slowest * 2 < len(slowest) or not is_frequent:
        return None
    return Difference(words.format(limit), num_slowest, len(slowest), num_others, len(others))
