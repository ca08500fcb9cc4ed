"""The served dashboard: the notebook's view as a page, through Panel."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import panel as pn
import param
from panel.custom import AnyWidgetComponent
from panel.io.resources import parse_template
from panel.io.state import set_curdoc
from panel.io.threads import StoppableThread
from tornado.ioloop import IOLoop

from workbench.base.served_names import ServedNames, reachable_origins
from workbench.trace.trace import Trace
from workbench.viz.bundle import bundle
from workbench.viz.classroom import Classroom
from workbench.viz.cursor import Cursor, cursor_of
from workbench.viz.export_html import PagePlace
from workbench.viz.feed import Feed
from workbench.viz.host_guard import HostGuard
from workbench.viz.pace import Pace, processor_seconds

log = logging.getLogger("workbench")

_TEMPLATE = """{% extends "base.html" %}
{% block preamble %}<meta name="viewport" content="width=device-width, initial-scale=1">{% endblock %}
"""
"""Panel's page. It names no viewport, and a phone shows such a page as a desktop of 980 pixels in miniature."""


class TracePage(AnyWidgetComponent):
    """The ES module of the notebook view, with its traits as Panel parameters (see `widget.TraceView`)."""

    _esm = bundle()

    packet = param.Bytes(default=b"")
    other = param.Bytes(default=b"")
    status = param.Dict(default={})
    command = param.Dict(default={})
    mounted = param.Boolean(default=False)
    options = param.Dict(default={})
    download = param.Bytes(default=b"")
    cursor = param.Dict(default={})
    step = param.Integer(default=None, allow_None=True, bounds=(0, None))

    def __init__(
        self, feed: Feed, cursor: Cursor | None = None, *, opens_at: PagePlace | None = None, **params: Any
    ) -> None:
        super().__init__(status=feed.status(), **params)
        self._feed = feed
        self.news = asyncio.Event()
        if feed.room is not None:
            feed.on_news = self.news.set
            cursor = Cursor()  # visitors do not move each other's
        cursor = cursor or cursor_of(feed.trace)
        if opens_at is not None:
            cursor.param.update(step=opens_at.step, follow=False, request=opens_at.request)
        cursor.link(self)
        if opens_at is not None and opens_at.card:
            self.cursor = {**self.cursor, "card": True}
        self.param.watch(lambda event: self._feed.handle(event.new), "command")
        self.param.watch(lambda event: self._feed.confirm(), "mounted")

    @classmethod
    def _render_esm(cls, compiled: Any = True, server: bool = False) -> str:
        """The module as it is: Panel's search for indentation takes 7 of the 20 ms that a new session costs."""
        return bundle()

    def prepare(self) -> None:
        """Do most of the work of the next ``refresh``. May be called from any thread."""
        self._feed.prepare()

    def is_far_behind(self) -> bool:
        """Whether there are many steps to ``prepare``."""
        return self._feed.is_far_behind()

    def tell(self) -> None:
        """Send the status alone, if it is new."""
        if (status := self._feed.status()) != self.status:
            self.status = status

    def refresh(self) -> None:
        """Send everything that is new since the last call."""
        self._feed.update(self)

    def end(self) -> None:
        """Let go of the trace and of what was sent: a page that has ended stays until Python looks for cycles."""
        if self._feed.room is not None:
            self._feed.room.leave(self._feed)
        self._feed = Feed(Trace(self._feed.trace.meta))
        with param.parameterized.discard_events(self):
            self.param.update(packet=b"", other=b"", download=b"")


def make_app(
    source: Any,
    *,
    other: Trace | None = None,
    on_seen: Callable[[], None] | None = None,
    room: Classroom | None = None,
    opens_at: PagePlace | None = None,
) -> Callable[[], Any]:
    """Make the function that builds the page of a browser session.

    Args:
        source: A controller (an Engine), a Trace, or a function that returns the trace to show.
        other: A second trace of the same workload, to compare with.
        on_seen: Called when a browser has connected and is about to draw.
        room: The class of the visitors; by default one whose teacher's link nobody knows.
        opens_at: The place at which the page opens; None for the one that suits the trace.
    """
    room = room or Classroom()

    def session() -> Any:
        fit_phones()
        feed = Feed(source, other, room)
        page = TracePage(feed, opens_at=opens_at, options={"page": True}, sizing_mode="stretch_width")
        keep_fresh(page, on_seen)
        return page

    return session


def fit_phones() -> None:
    """Let the page of the present session be as wide as the window."""
    if pn.state.curdoc is not None:
        pn.state.curdoc.template = parse_template(_TEMPLATE)


def tell_lost_server() -> None:
    """Let the page of the present session, one without the dashboard's script, say when its server is gone."""
    pn.config.notifications = True
    pn.config.disconnect_notification = "The server does not answer: start it again, and load this page again."
    pn.config.raw_css.append(".notyf__message { font-family: system-ui, sans-serif; }")


def keep_fresh(page: TracePage, on_seen: Callable[[], None] | None = None) -> None:
    """Send what is new to a page as long as its browser session lasts.

    Args:
        page: The page of the present session.
        on_seen: Called when the browser has connected.
    """
    pace = Pace()

    async def refresh(document: Any) -> None:
        seconds = 0.0
        if page.is_far_behind():
            # Encoding a long trace takes a while, and the event loop serves other sessions too.
            try:
                prepared = asyncio.get_running_loop().run_in_executor(None, processor_seconds, page.prepare)
            except RuntimeError:  # the interpreter is exiting and the server's thread still runs
                return
            seconds = await prepared
        with pace.update(seconds), set_curdoc(document):
            page.refresh()

    async def follow(document: Any) -> None:
        # Ten times a second, Panel's own periodic callback costs more than the look for news.
        with pace:
            await follow_news(document)

    async def follow_news(document: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(pace.seconds):
                    await page.news.wait()
            except TimeoutError:
                pass
            try:
                if page.news.is_set():  # of the class: it must not wait for the pace of steps
                    page.news.clear()
                    with set_curdoc(document):
                        page.tell()
                else:
                    await refresh(document)
            except Exception:
                log.exception("an update of a view failed")

    async def start() -> None:
        document = pn.state.curdoc
        await refresh(document)
        following = asyncio.create_task(follow(document))

        def stop(_: Any) -> None:
            following.cancel()

        pn.state.on_session_destroyed(stop)
        if on_seen is not None:
            on_seen()

    pn.state.on_session_destroyed(lambda _: page.end())
    pn.state.onload(start)


def serve(
    source: Any,
    *,
    other: Trace | None = None,
    port: int = 5006,
    address: str = "127.0.0.1",
    title: str = "Workbench",
    threaded: bool = False,
    on_listening: Callable[[], None] | None = None,
    on_seen: Callable[[], None] | None = None,
    room: Classroom | None = None,
    opens_at: PagePlace | None = None,
    allow_hosts: Sequence[str] = (),
) -> Any:
    """Serve the dashboard until the process is interrupted.

    Args:
        source: A controller (an Engine) or a Trace.
        other: A second trace of the same workload, to compare with.
        port: Port to listen on; 0 chooses a free one.
        address: Interface to listen on; by default only this machine can connect.
        title: Title of the page.
        threaded: Serve on a separate thread and return the server; its ``stop()`` ends it.
        on_listening: Called on another thread as soon as a browser can connect; not if ``threaded``.
        on_seen: Called when a browser has connected and is about to draw.
        room: The class of the visitors; it has the key of the teacher's link.
        opens_at: The place at which the page opens; None for the one that suits the trace.
        allow_hosts: Names by which browsers may call the server, besides "localhost" and its addresses.

    Raises:
        OSError: The port is in use.
        ValueError: One of ``allow_hosts`` is not a name.
    """
    room = room or Classroom()
    room.origins = room.origins or reachable_origins(address, port)
    return serve_session(
        make_app(source, other=other, on_seen=on_seen, room=room, opens_at=opens_at),
        port=port,
        address=address,
        title=title,
        threaded=threaded,
        on_listening=on_listening,
        allow_hosts=allow_hosts,
    )


def serve_session(
    session: Callable[[], Any],
    *,
    port: int,
    address: str = "127.0.0.1",
    title: str = "Workbench",
    threaded: bool = False,
    on_listening: Callable[[], None] | None = None,
    allow_hosts: Sequence[str] = (),
) -> Any:
    """Serve the page that a function builds for each browser session; the other arguments are those of `serve`.

    Raises:
        OSError: The port is in use.
        ValueError: One of ``allow_hosts`` is not a name.
    """
    names = ServedNames(address, tuple(allow_hosts))
    check_port_is_free(port, address)

    def make(loop: IOLoop | None = None) -> Any:
        server = pn.serve(
            {"/": session},
            port=port,
            address=address,
            loop=loop,
            show=False,
            title=title,
            location=False,
            verbose=False,
            start=False,
        )
        server._tornado.websocket_origins.add("*")  # the guard decides
        server._http.request_callback = HostGuard(server._tornado, names)
        return server

    def run(server: Any) -> Any:
        server.start()
        server.io_loop.start()
        return server

    if threaded:
        loop = IOLoop(make_current=False)
        thread = StoppableThread(target=lambda: run(make(loop)), io_loop=loop, owns_loop=True, daemon=True)
        thread.start()
        return thread
    server = make()
    if on_listening is not None:
        # On another thread, because opening a browser may take its time; in the loop, because it answers from then on.
        server.io_loop.add_callback(threading.Thread(target=on_listening, daemon=True).start)
    return run(server)


def check_port_is_free(port: int, address: str = "127.0.0.1") -> None:
    """Raise before anything else happens when a port cannot be listened on.

    Raises:
        OSError: The port is in use, or may not be used.
    """
    with socket.socket() as probe:
        # As the server does it: a port whose last connection is being closed is free.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as problem:
            hint = "choose another one with --port (port= in Python)"
            raise OSError(f"port {port} of {address} cannot be used: {problem.strerror}; {hint}") from problem
