"""Types of the methods that rooms give to the classes of rooms below them, for type checkers and editors.

At run time these classes do not exist: `workbench.ground.on_demand` puts the functions into place, by the table in
``workbench/__init__.py``. A test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.analysis import explain as explaining
    from workbench.analysis import fork as forking
    from workbench.analysis import incident as looking
    from workbench.analysis import misses, predict
    from workbench.analysis import tune as tuning
    from workbench.analysis import why as asking
    from workbench.costs import stalls as stalling
    from workbench.engine import replay as replaying
    from workbench.formats import export
    from workbench.laws import replay
    from workbench.readings import metrics_collector
    from workbench.readings import pool_state as pool
    from workbench.viz import export_html, figures, widget

    class TraceMethods:
        """Of a Trace."""

        check = replay.check
        explain = explaining.explain
        figure = figures.trace_figure
        fork = forking.fork
        incident = looking.incident
        keyframe_before = pool.keyframe_before
        metrics = metrics_collector.metrics
        pool_state = pool.pool_state
        replay = replaying.replay
        slowest = explaining.slowest
        stalls = stalling.stalls
        to_chrome_trace = export.to_chrome_trace
        to_html = export_html.to_html
        to_pandas = export.to_pandas
        tune = tuning.tune
        view = widget.view
        watch = widget.watch
        whatif = predict.whatif
        why = asking.why
        why_missed = misses.why_missed

    class TraceMetricsMethods:
        """Of a TraceMetrics."""

        figure = figures.metrics_figure
