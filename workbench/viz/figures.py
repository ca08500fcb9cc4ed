"""Metrics as Bokeh figures: zoom, hover, save, and a mark that is linked with the cursor of the other views."""

from __future__ import annotations

import math
import sys
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.trace.readings.metrics_collector import metrics as metrics_of
from workbench.viz.cursor import Cursor, cursor_of
from workbench.viz.palette import FOCUS_HUES, LIGHT

if TYPE_CHECKING:
    from workbench.trace.readings.metrics import TraceMetrics
    from workbench.trace.trace import Trace

TOOLS = "pan,xwheel_zoom,box_zoom,box_select,hover,reset,save"

RELOADED = (
    '<p id="wb-{0}" hidden>The page was loaded again, without the scripts of Bokeh: run <code>import panel; '
    "panel.extension(inline=True)</code>, and then this cell again.</p><script>setTimeout(() => {{ const note = "
    'document.getElementById("wb-{0}"); if (note) note.hidden = "Bokeh" in globalThis; }}, 1500)</script>'
)
"""For a page that has no Bokeh although the kernel has sent it, to the page before; otherwise it stays hidden."""


def trace_figure(trace: Trace) -> Any:
    """The figure of a trace's metrics, ``trace.metrics().figure()``."""
    return metrics_figure(metrics_of(trace))


def token_columns(metrics: TraceMetrics) -> dict[str, Any]:
    """The bars of the upper figure: tokens of each step, and the decode tokens below the others."""
    steps = metrics.steps
    decode, top = steps.num_decode_tokens, steps.num_tokens
    return {"step": steps.step, "prefill": top - decode, "decode": decode, "top": top}


def latency_columns(metrics: TraceMetrics) -> dict[str, list[Any]]:
    """The points of the lower figure: first token and longest pause of each request that has a token."""
    unit = metrics.summary.unit
    columns: dict[str, list[Any]] = {"request": [], "first": [], "gap": [], "place": []}
    for request in metrics.requests.values():
        if request.ttft is not None:
            columns["place"].append(len(columns["request"]))
            columns["request"].append(request.request_id)
            columns["first"].append(request.ttft.seconds if unit == "s" else request.ttft.steps)
            columns["gap"].append(max(map(float, request.gaps(unit)), default=math.nan))
    return columns


def metrics_figure(metrics: TraceMetrics, *, cursor: Cursor | None = None) -> Any:
    """Tokens of every step above the latencies of its requests, as a Bokeh layout with one axis of steps.

    Args:
        metrics: The metrics of a trace.
        cursor: Linked where Python runs, in a served page or a notebook: a box selection moves it to its first step,
            the mark in the figure follows it, and the visible steps are those of the views, whichever is zoomed. By
            default it is the cursor that the views of the trace share.

    Returns:
        A ``bokeh.models.Column`` of two figures; a notebook shows it, and ``panel.pane.Bokeh`` and
        ``bokeh.plotting.show`` take it.
    """
    from bokeh.layouts import column
    from bokeh.models import ColumnDataSource

    if cursor is None and metrics.trace is not None:
        cursor = cursor_of(metrics.trace)
    steps, unit = metrics.steps, metrics.summary.unit
    numbers = steps.step
    tokens: Any = ColumnDataSource(token_columns(metrics))
    tooltips = [("step", "@step"), ("prefill tokens", "@prefill"), ("decode tokens", "@decode")]
    above = _figure("Tokens of each step", "step", "tokens", tooltips)
    bar: dict[str, Any] = {"x": "step", "width": 0.9, "source": tokens}
    above.vbar(top="decode", fill_color=LIGHT.decode, line_color=None, legend_label="decode", **bar)
    above.vbar(bottom="decode", top="top", fill_color=LIGHT.prefill, line_color=None, legend_label="prefill", **bar)

    latencies = ColumnDataSource(latency_columns(metrics))
    tooltips = [("request", "@request"), ("first token after", "@first"), ("longest pause", "@gap")]
    unit_name = "seconds" if unit == "s" else "steps"
    below = _figure("Latencies of each request", "request, in order of arrival", unit_name, tooltips)
    for name, words, marker, hue in (
        ("first", "first token after", "circle", FOCUS_HUES[0]),
        ("gap", "longest pause", "triangle", FOCUS_HUES[5]),
    ):
        below.scatter("place", name, size=8, marker=marker, color=hue, legend_label=words, source=latencies)
    for plot in (above, below):
        plot.legend.update(orientation="horizontal", padding=0, border_line_color=None)
        plot.add_layout(plot.legend[0], "above")  # within the axes it would cover marks

    if cursor is not None:

        def move(_attr: str, _old: Any, selected: list[int]) -> None:
            if selected:
                cursor.param.update(step=int(numbers[min(selected)]), follow=False)

        tokens.selected.on_change("indices", move)
        _follow(above, cursor)
        _share_range(above, cursor, numbers)
    shown: Any = column(above, below, sizing_mode="stretch_width")
    shown._ipython_display_ = lambda: _display(shown)
    return shown


def _follow(figure: Any, cursor: Cursor) -> None:
    """Mark the step of a cursor in a figure, and keep the mark within its range."""
    from bokeh.models.annotations import Span

    mark = Span(dimension="height", line_color=LIGHT.cursor, line_width=2, visible=cursor.step is not None)
    mark.location = cursor.step
    figure.add_layout(mark)
    shown = weakref.ref(figure)

    def moved(event: Any) -> None:
        if (plot := shown()) is None:
            cursor.param.unwatch(watching)
            return

        def move() -> None:
            mark.update(location=event.new, visible=event.new is not None)
            here = _visible(plot)
            if event.new is not None and here and not here[0] <= event.new <= here[1]:
                half = (here[1] - here[0]) / 2
                plot.x_range.update(start=event.new - half, end=event.new + half)

        _in_document(plot.document, move)

    watching = cursor.param.watch(moved, "step")


def _visible(figure: Any) -> tuple[float, float] | None:
    """From and to of the horizontal axis; None before a browser has told them, when Bokeh has NaN or nothing there."""
    start, end = figure.x_range.start, figure.x_range.end
    known = all(isinstance(edge, (int, float)) and math.isfinite(edge) for edge in (start, end))
    return (float(start), float(end)) if known else None


def _share_range(figure: Any, cursor: Cursor, numbers: Any) -> None:
    """Keep the visible steps of a figure and those of a cursor equal; a bar stands around the number of its step."""
    if not len(numbers):
        return
    first, last = float(numbers[0]), float(numbers[-1])
    shown, moving = weakref.ref(figure), False

    def told(_attr: str, _old: Any, _new: Any) -> None:
        plot = shown()
        if moving or plot is None:
            return
        start, end = plot.x_range.start, plot.x_range.end
        if isinstance(start, (int, float)) and isinstance(end, (int, float)) and start < end:
            cursor.range = None if start <= first and end >= last else (start + 0.5, end + 0.5)

    def moved(event: Any) -> None:
        if (plot := shown()) is None:
            cursor.param.unwatch(watching)
            return

        def move() -> None:
            nonlocal moving
            here = _visible(plot)
            begin, end = (first, last + 1) if event.new is None else event.new
            covers = here is None or (here[0] <= first and here[1] >= last)
            if here == (begin - 0.5, end - 0.5) or (event.new is None and covers):
                return
            moving = True
            try:
                plot.x_range.update(start=begin - 0.5, end=end - 0.5)
            finally:
                moving = False

        _in_document(plot.document, move)

    if cursor.range is not None:
        figure.x_range.update(start=cursor.range[0] - 0.5, end=cursor.range[1] - 0.5)
    for edge in ("start", "end"):
        figure.x_range.on_change(edge, told)
    watching = cursor.param.watch(moved, "range")


def _in_document(document: Any, change: Callable[[], None]) -> None:
    """Change a figure, from any thread, where it is shown: a served page's turn, or a notebook's channel."""
    if document is not None and document.session_context is not None:
        document.add_next_tick_callback(change)
        return
    change()
    if document is not None and "panel" in sys.modules:
        from panel.io.notebook import push
        from panel.io.state import state

        for _, _, shown_in, comm in list(state._views.values()):
            if shown_in is document and comm is not None:
                push(document, comm)


def _display(figure: Any) -> None:
    """Show a figure in a notebook through Panel, which carries selections back to Python."""
    import panel
    from IPython.display import HTML, display

    if panel.extension._loaded:
        display(HTML(RELOADED.format(uuid.uuid4().hex)))
    else:
        panel.extension(inline=True)
    display(panel.pane.Bokeh(figure))


def _figure(title: str, x: str, y: str, tooltips: list[tuple[str, str]]) -> Any:
    from bokeh.plotting import figure

    labels: dict[str, Any] = {"title": title, "x_axis_label": x, "y_axis_label": y}
    made: Any = figure(height=230, sizing_mode="stretch_width", tools=TOOLS, tooltips=tooltips, **labels)
    made.xaxis.ticker.update(min_interval=1, num_minor_ticks=0)  # there is no half a step or request
    made.y_range.start = 0
    return made
