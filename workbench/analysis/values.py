"""The values of a run that predictions and targets name, such as "ttft_p99"."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from workbench.trace import Trace, TraceError
from workbench.trace.readings.censored import Times
from workbench.trace.readings.metrics import TraceMetrics, percentile
from workbench.trace.readings.metrics_collector import metrics as measured
from workbench.trace.readings.ordered import Ordered
from workbench.trace.readings.run_clock import RunClock
from workbench.trace.readings.two_sides import unserved_values

VALUES = ("ttft", "itl", "tpot", "queue", "e2e")
"""Latencies that are predicted, each as mean, p50, p90, p95, p99 and max; and "duration", which includes idle time, and
"output_throughput", which does not."""

OF_IDLE = "duration includes idle time, output_throughput does not"
"""The note on these two values of a run that has any."""

OPEN = ("ttft", "queue", "e2e")
"""Latencies whose values are estimates if some had not ended: see `workbench.trace.readings.censored`.

A request that was aborted has no end, and without a first token it has waited for one until then: its times count as
those of a request that is cut off by the end of a recording do."""

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def statistics_of(
    columns: Mapping[str, Sequence[float] | Counter[float]], open: Mapping[str, Sequence[float]] = MappingProxyType({})
) -> dict[str, float]:
    """Mean, percentiles and maximum of each latency, by names such as "ttft_p99".

    Args:
        columns: The latencies by name, or the number of each; one of which none has ended is left out.
        open: The times so far of those that had not ended.
    """
    values: dict[str, float] = {}
    for name, seconds in columns.items():
        if seconds and open.get(name):
            times = Times(seconds, open[name])
            percentiles = [times.percentile(percent) for percent in (50, 90, 95, 99, 100)]
            values |= {f"{name}_{key}": value for key, value in zip(STATISTICS, (times.mean or 0.0, *percentiles))}
        elif seconds:
            ordered = Ordered(seconds)
            percentiles = [percentile(ordered, percent) for percent in (50, 90, 95, 99, 100)]
            values |= {f"{name}_{key}": value for key, value in zip(STATISTICS, (fmean(ordered), *percentiles))}
    return values


class Seen(NamedTuple):
    """The moments of a simulated request in seconds; None for what did not happen.

    Attributes:
        arrival: Its arrival.
        scheduled: The start of the step that admitted it.
        first_token: Its first token.
        end: Its end.
        tokens: All its tokens.
        is_aborted: Whether it was aborted then.
    """

    arrival: float
    scheduled: float | None
    first_token: float | None
    end: float | None
    tokens: Sequence[float]
    is_aborted: bool = False


def values_until(requests: Iterable[Seen], until: float = math.inf) -> dict[str, float]:
    """Latencies by name, of what had happened up to a time.

    Args:
        requests: The requests.
        until: The time, at which a recording may have ended before its requests did.
    """
    columns: dict[str, list[float]] = {name: [] for name in VALUES}
    gaps: Counter[float] = Counter()
    open: dict[str, list[float]] = {name: [] for name in OPEN}
    for request in requests:
        if request.arrival > until:
            continue
        last = until if request.end is None else min(request.end, until)
        answered = None if request.is_aborted else request.end
        for name, end in (("ttft", request.first_token), ("queue", request.scheduled), ("e2e", answered)):
            if end is not None and end <= until:
                columns[name].append(end - request.arrival)
            elif last < math.inf:
                open[name].append(last - request.arrival)
        tokens = [token for token in request.tokens if token <= until]
        if len(tokens) > 1:
            columns["tpot"].append((tokens[-1] - tokens[0]) / (len(tokens) - 1))
        gaps.update([after - before for before, after in pairwise(tokens)])
    return statistics_of(columns | {"itl": gaps}, open)


def value_names() -> tuple[str, ...]:
    """Names of all predicted values."""
    return (*(f"{value}_{statistic}" for value in VALUES for statistic in STATISTICS), "duration", "output_throughput")


def values_of(
    trace: Trace, request_ids: Collection[str] | None = None, metrics: TraceMetrics | None = None
) -> dict[str, float]:
    """The latencies of a run in seconds, by name: "ttft_mean", "itl_p99", "duration" and so on.

    Args:
        trace: A trace with a clock.
        request_ids: Requests to count; None for all.
        metrics: Those of the trace, if the caller has them; None for those that are kept with the trace.

    Raises:
        TraceError: The trace has no clock.
    """
    return latency_values(metrics or measured(trace), request_ids)


def latency_values(metrics: TraceMetrics, request_ids: Collection[str] | None = None) -> dict[str, float]:
    """The values of ``values_of``, for the metrics of one trace or of several.

    Raises:
        TraceError: The run has no clock.
    """
    if metrics.summary.unit != "s":
        raise TraceError("the trace has no clock: it holds steps, but not their times")
    values = statistics_of(_latencies(metrics, request_ids), _open(metrics, request_ids))
    return values | length_values(metrics.summary.clock, metrics.summary.num_output_tokens) | counts_of(metrics)


def length_values(clock: RunClock, num_output_tokens: int) -> dict[str, float]:
    """The values of a run that follow from its clock: "duration" with idle time, "output_throughput" without it."""
    rate = num_output_tokens / clock.at_work if clock.at_work > 0 else 0.0
    return {"duration": clock.duration, "output_throughput": rate}


def counts_of(metrics: TraceMetrics) -> dict[str, float]:
    """The values of a run that are not times, by name: steps, preemptions, UNSERVED, hit rate, use of KV blocks."""
    summary = metrics.summary
    counts = {
        "num_steps": float(summary.num_steps),
        "num_preemptions": float(summary.num_preemptions),
        **unserved_values(metrics.requests.values()),
        "hit_rate": summary.hit_rate or 0.0,
    }
    uses = {"mean_kv_use": summary.mean_kv_use, "peak_kv_use": summary.peak_kv_use}
    return counts | {name: use for name, use in uses.items() if use is not None and math.isfinite(use)}


def _open(metrics: TraceMetrics, request_ids: Collection[str] | None) -> dict[str, list[float]]:
    """The times of what had not ended, so far or until an abort."""
    requests = [each for each in metrics.requests.values() if request_ids is None or each.request_id in request_ids]
    return {
        name: [latency.seconds or 0.0 for request in requests if (latency := request.unended(name)) is not None]
        for name in OPEN
    }


def _latencies(metrics: TraceMetrics, request_ids: Collection[str] | None) -> dict[str, list[float] | Counter[float]]:
    columns: dict[str, list[float]] = {name: [] for name in VALUES}
    gaps: Counter[float] = Counter()
    for request in metrics.requests.values():
        if request_ids is not None and request.request_id not in request_ids:
            continue
        for name in ("ttft", "queue", "e2e"):
            latency = getattr(request, name)
            if latency is not None and request.unended(name) is None:
                columns[name].append(latency.seconds)
        if request.decode is not None and request.num_output_tokens > 1:
            assert request.decode.seconds is not None  # the trace has a clock
            columns["tpot"].append(request.decode.seconds / (request.num_output_tokens - 1))
        gaps.update(request.gaps("s"))
    return columns | {"itl": gaps}
