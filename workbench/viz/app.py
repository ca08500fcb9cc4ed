"""The served dashboard: the notebook's view as a page of its own, through Panel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import panel as pn
import param
from panel.custom import AnyWidgetComponent

from workbench.trace.trace import Trace
from workbench.viz.bundle import bundle
from workbench.viz.feed import POLL_SECONDS, Feed


class TracePage(AnyWidgetComponent):
    """The same ES module as in a notebook, with the same traits as Panel parameters (see ``widget.TraceView``)."""

    _esm = bundle()

    packet = param.Bytes(default=b"")
    other = param.Bytes(default=b"")
    status = param.Dict(default={})
    command = param.Dict(default={})
    mounted = param.Boolean(default=False)
    options = param.Dict(default={})

    def __init__(self, feed: Feed, **params: Any) -> None:
        super().__init__(status=feed.status(), **params)
        self._feed = feed
        self.param.watch(lambda event: feed.handle(event.new), "command")
        self.param.watch(lambda event: feed.confirm(), "mounted")

    def prepare(self) -> None:
        """Do the greater part of the work of the next ``refresh``; on any thread."""
        self._feed.prepare()

    def refresh(self) -> None:
        """Send what is new since the last call."""
        self._feed.update(self)


def make_app(source: Any, *, other: Trace | None = None, theme: str = "auto") -> Callable[[], Any]:
    """A function that builds the page for one browser session.

    Args:
        source: A controller (an Engine), a Trace, or a function that returns the trace to show.
        other: A second trace of the same workload, to compare with.
        theme: "auto", "light" or "dark".
    """

    def session() -> Any:
        page = TracePage(Feed(source, other), options={"theme": theme, "page": True}, sizing_mode="stretch_width")

        async def refresh() -> None:
            # A long trace takes a while to encode, and the event loop has others to serve.
            try:
                prepared = asyncio.get_running_loop().run_in_executor(None, page.prepare)
            except RuntimeError:  # the interpreter is ending while the server's thread still runs
                return
            await prepared
            page.refresh()

        async def start() -> None:
            await refresh()
            pn.state.add_periodic_callback(refresh, period=int(POLL_SECONDS * 1000))

        pn.state.onload(start)
        return page

    return session


def serve(
    source: Any,
    *,
    other: Trace | None = None,
    port: int = 5006,
    address: str = "127.0.0.1",
    show: bool = False,
    title: str = "Workbench",
    threaded: bool = False,
) -> Any:
    """Serve the dashboard until the process is interrupted.

    Args:
        source: A controller (an Engine) or a Trace.
        other: A second trace of the same workload, to compare with.
        port: Port to listen on; 0 takes a free one.
        address: Interface to listen on; only this machine by default.
        show: Open a browser.
        title: Title of the page.
        threaded: Serve on a thread of its own and return the server; its ``stop()`` ends it.

    Raises:
        OSError: The port is in use.
    """
    return pn.serve(
        {"/": make_app(source, other=other)},
        port=port,
        address=address,
        show=show,
        title=title,
        threaded=threaded,
        verbose=False,
    )
