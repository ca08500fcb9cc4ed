"""The run on display under another configuration, with times where they can be predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.trace.errors import TraceError
from workbench.trace.trace import Trace

if TYPE_CHECKING:
    from workbench.analysis.predict import Predictor

BOTH = "Both sides are predicted from this run's own step costs."

LITTLE = 0.01
"""Relative error of a predicted measure from which on it is told."""


class Changed(NamedTuple):
    """A run under another configuration.

    Attributes:
        trace: The simulated run.
        facts: ``predicted``, sentences on how its times were found and how far they can be trusted; or ``no_times``,
            the reason for which there are none. Neither for a run that has none itself.
        unchanged: The prediction of the run as it was, with which the other one is compared; None without times, where
            the simulation repeats every step of the run.
        caution: The way to read predictions that are only good for a comparison; "" for others.
    """

    trace: Trace
    facts: dict[str, Any]
    unchanged: Trace | None = None
    caution: str = ""


def unit_of_changes(trace: Trace) -> str:
    """The unit in which `changed_run` would answer now: "s", or "steps" if times cannot be predicted."""
    from workbench.analysis.predict import comparing

    if not len(trace) or not trace[-1].end or trace[0].step:
        return "steps"
    try:
        comparing(trace)
    except (ValueError, TraceError):
        return "steps"
    return "s"


def changed_run(trace: Trace, fork: Callable[..., Trace], at_step: int, changes: dict[str, Any]) -> Changed:
    """Simulate a run with changes, with times predicted from its own step costs where they can be.

    Args:
        trace: The run.
        fork: Simulates it without times, such as ``Engine.fork``.
        at_step: Number of the first step that the changes apply to.
        changes: Fields of the configuration with their new values.
    """
    from workbench.analysis.predict import comparing
    from workbench.simulation.costs.fit import NoSeconds

    timed = len(trace) > 0 and trace[-1].end > 0
    reason = "a run that is changed in its middle has no times"
    if timed and at_step <= trace[0].step:
        try:
            predictor = comparing(trace)
            unchanged = predictor.simulate()
            facts = {"predicted": _words(predictor, unchanged)}
            return Changed(predictor.simulate(**changes), facts, unchanged, predictor.check.caution)
        except NoSeconds as problem:
            reason = problem.plain
        except (ValueError, TraceError) as problem:
            reason = str(problem)
    return Changed(fork(at_step=at_step, **changes), {"no_times": reason} if timed else {})


def _words(predictor: Predictor, unchanged: Trace) -> str:
    """The origin of both predictions, and the error of that of the unchanged run or the way to read them."""
    loops = predictor.loops.sentence
    return " ".join(filter(None, (BOTH, trust_words(predictor, unchanged), loops and f"{loops}.")))


def trust_words(predictor: Predictor, unchanged: Trace) -> str:
    """The trust in predictions of a run: the error of that of the run as it was, or the way to read them.

    Args:
        predictor: Predicts the run.
        unchanged: Its prediction of the run as it was.
    """
    from workbench.trace.readings.metrics_collector import metrics

    if caution := predictor.check.caution:
        return caution
    errors = dict(predictor.check.errors_in_words)
    length, predicted = (metrics(run).summary.clock.at_work for run in (predictor.trace, unchanged))
    if length and not predictor.has_unended:
        errors["time at work"] = predicted / length - 1
    off = ", ".join(f"{error:+.0%} for {name}" for name, error in errors.items() if abs(error) >= LITTLE)
    return f"Of the run as it was, the prediction is off by {off or 'less than 1%'}."
