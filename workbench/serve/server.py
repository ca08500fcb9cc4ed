"""The server: sockets, the API, the dashboard, and an orderly end.

It is a Tornado server, because the dashboard is one: Bokeh's pages and their websocket are Tornado handlers and
cannot be mounted in an ASGI application. One event loop and one port serve both, without another package.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from panel.io.application import build_applications
from panel.io.server import get_server  # noqa: F401  (importing it puts Panel's handlers in place of Bokeh's)
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from workbench.field_checks import printable
from workbench.serve import handlers
from workbench.serve.access_log import AccessLog
from workbench.serve.bridge import EngineBridge
from workbench.serve.completions import ChatCompletionsHandler, CompletionsHandler
from workbench.serve.guard import COOKIE, DASHBOARD, Guard
from workbench.serve.listener import Listener
from workbench.serve.log_limit import limit_repeats
from workbench.serve.settings import ServeSettings
from workbench.serve.trace_stream import TraceStream
from workbench.viz.app import make_app

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

BACKLOG = 4096
"""Number of connections that the system keeps until they are accepted. One more than that would try again only after a
second, so a burst of connections must fit; Tornado's default is 128."""

UNUSED_PAGE_SECONDS = 15
"""Time that a browser has to connect to the page of the dashboard that it was given."""

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
        self.bridge = EngineBridge(engine, settings, asyncio.get_running_loop())
        self._access_log = (
            None if settings.access_log is None else AccessLog(settings.access_log, settings.trusted_proxies)
        )
        log = self._access_log
        log_request: LogRequest = log or (lambda handler: None)
        sockets = bind_sockets(settings.port, settings.host, backlog=BACKLOG)
        self.port: int = sockets[0].getsockname()[1]
        self.dashboard = BokehTornado(
            # The trace and not the engine: a viewer must not pause the engine or abort the requests of others.
            build_applications({DASHBOARD: make_app(lambda: engine.trace)}, title="Workbench"),
            use_index=False,
            redirect_root=False,
            # The guard compares Origin with Host before Bokeh sees a websocket.
            extra_websocket_origins=["*"],
            # Headers and cookies that are not excluded end up in the page, in the token of its session.
            exclude_headers=["Authorization", "Cookie"],
            exclude_cookies=[COOKIE],
            # A page that nobody uses holds a megabyte, and thousands of objects that garbage collections pass over.
            unused_session_lifetime_milliseconds=1000 * UNUSED_PAGE_SECONDS,
            check_unused_sessions_milliseconds=1000,
            log_function=log_request,
        )
        api = make_api(self.bridge, log_request)
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


def make_api(bridge: EngineBridge, log_request: LogRequest = lambda handler: None) -> Application:
    """All endpoints but the dashboard."""
    routes: list[tuple[str, Any]] = [
        ("/", handlers.Root),
        ("/favicon.ico", handlers.NoIcon),
        ("/v1/models", handlers.Models),
        ("/v1/models/(.+)", handlers.Models),
        ("/v1/completions", CompletionsHandler),
        ("/v1/chat/completions", ChatCompletionsHandler),
        ("/v1/embeddings", handlers.Embeddings),
        ("/tokenize", handlers.Tokenize),
        ("/health", handlers.Health),
        ("/metrics", handlers.Metrics),
        ("/openapi.json", handlers.OpenApi),
        ("/trace/stream", TraceStream),
    ]
    shared = {"bridge": bridge}
    return Application(
        [(path, handler, shared) for path, handler in routes],
        default_handler_class=handlers.NotFound,
        default_handler_args=shared,
        log_function=log_request,
        compress_response=False,
    )


def serve(engine: Engine, settings: ServeSettings) -> None:
    """Serve an engine until SIGINT or SIGTERM."""

    async def main() -> None:
        server = Server(engine, settings)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        _share_the_interpreter()
        limit_repeats()
        scheme = "http" if settings.tls_cert is None else "https"
        print(
            f"serving {printable(engine.name)} on {scheme}://{settings.host}:{server.port} (dashboard: {DASHBOARD})",
            flush=True,
        )
        await server.run()

    asyncio.run(main())


def _share_the_interpreter() -> None:
    """Shorten the time for which the event loop waits for Python's lock, which it shares with the engine's thread."""
    # A thread that wants the lock gets it after this time. Python's 5 ms, for each system call of a request, would add
    # up.
    sys.setswitchinterval(0.001)
    # No object made so far will become garbage, and each collection of all of them takes more than 100 ms.
    gc.collect()
    gc.freeze()
