"""The numbers of one layout of a fleet, of one run or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from workbench.analysis.check import shown
from workbench.analysis.fleet.fleet_run import FleetRun
from workbench.analysis.tuning import score
from workbench.analysis.values import latency_values
from workbench.trace.readings.metrics import TraceMetrics


@dataclass(frozen=True)
class FleetRow:
    """The numbers of one layout.

    Attributes:
        router: Name of the router.
        replicas: Number of replicas.
        values: Latencies in seconds and throughputs, by the names of `workbench.analysis.values.value_names`.
        hit_rate: Share of the prompt tokens of admitted requests that were found in prefix caches.
        goodput: Share of the requests that keep the target's limits on ttft, tpot and e2e, each by itself.
        largest_share: Share of the requests that went to the busiest replica.
        score: The worst ratio of a value to its limit; 1 or less meets the target.
        load: Multiple of the load of the file.
        rate: Requests that arrive in a second, as `workbench.simulation.summary.arrival_rate` counts them; 0 if all
            arrive together, None for sessions.
        low: The smallest of each value over the runs.
        high: The largest.
        num_output_tokens: Output tokens of all requests.
        idle: Seconds in which no replica had work; `values` has "duration" with them, "output_throughput" without.
        runs: Number of runs whose mean the values are; they differ in the noise of steps and the times of other users.
    """

    router: str
    replicas: int
    values: dict[str, float]
    hit_rate: float
    goodput: float
    largest_share: float
    score: float
    load: float = 1.0
    rate: float | None = 0.0
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    num_output_tokens: float = 0.0
    idle: float = 0.0
    runs: int = 1

    @property
    def meets(self) -> bool:
        """Whether the target is met."""
        return self.score <= 1

    def cost(self, price: float) -> float:
        """Cost of a million output tokens, at a price of a replica for an hour, with or without work."""
        return price * self.replicas * self.values["duration"] / 3600 / self.num_output_tokens * 1e6

    @classmethod
    def of(cls, run: FleetRun, slo: Mapping[str, float], load: float = 1.0, rate: float | None = 0.0) -> FleetRow:
        """The numbers of a run, at a multiple of the load of the file, and at a rate of arrivals."""
        metrics = run.metrics()
        values = latency_values(metrics)
        return cls(
            router=run.router,
            replicas=len(run.traces),
            values=values,
            hit_rate=metrics.summary.hit_rate or 0.0,
            goodput=_goodput(metrics, slo),
            largest_share=max(run.shares),
            score=score(values, slo) if slo else 0.0,
            load=load,
            rate=rate,
            low=values,
            high=values,
            num_output_tokens=metrics.summary.num_output_tokens,
            idle=metrics.summary.clock.idle,
        )

    @classmethod
    def mean(cls, rows: Sequence[FleetRow], slo: Mapping[str, float]) -> FleetRow:
        """One row for several runs of a layout."""
        first, *more = rows
        if not more:
            return first
        names = [name for name in first.values if all(name in row.values for row in rows)]
        values = {name: fmean(row.values[name] for row in rows) for name in names}
        return replace(
            first,
            values=values,
            hit_rate=fmean(row.hit_rate for row in rows),
            goodput=fmean(row.goodput for row in rows),
            largest_share=fmean(row.largest_share for row in rows),
            score=score(values, slo) if slo else 0.0,
            num_output_tokens=fmean(row.num_output_tokens for row in rows),
            idle=fmean(row.idle for row in rows),
            low={name: min(row.low[name] for row in rows) for name in names},
            high={name: max(row.high[name] for row in rows) for name in names},
            runs=sum(row.runs for row in rows),
        )

    def shown(self, name: str) -> str:
        """A value, with its range if there were several runs."""
        if name not in self.values:
            return "-"
        value, *ends = (shown(name, values[name]) for values in (self.values, self.low, self.high))
        return f"{value} [{' to '.join(ends)}]" if self.runs > 1 else value


def _goodput(metrics: TraceMetrics, slo: Mapping[str, float]) -> float:
    limits: dict[str, float] = {}
    for name, limit in slo.items():
        kind = name.rpartition("_")[0]
        limits[kind] = min(limit, limits.get(kind, limit))
    good = 0
    for request in metrics.requests.values():
        seconds = {"ttft": request.ttft, "e2e": request.e2e}
        keeps = all(
            (latency := seconds[kind]) is not None and (latency.seconds or 0.0) <= limit
            for kind, limit in limits.items()
            if kind in seconds
        )
        if keeps and "tpot" in limits and request.decode is not None and request.num_output_tokens > 1:
            keeps = (request.decode.seconds or 0.0) / (request.num_output_tokens - 1) <= limits["tpot"]
        good += keeps
    return good / len(metrics.requests) if metrics.requests else 0.0
