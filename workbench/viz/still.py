"""The picture that stays of a live view: what a saved notebook shows where the widget cannot run.

A view shows two outputs. The first is the widget. The second is a still picture, which the widget hides while it runs;
a notebook that is opened again without its kernel, GitHub and nbconvert show it. It is drawn again at the end of each
cell, and of each run in the background, in which the run has moved on. That leaves the widget alone, so its cursor, its
scroll position and pinned copies of it stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from html import escape
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakSet

from workbench.viz.export_html import PagePlace, html_page
from workbench.viz.reprs import trace_html

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

log = logging.getLogger("workbench")

FRAME_PIXELS = 900
"""Height of the frame of a frozen page, unless the view has one."""

# JupyterLab says "Error displaying widget" where a saved notebook has lost its widgets: the picture takes its place.
_INSTEAD_OF_AN_ERROR = (
    ".jp-OutputArea-child:has(+.jp-OutputArea-child .{name})>.jupyter-widgets:not(:has(*)){{display:none}}"
)


class Still:
    """The still pictures of one view, one for each cell that displays it.

    Args:
        draw: Gives the picture as HTML.
        state: Changes whenever the picture would.

    Attributes:
        name: Class of its elements, by which the widget hides them while it runs.
    """

    def __init__(self, draw: Callable[[], str], state: Callable[[], Hashable] = lambda: None) -> None:
        self.name = f"wb-still-{uuid4().hex}"
        self._draw, self._state = draw, state
        self._widgets: list[Any] = []
        self._pictures: list[Any] = []
        self._drawn: Hashable = None

    def show(self, widget: dict[str, Any]) -> None:
        """Display the widget, given as its MIME bundle, and the picture below it."""
        from IPython.display import display

        self._widgets.append(display(widget, raw=True, display_id=True))
        self._drawn = self._state()
        self._pictures.append(display(self._bundle(self._draw()), raw=True, display_id=True))

    def refresh(self) -> None:
        """Draw the picture again wherever it is displayed, if it has changed."""
        if self._pictures and self._state() != self._drawn:
            self._drawn = self._state()
            self._replace(self._bundle(self._draw()))

    def freeze(self, trace: Trace, height: int | None, opens_at: PagePlace | None = None) -> None:
        """Put the offline page of a run, opened at a place, where the widget and its picture are, for good."""
        from IPython.display import display

        page = escape(html_page(trace, opens_at=opens_at), quote=True)
        frame = (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads" title="{escape(repr(trace))}" '
            f'style="width:100%;height:{height or FRAME_PIXELS}px;border:0"></iframe>'
        )
        if not self._pictures:
            display({"text/html": frame}, raw=True)
        for shown in self._widgets:
            shown.update({"text/html": "", "text/plain": ""}, raw=True)
        self._replace({"text/html": frame})
        self._widgets, self._pictures = [], []

    def _replace(self, bundle: dict[str, str]) -> None:
        for shown in self._pictures:
            shown.update(bundle, raw=True)

    def _bundle(self, picture: str) -> dict[str, str]:
        # No plain text: a terminal has the widget's already.
        style = _INSTEAD_OF_AN_ERROR.format(name=self.name)
        return {"text/html": f'<div class="{self.name}"><style>{style}</style>{picture}</div>'}


def still_of(newest: Callable[[], Trace]) -> Still:
    """The still pictures of a run, given as a function: a run that forgets its oldest steps is another trace later."""
    return Still(lambda: trace_html(newest()), lambda: _state(newest()))


def _state(trace: Trace) -> tuple[int, int, int]:
    """Changes with every step, also in a run that forgets its oldest ones."""
    return id(trace), len(trace), trace[-1].step if len(trace) else -1


_views: WeakSet[Any] = WeakSet()


def refresh_after_cells(view: Any) -> None:
    """Call ``view.refresh_still()`` at the end of every cell of this notebook, while the view lives."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    shell.events.register("post_run_cell", _refresh_all)  # once, however often it is asked for
    _views.add(view)


def _refresh_all(*_: object) -> None:
    for view in list(_views):
        try:
            view.refresh_still()
        except Exception:  # a cell has ended well: its result must not depend on a picture
            log.exception("the still picture of a view could not be drawn")
