"""The HTTP server below the API and the dashboard: it accepts connections, counts them and ends those that take long.

A connection beyond the limits is not left in the backlog, where /health would wait too: it goes into a small reserve in
which /health is answered and everything else gets status 503. When the reserve is full, its oldest connection makes
room.

A burst of connections is accepted faster than it is served, because serving one costs the event loop half a
millisecond. Those that ask for /health come first.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from tornado.http1connection import HTTP1ConnectionParameters
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop

from workbench.apps.serve.settings import ServeSettings
from workbench.apps.serve.sockets import UNAVAILABLE, PlainStream, TlsStream, WatchedStream
from workbench.models.file_limit import raise_file_limit

log = logging.getLogger("workbench")

MAX_RESERVE = 256
"""Maximum number of connections beyond the limits that wait for their status 503, or ask for /health."""

MAX_TOTAL_UNSENT = 1 << 27
"""Maximum number of bytes that wait for all readers together (128 MiB); the reader that is most behind is cut off."""

MAX_HEADER_BYTES = 32768
IDLE_SECONDS = 75.0
"""Time after which a connection without a request is closed."""
BODY_SECONDS = 30.0
"""Time limit for the arrival of a request's body."""
SWEEP_SECONDS = 0.5
SPARE_FILES = 192
"""Open files that the process needs besides its connections: model files, pipes, the event loop, a recording."""

_SERVED_AT_ONCE = 2
_PAUSE_SECONDS = 0.2
_HEALTH = b"GET /health "
_HIDDEN = b"?"
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(HTTPServer):
    """Tornado's HTTP server with limits on connections, bytes and time.

    Args:
        guard: Answers requests.
        settings: Limits, and the TLS context.
        on_lost: Called with a connection that ended while a request was awaited, and its status (``lost_with``).
    """

    def initialize(  # type: ignore[override]
        self, guard: Any, settings: ServeSettings, on_lost: Callable[[WatchedStream, int], None]
    ) -> None:
        """Called in place of ``__init__``, as Tornado does for its servers."""
        super().initialize(
            # The guard answers a request whose body is too large; Tornado would only disconnect.
            guard, max_body_size=1 << 40, body_timeout=BODY_SECONDS, max_header_size=MAX_HEADER_BYTES,
            chunk_size=65536,
        )  # fmt: skip
        self._settings = settings
        self._on_lost = on_lost
        self._tls: ssl.SSLContext | None = settings.tls_context()
        self._max_connections = allowed_connections(settings.max_connections)
        # The sweep does it. Tornado's own timer would cost each request two turns of the event loop.
        self.conn_params.header_timeout = None
        self._params = self.conn_params
        self._reserve_params = HTTP1ConnectionParameters(
            no_keep_alive=True, max_header_size=MAX_HEADER_BYTES, max_body_size=0, body_timeout=1.0
        )
        self.streams: set[WatchedStream] = set()
        self._reserve: OrderedDict[WatchedStream, None] = OrderedDict()
        self._waiting: dict[WatchedStream, Any] = {}
        self._silent: set[WatchedStream] = set()
        self._is_serving = False
        self._per_client: Counter[str] = Counter()
        self._sweeping: asyncio.Future[None] | None = None

    # -- accepting ---------------------------------------------------------------------------------------------

    def add_sockets(self, sockets: Iterable[socket.socket]) -> None:
        """Accept connections."""
        super().add_sockets(_Listening(listening, lambda: self._refuse_oldest()) for listening in sockets)
        if self._sweeping is None:
            self._sweeping = asyncio.ensure_future(self._sweep())

    def _handle_connection(self, connection: socket.socket, address: Any) -> None:
        """Count a connection, and let it wait for its turn unless it asks for /health."""
        client = str(address[0])
        stream: WatchedStream
        try:
            _find_lost_peers(connection)
            if self._tls is None:
                stream = PlainStream(connection, max_buffer_size=1 << 21)
            else:
                wrapped = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                stream = TlsStream(wrapped, max_buffer_size=1 << 21)
        except OSError:  # disconnected already
            connection.close()
            return
        is_reserve = self._is_full(client)
        stream.watch(client, is_reserve=is_reserve, on_closed=self._forget)
        self.streams.add(stream)
        if is_reserve:
            if len(self._reserve) >= MAX_RESERVE:
                self._refuse_oldest()
            self._reserve[stream] = None
        else:
            self._per_client[client] += 1
        self._waiting[stream] = address
        self._silent.add(stream)
        self._serve_health(stream)
        if self._waiting and not self._is_serving:
            self._is_serving = True
            IOLoop.current().add_callback(self._serve_some)

    def _serve_health(self, stream: WatchedStream) -> None:
        """Serve a waiting connection at once if it asks for /health, as far as this can be seen: not behind TLS."""
        try:
            begin = stream.socket.recv(len(_HEALTH), socket.MSG_PEEK) if self._tls is None else _HIDDEN
        except OSError:  # nothing has arrived, or the client is gone
            return
        self._silent.discard(stream)
        if begin == _HEALTH:
            self._serve(stream)

    def _serve_some(self) -> None:
        for stream in tuple(self._silent):
            self._serve_health(stream)
        for stream in tuple(islice(self._waiting, _SERVED_AT_ONCE)):
            self._serve(stream)
        self._is_serving = bool(self._waiting)
        if self._is_serving:
            IOLoop.current().add_callback(self._serve_some)

    def _serve(self, stream: WatchedStream) -> None:
        address = self._waiting.pop(stream)
        self._silent.discard(stream)
        self.conn_params = self._reserve_params if stream.is_reserve else self._params
        self.handle_stream(stream, address)

    def _is_full(self, client: str) -> bool:
        if len(self.streams) - len(self._reserve) >= self._max_connections:
            return True
        of_a_proxy = client in self._settings.trusted_proxies
        return not of_a_proxy and self._per_client[client] >= self._settings.max_connections_per_client

    def _refuse_oldest(self) -> None:
        if self._reserve:
            next(iter(self._reserve)).refuse(UNAVAILABLE)

    def _forget(self, stream: WatchedStream) -> None:
        self.streams.discard(stream)
        self._waiting.pop(stream, None)
        self._silent.discard(stream)
        if stream.lost_with is not None:
            self._on_lost(stream, stream.lost_with)
        if stream.is_reserve:
            self._reserve.pop(stream, None)
        else:
            self._per_client[stream.client] -= 1
            if not self._per_client[stream.client]:
                del self._per_client[stream.client]

    # -- time and bytes ----------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._check_streams()

    def _check_streams(self) -> None:
        """Disconnect clients that take too long or too much."""
        now = time.monotonic()
        for stream in list(self.streams):
            stream.check_time(now, self._settings.header_seconds, IDLE_SECONDS)
        unsent = sum(stream.num_unsent for stream in self.streams)
        while unsent > MAX_TOTAL_UNSENT:
            worst = max(self.streams, key=lambda stream: stream.num_unsent)
            unsent -= worst.num_unsent
            worst.cut_off("too much is waiting for slow readers, and this one is most behind")
            worst.close()

    def stop(self) -> None:
        """Accept no more connections."""
        super().stop()
        for stream in tuple(self._waiting):
            stream.close()
        if self._sweeping is not None:
            self._sweeping.cancel()


class _Listening(socket.socket):
    """A listening socket that pauses, instead of trying again at once, if the process has no file descriptor left.

    Args:
        listening: The socket that it replaces.
        make_room: Called in the pause.
    """

    def __init__(self, listening: socket.socket, make_room: Callable[[], None]) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self.setblocking(False)
        self._make_room = make_room

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; in a pause there is none."""
        try:
            return super().accept()
        except OSError as problem:
            if problem.errno not in _OUT_OF_FILES:
                raise
            log.warning("no connection can be accepted: %s", problem)
            IOLoop.current().update_handler(self, 0)
            IOLoop.current().call_later(_PAUSE_SECONDS, self._resume)
            self._make_room()
            raise BlockingIOError from problem

    def _resume(self) -> None:
        if self.fileno() >= 0:
            IOLoop.current().update_handler(self, IOLoop.READ)


def allowed_connections(wanted: int) -> int:
    """The number of connections that the limit on open files allows, which is raised for them as far as possible."""
    needed = wanted + MAX_RESERVE + SPARE_FILES
    soft = raise_file_limit(needed)
    if soft >= needed:
        return wanted
    allowed = soft - MAX_RESERVE - SPARE_FILES
    if allowed < 1:
        raise OSError(
            errno.EMFILE,
            f"the limit of {soft} open files leaves no room for connections: raise it to {needed} (ulimit -n)",
        )
    log.warning(
        "the limit of %d open files allows %d connections instead of %d: raise it to %d (ulimit -n)",
        soft, allowed, wanted, needed,
    )  # fmt: skip
    return allowed


def _find_lost_peers(connection: socket.socket) -> None:
    """Let the system notice peers that vanished without closing their connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
