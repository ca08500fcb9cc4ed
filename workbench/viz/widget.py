"""The notebook view: an anywidget that shows a trace or a live engine."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Literal, get_args

import anywidget
import traitlets

from workbench.base.field_checks import integer, suggestion
from workbench.trace.readings.breakpoints import Breakpoints
from workbench.trace.trace import Trace
from workbench.viz.background import HAS_THREADS, in_background
from workbench.viz.bundle import bundle
from workbench.viz.cursor import cursor_of
from workbench.viz.export_html import PagePlace
from workbench.viz.feed import Feed
from workbench.viz.pace import Pace
from workbench.viz.panel_names import PanelName, panel_ids
from workbench.viz.reprs import trace_html
from workbench.viz.still import refresh_after_cells, still_of

Theme = Literal["auto", "light", "dark"]
THEMES: tuple[Theme, ...] = get_args(Theme)

View = Literal["story", "scheduler", "kernel", "all", "incident"]
VIEWS: tuple[View, ...] = get_args(View)
"""Choices of panels that a view can show."""


class TraceView(anywidget.AnyWidget):
    """A view in a notebook cell. Each call of ``watch`` makes a new one, so that no two cells share a view.

    A saved notebook keeps a still picture of the run's end (`workbench.viz.still`), or the whole page: `freeze`.

    Attributes:
        packet: The newest packet of columns (see ``layout/packet.py``).
        other: The columns of a trace to compare with.
        status: State of the engine and messages for the user.
        command: The latest command of the user.
        mounted: True once the browser shows the view and has read a packet.
        options: Layout of the view: "theme", "panels", "height", and "page" if it is the only content of its page.
        download: A file for the browser to save: its name, a line break, its content.
        cursor: The step and the request that the view shows, as `workbench.viz.cursor.Cursor` gives them.
        still: Class of the still picture that the widget hides while it runs.
        step: Number of the step that was chosen last, to be linked: ``jslink((slider, "value"), (view, "step"))``.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    packet = traitlets.Bytes(b"").tag(sync=True)
    other = traitlets.Bytes(b"").tag(sync=True)
    status = traitlets.Dict().tag(sync=True)
    command = traitlets.Dict().tag(sync=True)
    mounted = traitlets.Bool(False).tag(sync=True)
    options = traitlets.Dict().tag(sync=True)
    download = traitlets.Bytes(b"").tag(sync=True)
    cursor = traitlets.Dict().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)
    step = traitlets.Int(None, allow_none=True, min=0).tag(sync=True)

    def __init__(self, feed: Feed, options: dict[str, Any]) -> None:
        self._feed = feed
        self._still = still_of(lambda: feed.trace)
        packet = feed.next_packet() or b""
        shown = {"status": feed.status(), "options": options, "still": self._still.name}
        width = {"width": "100%"}  # beside other widgets, it would have none
        super().__init__(_esm=bundle(), packet=packet, **shown, layout=width)
        self.shared_cursor = cursor_of(feed.trace)
        self.shared_cursor.link(self)
        self.observe(lambda change: change.owner._handle(change.new), "command")
        self.observe(lambda change: feed.confirm(), "mounted")

    def __repr__(self) -> str:
        """The trace that is shown, for front ends that cannot draw widgets."""
        return f"TraceView({self._feed.trace!r})"

    def _ipython_display_(self) -> None:
        """Show the widget, and below it the picture that stays in a saved notebook."""
        if (found := super()._repr_mimebundle_()) is not None:
            # The number of steps of this moment would stay beside the picture of the end.
            words = {"text/plain": "TraceView: a live view, as long as its kernel runs"}
            self._still.show(found[0] | words)
            refresh_after_cells(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and a still picture for pages that cannot run it, of hosts that update no output."""
        found = super()._repr_mimebundle_(**kwargs)
        if found is not None:
            found[0]["text/html"] = trace_html(self._feed.trace)
        return found

    def __panel__(self) -> Any:
        """The same source as a Panel component, which needs no ipywidgets_bokeh."""
        from workbench.viz.panes import page_of

        return page_of(self._feed.controller if self._feed.controller is not None else self._feed.trace)

    @property
    def breakpoints(self) -> Breakpoints:
        """Breakpoints of the engine that is shown, to add conditions written in Python.

        Raises:
            ValueError: The view shows a recording.
        """
        found = getattr(self._feed.controller, "breakpoints", None)
        if found is None:
            raise ValueError("breakpoints need a live engine: a recording cannot be controlled")
        return found

    def _handle(self, command: dict[str, Any]) -> None:
        self._feed.handle(command)
        if not HAS_THREADS:  # nothing polls
            self.refresh()

    def refresh(self) -> None:
        """Send everything that is new. It is called periodically; call it yourself to show the last step at once."""
        was_running = self.status.get("state") == "running"
        self._feed.update(self)
        if was_running and self.status.get("state") != "running":
            self.refresh_still()

    def refresh_still(self) -> None:
        """Draw the picture that stays in a saved notebook again, if the run has moved on since."""
        self._still.refresh()

    def freeze(self) -> None:
        """Put the offline page of the run, as ``trace.to_html()`` saves it, into the notebook and end the live view.

        The page works in a saved notebook that is trusted, without a kernel: every step, every panel. It adds its own
        size to the notebook's file, from half a megabyte.
        """
        self.refresh()
        step, request = self.shared_cursor.step, self.shared_cursor.request
        place = PagePlace(self.options.get("view", "story"), step, request) if step is not None else None
        self._still.freeze(self._feed.trace, self.options.get("height"), place)
        self.close()


def watch(
    source: Any,
    *,
    other: Trace | None = None,
    panels: Sequence[PanelName | str] = (),
    theme: Theme = "auto",
    view: View = "story",
    bare: bool = False,
    height: int | None = None,
) -> TraceView:
    """Show a trace or a live engine in a notebook cell; each call makes a new view.

    All views of one trace share a cursor (``view.shared_cursor``): moving it in one moves it in all.

    To keep a view in sight while cells below it run, right-click it in JupyterLab and choose "Create New View for Cell
    Output": the copy is live and can be put beside the notebook.

    With the environment variable WORKBENCH_HEADLESS=1 the view shows the present state and does not poll, so that a
    notebook that runs unattended leaves no thread behind.

    Args:
        source: A Trace, or an Engine (anything with ``trace``, ``state``, ``start``, ``pause`` and ``step``).
        other: A second trace of the same workload, to compare with.
        panels: Names of the panels to show, such as "chunks" or "kv_pool" (`panel_names.PANELS`), or a text with
            commas; all by default.
        theme: "auto" (that of the notebook), "light" or "dark".
        view: The view to begin with: "story", "scheduler", "kernel", "all" or "incident".
        bare: Leave the controls out.
        height: Height in pixels, from 200 to 10,000, within which the view scrolls; by default it is as high as its
            panels.

    Raises:
        ValueError: An unknown panel, theme or view, or a height outside its range.
    """
    if height is not None:
        height = integer("height", height, 200, 10_000)
    if view not in VIEWS:
        raise ValueError(f"view must be one of {', '.join(VIEWS)}, got {view!r}{suggestion(view, VIEWS)}")
    ids = panel_ids(panels)
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(THEMES)}, got {theme!r}{suggestion(theme, THEMES)}")
    options: dict[str, Any] = {"panels": ids, "theme": theme}
    options |= {name: value for name, value in (("view", view), ("bare", bare)) if value not in ("story", False)}
    options |= {"height": height} if height is not None else {}
    shown = TraceView(Feed(source, other), options)
    if HAS_THREADS and os.environ.get("WORKBENCH_HEADLESS") != "1":
        newest = weakref.ref(shown)
        in_background(lambda: _poll(newest), "workbench-view")
    return shown


def view(source: Any, name: PanelName | str, *, theme: Theme = "auto") -> TraceView:
    """One panel as a widget of its kind, to be put beside others: ``HBox([trace.view("kv_pool"), my_plot])``.

    All views of one trace share ``cursor_of(trace)``.

    Args:
        source: A Trace or an Engine.
        name: Name of a panel, such as "chunks", "kv_pool" or "texts".
        theme: "auto", "light" or "dark".

    Raises:
        ValueError: An unknown panel or theme.
    """
    return watch(source, panels=(name,), theme=theme, bare=True)


def _poll(view_ref: weakref.ref[TraceView]) -> None:
    pause, pace = threading.Event(), Pace()
    while not pause.wait(pace.seconds):
        view = view_ref()
        # The comm is None once the widget is closed or the front end has disconnected for good.
        if view is None or view.comm is None:
            return
        with pace.update():
            view.refresh()
        del view
