"""The notebook view: an anywidget that shows a trace or a live engine."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import anywidget
import traitlets

from workbench.trace.breakpoints import Breakpoints
from workbench.trace.trace import Trace
from workbench.viz.bundle import bundle
from workbench.viz.feed import POLL_SECONDS, Feed

PANELS = (
    "timeline",
    "gantt",
    "compare",
    "packed",
    "rectangle",
    "weights",
    "kernel",
    "texts",
    "pool",
    "tables",
    "events",
    "metrics",
)
"""Panels of a view, by the names ``watch`` takes."""

THEMES = ("auto", "light", "dark")


class TraceView(anywidget.AnyWidget):
    """A view in a notebook cell. Every call of ``watch`` makes a new one, so that no two cells share a view.

    Attributes:
        packet: The newest packet of columns (see ``layout/packet.py``).
        other: The columns of a trace to compare with.
        status: State of the engine and messages for the person.
        command: What the person asked for last.
        mounted: The browser shows the view and has taken in a packet.
        options: How the view is laid out: "theme", "panels", and "page" where it has a page to itself.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    packet = traitlets.Bytes(b"").tag(sync=True)
    other = traitlets.Bytes(b"").tag(sync=True)
    status = traitlets.Dict().tag(sync=True)
    command = traitlets.Dict().tag(sync=True)
    mounted = traitlets.Bool(False).tag(sync=True)
    options = traitlets.Dict().tag(sync=True)

    def __init__(self, feed: Feed, options: dict[str, Any]) -> None:
        self._feed = feed
        super().__init__(_esm=bundle(), packet=feed.next_packet() or b"", status=feed.status(), options=options)
        self.observe(lambda change: feed.handle(change.new), "command")
        self.observe(lambda change: feed.confirm(), "mounted")

    def __repr__(self) -> str:
        """What is shown, for places that draw no widgets."""
        return f"TraceView({self._feed.trace!r})"

    @property
    def breakpoints(self) -> Breakpoints:
        """Breakpoints of the engine that is shown, for conditions written in Python.

        Raises:
            ValueError: The view shows a recording.
        """
        found = getattr(self._feed.controller, "breakpoints", None)
        if found is None:
            raise ValueError("breakpoints need a live engine: a recording can only be looked at")
        return found

    def refresh(self) -> None:
        """Send what is new. Called by the poller; call it yourself to show the last step at once."""
        self._feed.update(self)


def watch(source: Any, *, other: Trace | None = None, panels: tuple[str, ...] = (), theme: str = "auto") -> TraceView:
    """A new view of a trace or of a live engine, for a notebook cell.

    With the environment variable WORKBENCH_HEADLESS=1 the view holds what there is now and does not poll, so that
    a notebook that is executed without a person leaves no thread behind.

    Args:
        source: A Trace, or an Engine (anything with ``trace``, ``state``, ``start``, ``pause`` and ``step``).
        other: A second trace of the same workload, to compare with.
        panels: Names of the panels to show; all by default.
        theme: "auto" (that of the notebook), "light" or "dark".

    Raises:
        ValueError: An unknown panel or theme.
    """
    unknown = set(panels) - set(PANELS)
    if unknown:
        raise ValueError(f"panels: unknown {sorted(unknown)}; known are {', '.join(PANELS)}")
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(THEMES)}, got {theme!r}")
    view = TraceView(Feed(source, other), {"panels": list(panels), "theme": theme})
    if os.environ.get("WORKBENCH_HEADLESS") != "1":
        threading.Thread(target=_poll, args=(weakref.ref(view),), name="workbench-view", daemon=True).start()
    return view


def _poll(view_ref: weakref.ref[TraceView]) -> None:
    pause = threading.Event()
    while not pause.wait(POLL_SECONDS):
        view = view_ref()
        # The comm is None once the widget was closed or its kernel's front end has gone for good.
        if view is None or view.comm is None:
            return
        view.refresh()
        del view
