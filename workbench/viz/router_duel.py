"""A duel of two routers over the arrivals of a run: both sides are simulated fleets, and the run is neither of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from workbench.base.field_checks import choice, integer
from workbench.trace.errors import TraceError
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.trace import Trace
from workbench.viz.changed_run import uncertainty
from workbench.viz.duel import Score, measure_words, measures_of_fleets, outcome, tie_of, unserved_words

if TYPE_CHECKING:
    from workbench.analysis.fleet.fleet_run import FleetRun
    from workbench.simulation.costs.cost_model import StepCost

MAX_REPLICAS = 16
"""Maximum number of replicas of a side."""

USUAL = ("round_robin", "cache_aware")
"""The routers that are offered first: their rules differ most, and so do their fleets with few requests."""


@cache
def offered() -> dict[str, Any]:
    """The choice on a teacher's page: the routers with their rules, and the measures with the words for what wins."""
    return {
        "names": list(_rules()),
        "rules": _rules(),
        "usual": USUAL,
        "measures": measure_words(MAX_REPLICAS),
        "most": MAX_REPLICAS,
    }


def sides(routers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Both sides of a duel, as (letter, router, its rule)."""
    return [(letter.upper(), routers[letter], _rules()[routers[letter]]) for letter in ("a", "b")]


def read_routers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The routers of both sides and the number of replicas.

    Args:
        given: "a" and "b", names of routers, and "replicas".

    Raises:
        ValueError: A field is missing or unknown, or its value is out of range, or both routers are the same.
    """
    if not isinstance(given, Mapping) or set(given) != {"a", "b", "replicas"}:
        raise ValueError(f"routers must have a, b and replicas, got {given!r}")
    names = list(_rules())
    a, b = (choice(f"router {side.upper()}", given[side], names) for side in ("a", "b"))
    if a == b:
        raise ValueError(f"a duel needs two routers, and both are {a}: choose another one for B")
    return {"a": a, "b": b, "replicas": integer("replicas", given["replicas"], 2, MAX_REPLICAS)}


def settled(trace: Trace, routers: Mapping[str, Any], measure: str, unit: str = "s", uncertain: float = 0.0) -> Score:
    """Simulate both sides, and measure and draw them.

    Args:
        trace: The run whose requests both sides get, as many tokens each as they have in it.
        routers: See `read_routers`.
        measure: See `workbench.viz.duel.MEASURES`.
        unit: "steps" to count steps also if times could be predicted.
        uncertain: See `workbench.viz.duel.settled`.

    Raises:
        ValueError: The run has forgotten its first steps, has no requests, or lacks the measure.
    """
    from workbench.viz.fleet_rows import fleet_svgs  # few classes have a duel of routers

    a, b, clock, told, caution = _sides(trace, routers, unit)
    tie = tie_of(measure, unit, max(uncertain, uncertainty(caution, 0.0)))
    winner, sentence = outcome(a.traces, b.traces, measure, clock, tie=tie)
    simulated = f"Both sides are simulated: the arrivals of this run over {routers['replicas']} replicas, {told}"
    alike = _alike(a, b) if winner == "neither" else ""
    named = [{f"replica {i}": trace for i, trace in enumerate(run.traces)} for run in (a, b)]
    captions = [f"{letter}: {name}" for letter, name, _ in sides(routers)]
    return Score(
        winner,
        sentence,
        tuple(filter(None, (alike, unserved_words(a.traces, b.traces), a.concentration, b.concentration, simulated))),
        tuple(measures_of_fleets(a.traces, b.traces, clock)),
        tuple(zip(captions, fleet_svgs(named, clock or "s"))),
    )


def _alike(a: FleetRun, b: FleetRun) -> str:
    """Why two routers tie, if they sent the requests alike, and what would set them apart."""
    counts = [[len(trace.requests) for trace in run.traces] for run in (a, b)]
    if sorted(counts[0]) != sorted(counts[1]):
        return ""
    given = ", ".join(map(str, sorted(counts[0], reverse=True)))
    return (
        f"Both routers shared the requests out alike: {given} to a replica. With fewer replicas they can differ more."
    )


@cache
def _rules() -> dict[str, str]:
    from workbench.analysis.fleet.routers import RULES  # few classes have a duel of routers

    return RULES


def _sides(trace: Trace, routers: Mapping[str, Any], unit: str) -> tuple[FleetRun, FleetRun, str, str, str]:
    """The runs of both sides, "steps" if each second of their clock is a step, what the clock is, and the caution.

    The words for the clock end with a full stop; the caution is "" if times are not predicted with one.

    A router that sent all requests to one replica would repeat the run as *What if* predicts it.
    """
    from workbench.analysis.fleet.simulate import run_fleet
    from workbench.analysis.fork import Past, recorded_config, recorded_requests, why_not_simulated
    from workbench.analysis.predict import comparing
    from workbench.simulation.costs.cost_model import CostModel
    from workbench.viz.changed_run import trust_words, with_work

    if not trace.requests:
        raise ValueError("this run has no requests yet: ask the model something first")
    if problem := why_not_simulated(trace):
        raise ValueError(problem)
    config, replicas, clock, told = recorded_config(trace), routers["replicas"], "steps", "counted in steps."
    caution = ""
    step_cost: Callable[[], StepCost] = partial(CostModel, fixed=1.0)
    if unit == metrics(trace).summary.unit == "s":
        try:
            predictor = comparing(trace, 0)  # both sides are simulated once, without noise
            step_cost, clock, caution = predictor.step_cost, "", predictor.check.caution
            at_work = metrics(predictor.simulate()).summary.clock.at_work
            errors = with_work(predictor.check.errors, predictor, at_work)
            told = f"with times predicted from its own step costs. {trust_words(predictor, errors)}"
        except (ValueError, TraceError):
            told = "counted in steps, because no times can be predicted from it."
    if not clock:
        everyone, sample_token = recorded_requests(trace)
        first = min(arrival.arrival_time for arrival in everyone)  # the engine may have waited for it
        arrivals = [
            replace(arrival, arrives_at=(arrival.arrives_at or 0.0) - first, arrival_time=arrival.arrival_time - first)
            for arrival in everyone
        ]
    else:  # all replicas take their steps together, so that the steps of one are those of all
        past = Past(trace)
        arrivals = [past.stepped_arrival(info) for info in trace.requests.values()]
        sample_token = past.sample_token
    # A trend follows the rows that all replicas of a side have computed together, as it did those of the run.
    a, b = (
        run_fleet(
            arrivals, [config] * replicas, [step_cost()] * replicas, router=routers[side], sample_token=sample_token
        )
        for side in ("a", "b")
    )
    return a, b, clock, told, caution
