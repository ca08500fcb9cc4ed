"""The public classes as type checkers and editors see them: with the methods that rooms above give to them.

At run time these classes do not exist, and ``workbench.Trace`` is that of the trace's room:
`workbench.base.on_demand` puts the functions into place, by the table in ``workbench/__init__.py``. A test compares
the two. Nothing in the package calls these methods; it imports the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Concatenate, ParamSpec, TypeVar

    from workbench.analysis import explain as explaining
    from workbench.analysis import fork as forking
    from workbench.analysis import incident as looking
    from workbench.analysis import misses, predict
    from workbench.analysis import tune as tuning
    from workbench.analysis import why as asking
    from workbench.engine import engine
    from workbench.engine import kernel_run as kernels
    from workbench.engine import replay as replaying
    from workbench.simulation import simulate as simulating
    from workbench.simulation.costs import stalls as stalling
    from workbench.trace import trace
    from workbench.trace.formats import export
    from workbench.trace.laws import replay
    from workbench.trace.readings import metrics as measuring
    from workbench.trace.readings import metrics_by_request, metrics_collector
    from workbench.trace.readings import pool_state as pool
    from workbench.viz import export_html, figures, link, widget

    P = ParamSpec("P")
    First = TypeVar("First")

    def giving_metrics(function: Callable[Concatenate[First, P], Any]) -> Callable[Concatenate[First, P], TraceMetrics]:
        """A function whose metrics have a figure."""
        raise NotImplementedError

    def giving_trace(function: Callable[Concatenate[First, P], Any]) -> Callable[Concatenate[First, P], Trace]:
        """A function whose trace has the methods below."""
        raise NotImplementedError

    class TraceMetrics(measuring.TraceMetrics):
        """Metrics, and their figure."""

        requests: metrics_by_request.MetricsByRequest
        figure = figures.metrics_figure

    class Trace(trace.Trace):
        """A trace, and what can be asked of it."""

        check = replay.check
        explain = explaining.explain
        figure = figures.trace_figure
        fork = giving_trace(forking.fork)
        incident = looking.incident
        kernel_run = kernels.of_trace
        keyframe_before = pool.keyframe_before
        metrics = giving_metrics(metrics_collector.metrics)
        pool_state = pool.pool_state
        replay = replaying.replay
        slowest = explaining.slowest
        stalls = stalling.stalls
        to_chrome_trace = export.to_chrome_trace
        to_html = export_html.to_html
        to_link = link.link_to
        to_pandas = export.to_pandas
        tune = tuning.tune
        view = widget.view
        watch = widget.watch
        whatif = giving_trace(predict.whatif)
        why = asking.why
        why_missed = misses.why_missed

    class Engine(engine.Engine):
        """An engine, whose trace is a `Trace` as above."""

        @property
        def trace(self) -> Trace:
            """See `workbench.engine.engine.Engine.trace`."""
            raise NotImplementedError

        fork = giving_trace(engine.Engine.fork)
        view = widget.view
        watch = widget.watch

    def of_traces(function: Callable[P, Any]) -> Callable[P, Trace]:
        """A function that makes such a trace."""
        raise NotImplementedError

    simulate = of_traces(simulating.simulate)
