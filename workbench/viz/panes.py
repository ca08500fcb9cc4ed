"""The panels as Panel components, to build a dashboard from: ``pn.Row(Pool(engine), my_plot)``.

Each takes a Trace or a live Engine. All panes of one trace share ``pane.cursor``, whose parameters ``step``, ``follow``
and ``request`` can be read, set, watched and bound: ``pn.bind(f, pane.cursor.param.step)``.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import panel as pn
import param

from workbench.viz.app import TracePage, keep_fresh
from workbench.viz.background import HAS_THREADS, in_background
from workbench.viz.cursor import Cursor, cursor_of
from workbench.viz.feed import Feed
from workbench.viz.pace import Pace

__all__ = [
    "AttentionMask",
    "BlockTables",
    "Chunks",
    "Events",
    "Metrics",
    "PackedBatch",
    "Pane",
    "Pool",
    "Texts",
    "Timeline",
    "WorkList",
]


class Pane(pn.viewable.Viewer):
    """One panel of the dashboard; each of the other classes names one.

    Args:
        source: A Trace, or a controller such as an Engine.
        **params: The parameters.
    """

    theme: Any = param.Selector(default="auto", objects=["auto", "light", "dark"], doc="Colours of the panel.")
    controls = param.Boolean(default=False, doc="Whether the bars that control the engine and the cursor are shown.")
    cursor = param.ClassSelector(class_=Cursor, doc="The cursor that all views of the trace share.")
    panel_name = ""

    def __init__(self, source: Any, **params: Any) -> None:
        super().__init__(**{"cursor": cursor_of(source), **params})
        self._source = source

    def __panel__(self) -> Any:
        """A new component; a live source keeps it up to date as long as its session lasts."""
        options = {"panels": [self.panel_name], "theme": self.theme, "bare": not self.controls}
        return _component(Feed(self._source), self.cursor, options)


def page_of(source: Any) -> Any:
    """The whole view of an Engine or a Trace as a component: ``pn.panel(engine)``, ``pn.Row(engine, plot)``.

    Each has another cursor, so that the visitors of a server do not move each other's.
    """
    return _component(Feed(source), Cursor(), {})


def _component(feed: Feed, cursor: Cursor | None, options: dict[str, Any]) -> TracePage:
    page = TracePage(feed, cursor, options=options, sizing_mode="stretch_width")
    page.refresh()
    if pn.state.curdoc is not None:
        keep_fresh(page)
    elif feed.controller is not None and HAS_THREADS and os.environ.get("WORKBENCH_HEADLESS") != "1":
        shown = weakref.ref(page)
        in_background(lambda: _poll(shown), "workbench-page")
    return page


def _poll(shown: weakref.ref[TracePage]) -> None:
    """Keep a component of a notebook up to date until nobody has it any more."""
    pause, pace = threading.Event(), Pace()
    while not pause.wait(pace.seconds):
        if (page := shown()) is None:
            return
        with pace.update():
            page.refresh()
        del page


class Timeline(Pane):
    """Tokens of every step against the token budget."""

    panel_name = "timeline"


class Chunks(Pane):
    """One row per request, one cell per chunk."""

    panel_name = "gantt"


class PackedBatch(Pane):
    """The query rows of a step, and each sequence against its KV."""

    panel_name = "packed"


class AttentionMask(Pane):
    """The attention mask of a step, with the tiles that compute it."""

    panel_name = "rectangle"


class WorkList(Pane):
    """The work items of the attention kernel."""

    panel_name = "kernel"


class Texts(Pane):
    """The requests with their texts, and for a live engine the box for questions."""

    panel_name = "texts"


class Pool(Pane):
    """The KV pool: one cell per physical block."""

    panel_name = "pool"


class BlockTables(Pane):
    """The block table of each scheduled request."""

    panel_name = "tables"


class Events(Pane):
    """Events of the requests, with the scheduler's reasons."""

    panel_name = "events"


class Metrics(Pane):
    """Latencies, throughput and memory on the step axis."""

    panel_name = "metrics"
