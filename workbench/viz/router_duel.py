"""A duel of two routers over the arrivals of a run: both sides are simulated fleets, and the run is neither of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from workbench.base.field_checks import choice, integer
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.trace import Trace
from workbench.viz.duel import Side, changes_of_fleets, measure_words, outcome

MAX_REPLICAS = 16
"""Maximum number of replicas of a side."""


@cache
def offered() -> dict[str, Any]:
    """The choice on a teacher's page: the routers, and the measures of fleets with the words for what wins."""
    return {"names": _router_names(), "measures": measure_words(MAX_REPLICAS), "most": MAX_REPLICAS}


def read_routers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The routers of both sides and the number of replicas.

    Args:
        given: "a" and "b", names of routers, and "replicas".

    Raises:
        ValueError: A field is missing or unknown, or its value is out of range, or both routers are the same.
    """
    if not isinstance(given, Mapping) or set(given) != {"a", "b", "replicas"}:
        raise ValueError(f"routers must have a, b and replicas, got {given!r}")
    names = _router_names()
    a, b = (choice(f"router {side.upper()}", given[side], names) for side in ("a", "b"))
    if a == b:
        raise ValueError(f"a duel needs two routers, and both are {a}: choose another one for B")
    return {"a": a, "b": b, "replicas": integer("replicas", given["replicas"], 2, MAX_REPLICAS)}


def settled(trace: Trace, routers: Mapping[str, Any], measure: str) -> tuple[str, str]:
    """The winner, one of `workbench.viz.duel.SIDES`, and the score.

    Args:
        trace: The run whose requests both sides get, as many tokens each as they have in it.
        routers: See `read_routers`.
        measure: See `workbench.viz.duel.MEASURES`.

    Raises:
        ValueError: The run has forgotten its first steps, has no requests, or lacks the measure.
    """
    a, b, clock = _sides(trace, routers)
    winner, sentence = outcome(a, b, measure)
    told = f"Both sides are simulated: the arrivals of this run over {routers['replicas']} replicas, {clock}."
    return winner, f"{sentence} {told} From A to B: {changes_of_fleets(a, b)}."


def _router_names() -> list[str]:
    from workbench.analysis.fleet.routers import ROUTERS  # few classes have a duel of routers

    return list(ROUTERS)


def _sides(trace: Trace, routers: Mapping[str, Any]) -> tuple[Side, Side, str]:
    """The traces of both sides, and what their clock is."""
    from workbench.analysis.fleet.simulate import run_fleet
    from workbench.analysis.fork import Past, recorded_config, recorded_requests
    from workbench.simulation.costs.cost_model import CostModel

    if not trace.requests:
        raise ValueError("this run has no requests yet: ask the model something first")
    if len(trace) and trace[0].step:
        raise ValueError(f"a duel of routers needs every step of the run, and this one has only {trace.steps_in_words}")
    config, model, clock = recorded_config(trace), None, "counted in steps"
    if metrics(trace).summary.unit == "s":
        try:
            model, clock = CostModel.fit(trace)[0], "with times predicted from its own step costs"
        except ValueError:
            clock = "counted in steps, because no times can be predicted from it"
    if model is not None:
        arrivals, sample_token = recorded_requests(trace)
    else:
        past = Past(trace)
        arrivals, sample_token = [past.arrival(info, 0) for info in trace.requests.values()], past.sample_token
    replicas = routers["replicas"]
    sides = (
        run_fleet(arrivals, [config] * replicas, [model] * replicas, router=routers[side], sample_token=sample_token)
        for side in ("a", "b")
    )
    a, b = (run.traces for run in sides)
    return a, b, clock
