"""The server as a whole: sockets, the API, the dashboard, and how it ends.

It is a Tornado server, because the dashboard is one: Bokeh's pages and their websocket are Tornado handlers and
cannot be mounted in an ASGI application. One event loop and one port serve both, with nothing installed besides.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from typing import TYPE_CHECKING, Any

from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from panel.io.application import build_applications
from panel.io.server import get_server  # noqa: F401  (importing it puts Panel's handlers in place of Bokeh's)
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import Application

from workbench.serve import handlers
from workbench.serve.bridge import EngineBridge
from workbench.serve.completions import ChatCompletionsHandler, CompletionsHandler
from workbench.serve.guard import COOKIE, DASHBOARD, Guard
from workbench.serve.settings import ServeSettings
from workbench.viz.app import make_app

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

BODY_SECONDS = 60
"""Time that the body of a request may take to come."""


class Server:
    """An engine behind HTTP. Make it on a running event loop; ``await run()`` serves until ``stop()``.

    Args:
        engine: The engine; it stays open when the server ends.
        settings: Address, access and limits.

    Attributes:
        port: The port it listens on.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self.bridge = EngineBridge(engine, settings, asyncio.get_running_loop())
        sockets = bind_sockets(settings.port, settings.host)
        self.port: int = sockets[0].getsockname()[1]
        dashboard = BokehTornado(
            # The trace and not the engine: who watches a server cannot pause it or end the requests of others.
            build_applications({DASHBOARD: make_app(lambda: engine.trace)}, title="Workbench"),
            use_index=False,
            redirect_root=False,
            # The guard has compared Origin with Host before Bokeh sees a websocket.
            extra_websocket_origins=["*"],
            # What a session's token may carry ends up in the page.
            exclude_headers=["Authorization", "Cookie"],
            exclude_cookies=[COOKIE],
        )
        guard = Guard(settings, make_api(self.bridge), dashboard)
        self._http = HTTPServer(
            # The guard answers a body that is too large; Tornado would only hang up.
            guard, max_body_size=1 << 40, body_timeout=BODY_SECONDS,
            max_header_size=32768, idle_connection_timeout=300,
        )  # fmt: skip
        self._http.add_sockets(sockets)
        self._bokeh = BaseServer(IOLoop.current(), dashboard, self._http)
        self._bokeh.start()

    def stop(self) -> None:
        """End the server, after the open requests have ended or their time is up; on the event loop."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until ``stop()``, then drain."""
        watching = asyncio.ensure_future(self.bridge.watch())
        try:
            await self._stop.wait()
            await self.bridge.drain()
            await asyncio.sleep(0.1)  # the last events are on their way to the clients
        finally:
            watching.cancel()
            self._http.stop()
            self._bokeh.stop()


def make_api(bridge: EngineBridge) -> Application:
    """Every endpoint but the dashboard."""
    routes: list[tuple[str, Any]] = [
        ("/", handlers.Root),
        ("/v1/models", handlers.Models),
        ("/v1/models/(.+)", handlers.Models),
        ("/v1/completions", CompletionsHandler),
        ("/v1/chat/completions", ChatCompletionsHandler),
        ("/v1/embeddings", handlers.Embeddings),
        ("/tokenize", handlers.Tokenize),
        ("/health", handlers.Health),
        ("/metrics", handlers.Metrics),
        ("/openapi.json", handlers.OpenApi),
        ("/trace/stream", handlers.TraceStream),
    ]
    shared = {"bridge": bridge}
    return Application(
        [(path, handler, shared) for path, handler in routes],
        default_handler_class=handlers.NotFound,
        default_handler_args=shared,
        log_function=lambda handler: None,
        compress_response=False,
    )


def serve(engine: Engine, settings: ServeSettings) -> None:
    """Serve an engine until SIGINT or SIGTERM."""

    async def main() -> None:
        server = Server(engine, settings)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        _share_the_interpreter()
        print(f"serving {engine.name} on http://{settings.host}:{server.port} (dashboard: {DASHBOARD})", flush=True)
        await server.run()

    asyncio.run(main())


def _share_the_interpreter() -> None:
    """Keep the event loop from waiting for the engine's thread where both need Python's one lock."""
    # A thread that wants the lock gets it after this long; 5 ms, Python's own, once for each of a request's system
    # calls would be noticed.
    sys.setswitchinterval(0.001)
    # Nothing that was made up to now will be garbage; looking through all of it takes more than 100 ms each time.
    gc.collect()
    gc.freeze()
