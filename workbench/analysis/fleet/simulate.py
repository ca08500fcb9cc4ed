"""Run a workload over several replicas behind a router, without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from workbench.analysis.fleet.events import Change, EventLoop, Routed
from workbench.analysis.fleet.fleet_run import Choice, FleetRun
from workbench.analysis.fleet.replica import PromptHashes, Replica
from workbench.analysis.fleet.router import Router
from workbench.analysis.fleet.routers import check_serves, make_router
from workbench.analysis.fleet.sessions import Sessions
from workbench.analysis.fleet.split import Split
from workbench.base.field_checks import integer
from workbench.base.keyword_fields import RouterName
from workbench.base.progress import progress_bar
from workbench.base.text import shown
from workbench.config import EngineConfig
from workbench.scheduler.policy import described
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival, arrival_order
from workbench.simulation.costs.cost_model import CostModel, StepCost, as_step_cost
from workbench.simulation.follow_ups import FollowUps
from workbench.simulation.limits import MAX_STEPS
from workbench.simulation.run import SimulatedRun
from workbench.simulation.simulate import TracedRun, next_token, versions
from workbench.simulation.workload import read_json_workload, read_simulation
from workbench.trace import Trace, TraceMeta

MAX_REPLICAS = 4096


def simulate_fleet(
    workload: Mapping[str, Any] | str | os.PathLike[str],
    *,
    replicas: int | Sequence[EngineConfig | Mapping[str, Any]] = 2,
    router: RouterName | Router = "round_robin",
    config: EngineConfig | Mapping[str, Any] | None = None,
    cost_model: CostModel | Sequence[CostModel] | None = None,
    seed: int = 0,
    names: Sequence[str] | None = None,
    changes: Sequence[Change] = (),
    split: Split | Mapping[str, Any] | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> FleetRun:
    """Run a workload over several replicas, each with the scheduler that an Engine uses.

    Replicas share one time. The router decides when a request arrives, by what is known then: a request of a step
    that has not ended is in flight. A replica alone behaves as in `workbench.simulate`.

    Args:
        workload: A workload of `workbench.simulate`, or the path of its JSON file. ``session`` of a request, by default
            its id, is what "consistent_hash" and "sticky" go by. Instead of ``requests`` it may have ``sessions``
            (`workbench.analysis.fleet.sessions`), whose requests depend on the end of those before.
        replicas: Their number, or a configuration for each of them.
        router: A name of `workbench.analysis.fleet.routers.ROUTERS`, or a `Router`.
        config: Replaces the workload's configuration; a mapping changes only the fields it names.
        cost_model: Gives the duration of a step; a list has one for each replica. None for the workload's. Without any,
            steps take no time, and only ``arrival_step`` says when requests arrive.
        seed: Seed of the router's random choices.
        names: Addresses of the replicas, which "consistent_hash" and "sticky" hash; by default
            ``http://replica-0:8000`` and so on.
        changes: Replicas that join, drain or die; needs a cost model.
        split: Replicas beside these that decode what these have prefilled; needs a cost model.
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
    given, arrivals, model, sessions = read_fleet(workload, None if isinstance(cost_model, Sequence) else cost_model)
    base = config if isinstance(config, EngineConfig) else given.replace(**(config or {}))
    configs = _configs(base, replicas)
    models = _one_each(cost_model, len(configs), model)
    if split is not None:
        split = Split.read(split)
        configs += [base.replace(**split.config)] * split.replicas
        models = [*models, *[models[-1]] * split.replicas]
    return run_fleet(
        arrivals,
        configs,
        models,
        router=router,
        seed=seed,
        names=names,
        sessions=sessions,
        changes=changes,
        split=split,
        max_steps=max_steps,
        progress=progress,
    )


def read_fleet(
    workload: Mapping[str, Any] | str | os.PathLike[str], cost_model: CostModel | None = None, load: float = 1.0
) -> tuple[EngineConfig, Iterable[Arrival], CostModel | None, Sessions | None]:
    """A workload of `workbench.simulation.workload.read_simulation`, which may have sessions instead of requests.

    Args:
        workload: The workload, or the path of its JSON file.
        cost_model: Replaces the workload's cost model.
        load: Multiplies the number of sessions.

    Raises:
        ValueError: The workload is malformed.
    """
    content = read_json_workload(workload)
    if "sessions" not in content:
        return *read_simulation(content, cost_model), None
    if "requests" in content or "generate" in content:
        raise ValueError("a workload has one of requests, generate and sessions, not several")
    rest = {name: value for name, value in content.items() if name != "sessions"} | {"requests": []}
    return *read_simulation(rest, cost_model), Sessions(content["sessions"], load)


def run_fleet(
    arrivals: Iterable[Arrival],
    configs: Sequence[EngineConfig],
    models: Sequence[StepCost | None],
    *,
    router: str | Router = "round_robin",
    sample_token: Callable[[Request], int] = next_token,
    seed: int = 0,
    names: Sequence[str] | None = None,
    sessions: Sessions | None = None,
    changes: Sequence[Change] = (),
    split: Split | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> FleetRun:
    """The run of `simulate_fleet`, for requests in any order, with a configuration and a cost model for each replica.

    Args:
        arrivals: The requests; those that follow others arrive when these have ended.
        configs: Configurations.
        models: Cost models; all None without a clock.
        router: See `simulate_fleet`, like the arguments below.
        sample_token: Gives the next token of a request.
        seed: Seed of the router's random choices.
        names: Addresses of the replicas.
        sessions: Closed loops, which send requests beside the arrivals.
        changes: Replicas that join, drain or die.
        split: Prefill and decode apart; the configurations and cost models of its replicas are the last.
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
    everyone = sorted(arrivals, key=arrival_order)
    loops = FollowUps(everyone)
    pending = loops.first()
    follow = sessions.ended if sessions is not None else loops.ended if loops.depends else None

    def again(change: Callable[[Router], Router]) -> FleetRun:
        same = {"sample_token": sample_token, "seed": seed, "names": names, "max_steps": max_steps}
        others = {"sessions": sessions, "changes": changes, "split": split}
        return run_fleet(everyone, configs, models, router=change(chosen), **same, **others)  # type: ignore[arg-type]

    for config in {id(config): config for config in configs}.values():
        check_serves(chosen, config)
        for arrival in everyone:
            arrival.check_servable(config, sample_token)
    traces = [
        Trace(TraceMeta(source="simulation", config=described(one, None), versions=versions())) for one in configs
    ]
    make = partial(Replica, max_steps=max_steps, publishes=PromptHashes() if chosen.reads_prefixes else None)
    fleet = [
        make(index, name, one, model, partial(_traced, trace, sample_token))
        for index, (name, one, model, trace) in enumerate(zip(names, configs, models, traces))
    ]
    depends = follow is not None or bool(changes) or split is not None
    if depends and models[0] is None:
        raise ValueError("sessions, follow-ups, changes and split need a clock: give a cost_model")
    if any(config.eviction == "belady" for config in configs):
        if depends:
            raise ValueError(
                'eviction="belady" needs to know what comes, which sessions, follow-ups, changes and split decide'
            )
        _foresee(pending, chosen, fleet, names, seed)
    chosen.start(names, seed)
    if depends:
        if split is not None:
            split.made_router.start(names, seed)
        loop = EventLoop(chosen, fleet, follow, changes, split)
        routed, hand_overs = loop.run([*pending, *(sessions.first() if sessions else ())]), loop.hand_overs
    else:
        routed, hand_overs = route(pending, chosen, fleet), {}
    choices: dict[str, Choice] = {}
    with progress_bar(None if sessions else len(everyone), "fleet", "request", shown=progress) as bar:
        for arrival, decision, candidates, replica in routed:
            choices[arrival.request_id] = Choice(
                request_id=arrival.request_id,
                time=arrival.arrives_at or 0.0,
                replica=replica,
                scores=decision.scores,
                unit=chosen.scores,
                rule=decision.rule,
                candidates=candidates,
                loads=decision.loads,
            )
            bar.update(1)
    for each, trace in zip(fleet, traces):
        each.finish()
        trace.end = each.end
    return FleetRun(chosen.name, choices, traces, hand_overs, again, chosen.why_together)


def route(arrivals: Iterable[Arrival], router: Router, fleet: Sequence[Replica]) -> Iterator[Routed]:
    """Send each request to a replica at the moment of its arrival, with the steps before that moment taken."""
    everyone = tuple(range(len(fleet)))
    for arrival in arrivals:
        if router.looks_at_replicas:
            for replica in fleet:
                replica.reach(arrival)
        decision = router.choose(arrival, fleet)
        if not 0 <= decision.replica < len(fleet):
            raise ValueError(f"the router chose replica {decision.replica}, there are 0 to {len(fleet) - 1}")
        router.sent(arrival, decision.replica)
        chosen = fleet[decision.replica]
        if not router.looks_at_replicas:
            chosen.reach(arrival)  # so that few requests are kept
        chosen.send(arrival)
        yield Routed(arrival, decision, everyone, decision.replica)


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
    for arrival, index in zip(arrivals, router.choose_all(arrivals, len(fleet))):
        sent[index].append(arrival)
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
        return [as_step_cost(each) for each in given]
    return [as_step_cost(given) or default] * count
