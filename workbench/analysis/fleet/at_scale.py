"""Fleets of hundreds of replicas and millions of requests, in bounded memory and in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from workbench.analysis.fleet.replica import PromptHashes, Replica
from workbench.analysis.fleet.router import Router
from workbench.analysis.fleet.routers import check_serves, make_router
from workbench.analysis.fleet.simulate import route
from workbench.base.field_checks import integer
from workbench.base.keyword_fields import RouterName
from workbench.base.text import counted
from workbench.config import EngineConfig
from workbench.simulation.arrivals import Arrival
from workbench.simulation.at_scale import LatencyHistogram, SimulationSummary, SummedRun, check_servable, servable
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.run import SimulatedRun
from workbench.trace.readings.metrics import run_length

BATCH = 2048
"""Requests whose replicas are chosen at a time."""


@dataclass(frozen=True)
class FleetSummary:
    """The numbers of a fleet; all times are simulated seconds.

    Attributes:
        router: Name of the router.
        replicas: The summary of each replica.
    """

    router: str
    replicas: list[SimulationSummary]

    def total(self, name: str) -> int:
        """The sum of a number of `SimulationSummary` over the replicas, such as "num_steps"."""
        return sum(getattr(replica, name) for replica in self.replicas)

    def latency(self, name: str) -> LatencyHistogram:
        """The latencies "ttft", "itl" or "e2e" of all replicas."""
        joined = LatencyHistogram()
        for replica in self.replicas:
            joined.join(getattr(replica, name))
        return joined

    @property
    def duration(self) -> float:
        """Seconds until the last replica was done."""
        return max(replica.duration for replica in self.replicas)

    def to_row(self) -> dict[str, Any]:
        """One row of a table."""
        row: dict[str, Any] = {"router": self.router, "replicas": len(self.replicas), "duration": self.duration}
        numbers = ("num_requests", "num_finished", "num_steps", "num_scheduled", "num_tokens", "num_output_tokens")
        row |= {name: self.total(name) for name in (*numbers, "num_cached_tokens", "num_preemptions")}
        for name in ("ttft", "itl", "e2e"):
            found = self.latency(name).distribution()
            row |= {f"{name}_mean": found.mean, f"{name}_p50": found.median, f"{name}_p99": found.p99}
        return row

    def __repr__(self) -> str:
        ttft, itl = (self.latency(name).distribution() for name in ("ttft", "itl"))
        return (
            f"FleetSummary({self.router}, {counted(len(self.replicas), 'replica')}: {self.total('num_finished'):,} of "
            f"{counted(self.total('num_requests'), 'request')} in {counted(self.total('num_steps'), 'step')}, "
            f"{run_length(self.duration)}; "
            f"TTFT mean {ttft.amount('mean')}, p99 {ttft.amount('p99')}; ITL mean {itl.amount('mean')})"
        )


def simulate_fleet_at_scale(
    arrivals: Callable[[], Iterable[Arrival]],
    config: EngineConfig,
    cost_model: CostModel,
    *,
    replicas: int,
    router: RouterName | Router = "round_robin",
    seed: int = 0,
    names: Sequence[str] | None = None,
    executor: Executor | None = None,
    parts: int = 2,
) -> FleetSummary:
    """Simulate a fleet and keep only the summary of each replica.

    With an executor, routers that do not look at replicas spread the replicas over its workers: each worker reads all
    requests, chooses their replicas as all others do, which takes little time, and simulates its own. The result does
    not depend on the number of workers.

    Args:
        arrivals: Makes the requests, in order of ``arrives_at``; a function of a module or a `functools.partial` of
            one, so that workers can call it.
        config: Configuration of every replica.
        cost_model: Duration of a step.
        replicas: Number of replicas.
        router: A name of `workbench.analysis.fleet.routers.ROUTERS`, or a `Router`.
        seed: Seed of the router's random choices.
        names: Addresses of the replicas; see `workbench.simulate_fleet`.
        executor: Runs parts of the fleet; None to run it here. Any `concurrent.futures.Executor` will do.
        parts: Number of parts for the executor.

    Raises:
        ValueError: The router looks at replicas, and there is an executor; or no schedule can serve a request.

    Example:
        >>> from workbench import read_generated
        >>> requests = {"num_requests": 50, "prompt": 100, "output": 10, "arrivals": {"process": "evenly", "rate": 50}}
        >>> made = partial(read_generated, requests)
        >>> simulate_fleet_at_scale(made, EngineConfig(), CostModel(fixed=0.01), replicas=2).total("num_finished")
        50
    """
    integer("replicas", replicas, 1)
    integer("parts", parts, 1)
    chosen = make_router(router)
    check_serves(chosen, config)
    given = [f"http://replica-{index}:8000" for index in range(replicas)] if names is None else list(names)
    simulate_part = partial(_simulate_part, arrivals, config, cost_model, given, chosen, seed)
    if executor is None:
        return FleetSummary(chosen.name, [summary for _, summary in simulate_part(range(replicas))])
    if chosen.looks_at_replicas:
        raise ValueError(
            f"the router {chosen.name!r} looks at replicas, which have to run together: leave executor out, or take "
            "round_robin, random, consistent_hash or sticky"
        )
    shares = [range(part, replicas, parts) for part in range(min(parts, replicas))]
    found = dict(pair for part in executor.map(simulate_part, shares) for pair in part)
    return FleetSummary(chosen.name, [found[index] for index in range(replicas)])


def _simulate_part(
    arrivals: Callable[[], Iterable[Arrival]],
    config: EngineConfig,
    cost_model: CostModel,
    names: list[str],
    router: Router,
    seed: int,
    indices: Sequence[int],
) -> list[tuple[int, SimulationSummary]]:
    """The summaries of some replicas of a fleet, by index."""
    summed: dict[int, SummedRun] = {}

    def keep(index: int, run: SimulatedRun) -> SummedRun:
        summed[index] = SummedRun(run)
        return summed[index]

    hashes = PromptHashes() if router.reads_prefixes else None
    fleet = {
        index: Replica(index, names[index], config, cost_model, partial(keep, index), publishes=hashes)
        for index in indices
    }
    router.start(names, seed)
    if router.looks_at_replicas:
        for _ in route(servable(arrivals(), config), router, list(fleet.values())):
            pass
    else:
        _serve_own(arrivals(), config, router, len(names), fleet)
    for index, replica in fleet.items():
        replica.finish()
        summed[index].summary.end = replica.end or "done"
    return [(index, summed[index].summary) for index in indices]


def _serve_own(
    arrivals: Iterable[Arrival], config: EngineConfig, router: Router, num_replicas: int, own: Mapping[int, Replica]
) -> None:
    """Choose the replica of every request, and send the own replicas theirs; the others are simulated elsewhere."""
    left = iter(arrivals)
    while some := list(islice(left, BATCH)):
        for arrival, index in zip(some, router.choose_all(some, num_replicas), strict=True):
            if (replica := own.get(index)) is not None:
                check_servable(arrival, config)
                replica.reach(arrival)  # so that few requests are kept
                replica.send(arrival)
