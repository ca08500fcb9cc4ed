"""The number of replicas that a load needs for a target, and the router that serves it best."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.analysis.fork import recorded_config, recorded_requests
from workbench.analysis.predict import latency_values
from workbench.analysis.tune import read_slo, score
from workbench.config import EngineConfig
from workbench.costs.cost_model import CostModel
from workbench.fleet.load import scale_load
from workbench.fleet.routers import Router
from workbench.fleet.simulate import FleetRun, run_fleet
from workbench.formats.access_log import is_access_log, read_access_log
from workbench.ground.field_checks import integer
from workbench.readings.metrics import TraceMetrics, number, percent
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival
from workbench.simulation.limits import MAX_STEPS
from workbench.simulation.simulate import next_token
from workbench.simulation.workload import read_simulation
from workbench.trace import Trace

MAX_REPLICAS = 256
"""The largest fleet that ``size`` tries by default."""


@dataclass(frozen=True, eq=False)
class Demand:
    """The load of a fleet, and the make of one replica.

    Attributes:
        arrivals: The requests, with times.
        config: Configuration of a replica.
        cost_model: Duration of a replica's step.
        source: The origin of the durations: they hold for that hardware alone.
        sample_token: Gives the tokens of a request.
    """

    arrivals: list[Arrival]
    config: EngineConfig
    cost_model: CostModel
    source: str
    sample_token: Callable[[Request], int] = next_token

    @classmethod
    def read(
        cls,
        source: Mapping[str, Any] | str | os.PathLike[str],
        *,
        cost_from: Trace | None = None,
        config: Mapping[str, Any] | None = None,
        load: float = 1.0,
        how: str = "repeated",
        seed: int = 0,
    ) -> Demand:
        """The demand that a file describes.

        Args:
            source: A workload, a recording, or an access log or public trace (`workbench.formats.access_log`).
            cost_from: Recording to fit the duration of a step to, instead of the workload's cost model; a recording
                that is the source is fitted to itself.
            config: Changes of the configuration.
            load: See `workbench.fleet.load.scale_load`, like the arguments below.
            how: "repeated" or "compressed".
            seed: Seed of the requests that are left out or come once more.

        Raises:
            ValueError: The file is malformed, or nothing says how long a step takes.
        """
        sample_token: Callable[[Request], int] = next_token
        told = "the workload's cost_model"
        if isinstance(source, Mapping) or Path(source).suffix == ".json":
            base, given, model = read_simulation(source, CostModel.fit(cost_from)[0] if cost_from else None)
        elif is_access_log(source):
            base, given, model = EngineConfig(), read_access_log(source), None
        else:
            trace = Trace.load(source)
            cost_from = cost_from or trace
            base, model = recorded_config(trace), None
            given, sample_token = recorded_requests(trace)
        if cost_from is not None:
            model, report = CostModel.fit(cost_from)
            told = f"a fit to {cost_from.meta.source}; on held-out steps the median error is {report.median_error:.1%}"
        if model is None:
            raise ValueError(
                "nothing says how long a step takes: give a recording of such a server to fit it to (--cost-from), or "
                'a workload with a cost_model, such as {"fixed": 0.01}'
            )
        arrivals = scale_load(given, load, how, seed) if load != 1.0 else list(given)
        return cls(arrivals, base.replace(**(config or {})), model, told, sample_token)

    def run(self, replicas: int, router: str | Router, seed: int = 0) -> FleetRun:
        """The demand, served by so many replicas."""
        return run_fleet(
            self.arrivals,
            [self.config] * replicas,
            [self.cost_model] * replicas,
            router=router,
            sample_token=self.sample_token,
            seed=seed,
            max_steps=100 * MAX_STEPS,
        )


@dataclass(frozen=True)
class FleetRow:
    """The numbers of one layout.

    Attributes:
        router: Name of the router.
        replicas: Number of replicas.
        values: Latencies in seconds and throughputs, by the names of `workbench.analysis.predict.value_names`.
        hit_rate: Share of the prompt tokens that were found in prefix caches.
        goodput: Share of the requests that keep the target's limits on ttft, tpot and e2e, each by itself.
        largest_share: Share of the requests that went to the busiest replica.
        score: The worst ratio of a value to its limit; 1 or less meets the target.
    """

    router: str
    replicas: int
    values: dict[str, float]
    hit_rate: float
    goodput: float
    largest_share: float
    score: float

    @property
    def meets(self) -> bool:
        """Whether the target is met."""
        return self.score <= 1

    @classmethod
    def of(cls, run: FleetRun, slo: Mapping[str, float]) -> FleetRow:
        """The numbers of a run."""
        metrics = run.metrics()
        values = latency_values(metrics)
        found = metrics.summary
        tokens = found.num_cached_tokens + found.num_scheduled_tokens - found.num_output_tokens
        return cls(
            router=run.router,
            replicas=len(run.traces),
            values=values,
            hit_rate=found.num_cached_tokens / tokens if tokens > 0 else 0.0,
            goodput=_goodput(metrics, slo),
            largest_share=max(run.shares),
            score=score(values, slo) if slo else 0.0,
        )


@dataclass(frozen=True)
class FleetTable:
    """Layouts that were tried.

    Attributes:
        rows: Their numbers, in the order in which they were tried.
        slo: The target by name; empty without one.
        source: The origin of the durations of steps.
        best: The answer: the smallest layout that meets the target; None if none does.
    """

    rows: list[FleetRow]
    slo: dict[str, float]
    source: str
    best: FleetRow | None = field(default=None)

    def __repr__(self) -> str:
        names = list(self.slo) or ["ttft_mean", "ttft_p99", "itl_mean"]
        head = ["router", "replicas", *names, "goodput", "hit rate", "busiest", "tokens/s"]
        table = [head, *([*_cells(row, names), "*" if row is self.best else ""] for row in self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in table]
        lines = [line + (" <" if row[len(head) :] == ["*"] else "") for line, row in zip(lines, table)]
        if self.slo:
            lines.append(self._answer())
        lines.append(f"steps are simulated; their durations come from {self.source}")
        return "\n".join(lines)

    def _answer(self) -> str:
        limits = ", ".join(f"{name} <= {limit:g}" for name, limit in self.slo.items())
        if self.best is not None:
            return f"{self.best.replicas} replicas with {self.best.router} meet {limits}"
        closest = min(self.rows, key=lambda row: row.score)
        return (
            f"no layout meets {limits}; closest: {closest.replicas} replicas with {closest.router}, whose worst value "
            f"is {closest.score:.3g} times its limit"
        )


def compare(
    demand: Demand, replicas: Sequence[int], routers: Sequence[str | Router], slo: str | Mapping[str, float] = ""
) -> FleetTable:
    """Every number of replicas with every router.

    Args:
        demand: The demand.
        replicas: Numbers of replicas.
        routers: Routers.
        slo: A target, see `workbench.analysis.tune.read_slo`; none by default.

    Raises:
        ValueError: An argument is malformed, or a request cannot be served.
    """
    limits = read_slo(slo) if slo else {}
    rows = [
        FleetRow.of(demand.run(integer("replicas", count, 1), router), limits)
        for count in replicas
        for router in routers
    ]
    meeting = [row for row in rows if row.meets] if limits else []
    best = min(meeting, key=lambda row: (row.replicas, row.score), default=None)
    return FleetTable(rows, limits, demand.source, best)


def size(
    demand: Demand, slo: str | Mapping[str, float], *, router: str = "round_robin", max_replicas: int = MAX_REPLICAS
) -> FleetTable:
    """The smallest number of replicas that meets a target, by doubling and halving.

    It supposes that a larger fleet is no worse, and gives up when twice as many replicas change nothing. The number
    below the answer is always tried, so that the answer is the smallest unless a still smaller fleet is better.

    Args:
        demand: The demand.
        slo: The target, such as "ttft_p99=2s,tpot_p99=50ms".
        router: The router.
        max_replicas: The largest fleet to try.

    Raises:
        ValueError: An argument is malformed, or a request cannot be served.
    """
    limits = read_slo(slo)
    integer("max_replicas", max_replicas, 1)
    tried: dict[int, FleetRow] = {}

    def meets(count: int) -> bool:
        tried[count] = FleetRow.of(demand.run(count, router), limits)
        return tried[count].meets

    low, high = 0, 1  # ``low`` misses the target
    while not meets(high):
        if high == max_replicas or (low and tried[high].values == tried[low].values):
            return FleetTable([tried[count] for count in sorted(tried)], limits, demand.source)
        low, high = high, min(2 * high, max_replicas)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return FleetTable([tried[count] for count in sorted(tried)], limits, demand.source, tried[high])


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


def _cells(row: FleetRow, names: Sequence[str]) -> list[str]:
    return [
        row.router,
        str(row.replicas),
        *(number(row.values.get(name)) for name in names),
        percent(row.goodput),
        percent(row.hit_rate),
        percent(row.largest_share),
        number(row.values["output_throughput"]),
    ]
