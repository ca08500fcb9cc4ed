"""The server: sockets, the API, the dashboard, and an orderly end.

It is a Tornado server, because the dashboard is one: Bokeh's pages and their websocket are Tornado handlers and
cannot be mounted in an ASGI application. One event loop and one port serve both, without another package.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import panel.io.document
from bokeh.server.server import BaseServer
from tornado.ioloop import IOLoop
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, RedirectHandler, RequestHandler
from tornado.websocket import WebSocketClosedError

from workbench.apps.serve import handlers
from workbench.apps.serve.access_log import AccessLog
from workbench.apps.serve.bridge import EngineBridge
from workbench.apps.serve.completions import ChatCompletionsHandler, CompletionsHandler
from workbench.apps.serve.cross_origin import NameOrigin
from workbench.apps.serve.dashboard import DASHBOARD, Dashboard, PageHandler
from workbench.apps.serve.fair_loop import FairEventLoop
from workbench.apps.serve.guard import Guard
from workbench.apps.serve.listener import Listener
from workbench.apps.serve.log_limit import limit_repeats
from workbench.apps.serve.priority import go_first, go_last
from workbench.apps.serve.settings import ServeSettings
from workbench.apps.serve.trace_stream import TraceStream
from workbench.base.served_names import reachable_origins
from workbench.base.text import printable
from workbench.viz.app import make_app
from workbench.viz.classroom import Classroom

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

BACKLOG = 4096
"""Number of connections that the system keeps until they are accepted. One more than that would try again only after a
second, so a burst of connections must fit; Tornado's default is 128."""

COLLECT_SECONDS = 0.5
"""Interval at which young garbage is collected, most of it sessions of the dashboard that have ended."""

COLLECT_ALL_SECONDS = 10.0
"""Minimum pause between two collections of all garbage, which take the longer the more objects live."""

COLLECT_PAUSE = 100
"""Minimum pause after a collection of all garbage, as a multiple of the time that it took."""

MIN_YOUNG = 4
"""Number of Python's own collections of the youngest objects, after 700 new ones each, that come before one of ours."""

LogRequest = Callable[[RequestHandler], None]
"""A function that is called with each handler that has answered."""


class Server:
    """An engine behind HTTP; created on a running event loop. ``await run()`` serves until ``stop()``.

    Args:
        engine: The engine, which stays open when the server ends.
        settings: Address, access and limits.

    Attributes:
        port: The port it listens on.
        listener: Its connections.
        dashboard: Bokeh's application.

    Raises:
        OSError: The port is in use, or the access log cannot be opened.
    """

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(_report_failure)
        self.bridge = EngineBridge(engine, settings, asyncio.get_running_loop())
        self._access_log = (
            None if settings.access_log is None else AccessLog(settings.access_log, settings.trusted_proxies)
        )
        log = self._access_log
        log_request: LogRequest = log or (lambda handler: None)
        try:
            sockets = bind_sockets(settings.port, settings.host, backlog=BACKLOG)
        except OSError as problem:
            raise OSError(
                f"port {settings.port} of {settings.host} cannot be used: {problem.strerror}; choose another one with "
                "--port (port= in Python)"
            ) from problem
        self.port: int = sockets[0].getsockname()[1]
        # The trace and not the engine: a viewer must not pause the engine or abort the requests of others.
        self.room = Classroom()
        self.room.origins = reachable_origins(settings.host, self.port)
        self.dashboard = Dashboard(make_app(lambda: engine.trace, room=self.room), log_request)
        api = make_api(self.bridge, self.dashboard, log_request)
        loop = asyncio.get_running_loop()
        if isinstance(loop, FairEventLoop):
            loop.serve_first(listening.fileno() for listening in sockets)
        guard = Guard(settings, api, self.dashboard, log.add_request if log else lambda request, stream, status: None)
        self.listener = Listener(guard, settings, log.add_connection if log else lambda stream, status: None)
        self.listener.add_sockets(sockets)
        self._bokeh = BaseServer(IOLoop.current(), self.dashboard, self.listener)
        self._bokeh.start()

    def stop(self) -> None:
        """End the server when the open requests have ended or their time is up; called on the event loop."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until ``stop()``, then drain."""
        watching = asyncio.ensure_future(self.bridge.watch())
        try:
            await self._stop.wait()
            await self.bridge.drain()
            await asyncio.sleep(0.1)  # for the last events to reach the clients
        finally:
            watching.cancel()
            self.listener.stop()
            self._bokeh.stop()
            if self._access_log is not None:
                self._access_log.close()


def make_api(bridge: EngineBridge, dashboard: Dashboard, log_request: LogRequest = lambda handler: None) -> Application:
    """All endpoints but the websocket and the scripts of the dashboard."""
    routes: list[tuple[str, Any]] = [
        ("/", handlers.Root),
        ("/favicon.ico", handlers.NoIcon),
        ("/v1/models", handlers.Models),
        ("/v1/models/(.+)", handlers.Models),
        ("/v1/completions", CompletionsHandler),
        ("/v1/chat/completions", ChatCompletionsHandler),
        ("/v1/embeddings", handlers.Embeddings),
        ("/tokenize", handlers.Tokenize),
        ("/detokenize", handlers.Detokenize),
        ("/version", handlers.Version),
        ("/health", handlers.Health),
        ("/metrics", handlers.Metrics),
        ("/openapi.json", handlers.OpenApi),
        ("/trace/stream", TraceStream),
    ]
    return Application(
        [
            *((path, handler, {"bridge": bridge}) for path, handler in routes),
            (DASHBOARD, PageHandler, {"dashboard": dashboard}),
            (DASHBOARD + "/", RedirectHandler, {"url": DASHBOARD}),
        ],
        default_handler_class=handlers.NotFound,
        default_handler_args={"bridge": bridge},
        log_function=log_request,
        transforms=[NameOrigin],
        compress_response=False,
    )


def serve(engine: Engine, settings: ServeSettings) -> None:
    """Serve an engine until SIGINT or SIGTERM."""
    if engine.model.tokenizer is not None:
        engine.model.tokenizer.encode("1")  # the first text compiles it, which takes seconds when nothing is kept

    async def main() -> None:
        server = Server(engine, settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        # For pages that open: several such threads would only wait for Python's lock, and the event loop with them.
        loop.set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="workbench-pages", initializer=go_last))
        go_first()
        _share_the_interpreter()
        collecting = asyncio.ensure_future(_collect_garbage())
        limit_repeats()
        scheme = "http" if settings.tls_cert is None else "https"
        print(
            f"serving {printable(engine.name)} on {scheme}://{settings.host}:{server.port} (dashboard: {DASHBOARD}; "
            f"to teach with it: {DASHBOARD}#teach={server.room.key}, to follow: {DASHBOARD}#follow)",
            flush=True,
        )
        await server.run()
        collecting.cancel()

    with asyncio.Runner(loop_factory=FairEventLoop) as runner:
        runner.run(main())


def _share_the_interpreter() -> None:
    """Shorten the time for which the event loop waits for Python's lock, which it shares with the engine's thread."""
    # A thread that wants the lock gets it after this time. Python's 5 ms, for each system call of a request, would add
    # up.
    sys.setswitchinterval(0.001)
    # No object made so far will become garbage, and each collection of all of them takes more than 100 ms.
    gc.collect()
    gc.freeze()
    # Python would collect older generations when there is much garbage, which takes long; _collect_garbage does.
    gc.set_threshold(gc.get_threshold()[0], 1_000_000_000, 1_000_000_000)
    # Panel would do it too, after a pause, when a session has ended.
    panel.io.document._garbage_collect = lambda: None


async def _collect_garbage() -> None:
    """Collect garbage in small pieces, and none while nothing happens: nobody else runs during a collection."""
    loop = asyncio.get_running_loop()
    again = loop.time()
    while True:
        _, num_young, num_middle = gc.get_count()
        if num_middle and loop.time() >= again:
            start = time.thread_time()
            gc.collect()
            again = loop.time() + max(COLLECT_ALL_SECONDS, COLLECT_PAUSE * (time.thread_time() - start))
        elif num_young >= MIN_YOUNG:
            gc.collect(1)
        await asyncio.sleep(COLLECT_SECONDS)


def _report_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what nobody awaits, except that a client has left."""
    if not isinstance(context.get("exception"), StreamClosedError | WebSocketClosedError):
        loop.default_exception_handler(context)
