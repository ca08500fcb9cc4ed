"""Run a workload over several replicas behind a router, without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.config import EngineConfig
from workbench.costs.cost_model import CostModel, StepCost
from workbench.fleet.replica import Replica
from workbench.fleet.routers import Decision, Router, make_router
from workbench.ground.field_checks import integer, shown
from workbench.ground.on_demand import progress_bar
from workbench.readings.metrics import TraceMetrics, amount, number, percent
from workbench.readings.metrics_collector import merge_metrics
from workbench.scheduler.policy import described
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival, arrival_order
from workbench.simulation.limits import MAX_STEPS
from workbench.simulation.run import SimulatedRun
from workbench.simulation.simulate import TracedRun, next_token, versions
from workbench.simulation.workload import read_simulation
from workbench.trace import Trace, TraceMeta

MAX_REPLICAS = 4096


@dataclass(frozen=True)
class Choice:
    """A router's decision about one request.

    Attributes:
        request_id: The request.
        time: Seconds since the start at which it arrived.
        replica: Index of the replica that got it.
        scores: A number for each replica, which decided it; empty if none did.
        unit: The meaning of the scores.
        rule: The part of the router's rule that applied.
    """

    request_id: str
    time: float
    replica: int
    scores: tuple[float, ...]
    unit: str
    rule: str

    def __str__(self) -> str:
        text = f"{self.request_id} went to replica {self.replica}"
        if self.rule:
            text += f": {self.rule}"
        if self.scores:
            text += f"; {self.unit}: " + ", ".join(f"{score:.6g}" for score in self.scores)
        return text


class FleetRun:
    """A simulated run of several replicas.

    Attributes:
        router: Name of the router.
        choices: The router's decisions by request, in the order of arrival.
        traces: One trace per replica.
    """

    def __init__(self, router: str, choices: dict[str, Choice], traces: list[Trace]) -> None:
        self.router = router
        self.choices = choices
        self.traces = traces

    @property
    def assignments(self) -> dict[str, int]:
        """The index of each request's replica."""
        return {request_id: choice.replica for request_id, choice in self.choices.items()}

    @property
    def shares(self) -> list[float]:
        """The share of the requests that each replica got."""
        counts = [0] * len(self.traces)
        for choice in self.choices.values():
            counts[choice.replica] += 1
        return [count / len(self.choices) if self.choices else 0.0 for count in counts]

    def metrics(self) -> TraceMetrics:
        """The metrics of all replicas as one; requests are named ``replica 0/request``."""
        return merge_metrics({f"replica {index}": (trace.metrics(), 0.0) for index, trace in enumerate(self.traces)})

    def __repr__(self) -> str:
        whole = self.metrics().summary
        lines = [
            f"FleetRun({self.router}, {len(self.traces)} replicas: {whole.num_finished} of {len(self.choices)} "
            f"requests finished in {amount(whole.duration, whole.unit)})",
            "  replica  requests  steps  cached  preempted  TTFT mean        p99   ITL mean  peak KV",
        ]
        names = [*map(str, range(len(self.traces))), "all"]
        for name, metrics in zip(names, [*(trace.metrics() for trace in self.traces), self.metrics()]):
            found = metrics.summary
            tokens = found.num_cached_tokens + found.num_scheduled_tokens
            row = (
                f"{name:>7}  {found.num_requests:>8}  {found.num_steps:>5}",
                f"{percent(found.num_cached_tokens / tokens if tokens else None):>6}  {found.num_preemptions:>9}",
                f"{number(found.ttft.mean):>9}  {number(found.ttft.p99):>9}  {number(found.itl.mean):>9}",
                f"{percent(found.peak_kv_use):>7}",
            )
            lines.append("  " + "  ".join(row))
        return "\n".join(lines)


def simulate_fleet(
    workload: Mapping[str, Any] | str | os.PathLike[str],
    *,
    replicas: int | Sequence[EngineConfig | Mapping[str, Any]] = 2,
    router: str | Router = "round_robin",
    config: EngineConfig | Mapping[str, Any] | None = None,
    cost_model: CostModel | Sequence[CostModel] | None = None,
    seed: int = 0,
    names: Sequence[str] | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> FleetRun:
    """Run a workload over several replicas, each with the scheduler that an Engine uses.

    Replicas share one time. The router decides when a request arrives, by what is known then: a request of a step
    that has not ended is in flight. A replica alone behaves as in `workbench.simulate`.

    Args:
        workload: A workload of `workbench.simulate`, or the path of its JSON file. ``session`` of a request, by default
            its id, is what "consistent_hash" and "sticky" go by.
        replicas: Their number, or a configuration for each of them.
        router: A name of `workbench.fleet.routers.ROUTERS`, or a `Router`.
        config: Replaces the workload's configuration; a mapping changes only the fields it names.
        cost_model: Gives the duration of a step; a list has one for each replica. None for the workload's. Without any,
            steps take no time, and only ``arrival_step`` says when requests arrive.
        seed: Seed of the router's random choices.
        names: Addresses of the replicas, which "consistent_hash" and "sticky" hash; by default
            ``http://replica-0:8000`` and so on.
        max_steps: Maximum number of steps of a replica.
        progress: Show a progress bar of requests.

    Returns:
        Assignments, choices with their scores, and a trace for each replica.

    Raises:
        ValueError: An argument is malformed, or a replica cannot serve a request by any schedule.

    Example:
        >>> requests = [{"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 2} for n in range(4)]
        >>> run = simulate_fleet({"requests": requests}, replicas=2)
        >>> run.assignments
        {'r0': 0, 'r1': 1, 'r2': 0, 'r3': 1}
    """
    given, arrivals, cost_model_of_workload = read_simulation(
        workload, cost_model if isinstance(cost_model, CostModel) else None
    )
    configs = _configs(config if isinstance(config, EngineConfig) else given.replace(**(config or {})), replicas)
    models = _one_each(cost_model, len(configs), cost_model_of_workload)
    return run_fleet(
        arrivals, configs, models, router=router, seed=seed, names=names, max_steps=max_steps, progress=progress
    )


def run_fleet(
    arrivals: Iterable[Arrival],
    configs: Sequence[EngineConfig],
    models: Sequence[StepCost | None],
    *,
    router: str | Router = "round_robin",
    sample_token: Callable[[Request], int] = next_token,
    seed: int = 0,
    names: Sequence[str] | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> FleetRun:
    """The run of `simulate_fleet`, for requests in any order, with a configuration and a cost model for each replica.

    Args:
        arrivals: The requests.
        configs: Configurations.
        models: Cost models; all None without a clock.
        router: See `simulate_fleet`, like the arguments below.
        sample_token: Gives the next token of a request.
        seed: Seed of the router's random choices.
        names: Addresses of the replicas.
        max_steps: Maximum number of steps of a replica.
        progress: Show a progress bar of requests.

    Raises:
        ValueError: An argument is malformed, or a replica cannot serve a request by any schedule.
    """
    names = [f"http://replica-{index}:8000" for index in range(len(configs))] if names is None else list(names)
    if len(names) != len(configs) or len(set(names)) != len(names):
        raise ValueError(f"names must be {len(configs)} different strings, one for each replica, got {shown(names)}")
    if len({model is None for model in models}) > 1:
        raise ValueError("cost_model must be given for every replica, or for none")
    chosen = make_router(router)
    pending = sorted(arrivals, key=arrival_order)
    for config in dict.fromkeys(configs):
        for arrival in pending:
            arrival.check_servable(config, sample_token)
    traces = [
        Trace(TraceMeta(source="simulation", config=described(one, None), versions=versions())) for one in configs
    ]
    make = partial(Replica, max_steps=max_steps, publishes=chosen.reads_prefixes)
    fleet = [
        make(index, name, one, model, partial(_traced, trace, sample_token))
        for index, (name, one, model, trace) in enumerate(zip(names, configs, models, traces))
    ]
    if any(config.eviction == "belady" for config in configs):
        _foresee(pending, chosen, fleet, names, seed)
    chosen.start(names, seed)
    choices: dict[str, Choice] = {}
    with progress_bar(len(pending), "fleet", "request", shown=progress) as bar:
        for arrival, decision in route(pending, chosen, fleet):
            choices[arrival.request_id] = Choice(
                request_id=arrival.request_id,
                time=arrival.arrives_at or 0.0,
                replica=decision.replica,
                scores=decision.scores,
                unit=chosen.scores,
                rule=decision.rule,
            )
            bar.update(1)
    for replica, trace in zip(fleet, traces):
        replica.finish()
        trace.end = replica.end
    return FleetRun(chosen.name, choices, traces)


def route(
    arrivals: Iterable[Arrival], router: Router, fleet: Sequence[Replica | None]
) -> Iterator[tuple[Arrival, Decision]]:
    """Send each request to a replica at the moment of its arrival, with the steps before that moment taken.

    Replicas that are None are simulated elsewhere, behind a router that does not look at them.
    """
    for arrival in arrivals:
        if router.looks_at_replicas:
            for replica in fleet:
                replica.reach(arrival)  # type: ignore[union-attr]
        decision = router.choose(arrival, fleet)  # type: ignore[arg-type]
        if not 0 <= decision.replica < len(fleet):
            raise ValueError(f"the router chose replica {decision.replica}, there are 0 to {len(fleet) - 1}")
        if (chosen := fleet[decision.replica]) is not None:
            if not router.looks_at_replicas:
                chosen.reach(arrival)  # so that few requests are kept
            chosen.send(arrival)
        yield arrival, decision


def _foresee(
    arrivals: Sequence[Arrival], router: Router, fleet: Sequence[Replica], names: Sequence[str], seed: int
) -> None:
    """Tell each replica which requests it will be sent."""
    if router.looks_at_replicas:
        raise ValueError(
            f'eviction="belady" knows which requests will come; where {router.name!r} sends them is not known before: '
            "take round_robin, random, consistent_hash or sticky, or another eviction"
        )
    router.start(names, seed)
    sent: list[list[Arrival]] = [[] for _ in fleet]
    for arrival in arrivals:
        sent[router.choose(arrival, fleet).replica].append(arrival)
    for replica, its in zip(fleet, sent):
        replica.foresee(its)


def _traced(trace: Trace, sample_token: Callable[[Request], int], run: SimulatedRun) -> TracedRun:
    return TracedRun(run, trace, sample_token)


def _configs(config: EngineConfig, replicas: int | Sequence[EngineConfig | Mapping[str, Any]]) -> list[EngineConfig]:
    if isinstance(replicas, Sequence) and not isinstance(replicas, str):
        integer("the number of replicas", len(replicas), 1, MAX_REPLICAS)
        return [one if isinstance(one, EngineConfig) else config.replace(**one) for one in replicas]
    return [config] * integer("replicas", replicas, 1, MAX_REPLICAS, ", or a list with a configuration for each")


def _one_each(
    given: CostModel | Sequence[CostModel] | None, count: int, default: CostModel | None
) -> Sequence[CostModel | None]:
    if isinstance(given, Sequence):
        if len(given) != count:
            raise ValueError(f"cost_model must be one, or one for each of the {count} replicas, got {len(given)}")
        return given
    return [given or default] * count
