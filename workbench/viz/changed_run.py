"""The run on display under another configuration, with times where they can be predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.trace.errors import TraceError
from workbench.trace.trace import Trace


def unit_of_changes(trace: Trace) -> str:
    """The unit in which `changed_run` would answer now: "s", or "steps" if times cannot be predicted."""
    from workbench.analysis.predict import whatif

    if not len(trace) or not trace[-1].end or trace[0].step:
        return "steps"
    try:
        whatif(trace, force=True)
    except (ValueError, TraceError):
        return "steps"
    return "s"


def changed_run(
    trace: Trace, fork: Callable[..., Trace], at_step: int, changes: dict[str, Any]
) -> tuple[Trace, dict[str, Any]]:
    """Simulate a run with changes, with times predicted from its own step costs where they can be.

    Args:
        trace: The run.
        fork: Simulates it without times, such as ``Engine.fork``.
        at_step: Number of the first step that the changes apply to.
        changes: Fields of the configuration with their new values.

    Returns:
        The simulated trace, with ``error``: the relative error of the predicted duration of the unchanged run,
        without idle time, and ``loops``: a sentence about requests that wait for the answers to others, "" for none; or
        with ``no_times``: the reason for which there are no times. Neither for a run that has none itself.
    """
    from workbench.analysis.loops import loops_of
    from workbench.analysis.predict import whatif
    from workbench.simulation.costs.fit import NoSeconds
    from workbench.trace.readings.metrics_collector import metrics

    timed = len(trace) > 0 and trace[-1].end > 0
    reason = "a run that is changed in its middle has no times"
    if timed and at_step <= trace[0].step:
        try:
            measured = metrics(trace).summary.clock.at_work
            unchanged = metrics(whatif(trace, force=True)).summary.clock.at_work
            error = abs(unchanged - measured) / measured if measured else 0.0
            return whatif(trace, force=True, **changes), {"error": error, "loops": loops_of(trace).sentence}
        except NoSeconds as problem:
            reason = problem.plain
        except (ValueError, TraceError) as problem:
            reason = str(problem)
    return fork(at_step=at_step, **changes), {"no_times": reason} if timed else {}
