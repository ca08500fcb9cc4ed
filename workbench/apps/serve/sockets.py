"""Connections that a client cannot use up: bounded in bytes, in time and in what a closed one still costs.

Tornado's stream keeps any number of unsent bytes, never gives up on a reader that has stopped reading, and does not
notice that a client is gone while bytes of its next request are in the read buffer. The streams here do.
"""

from __future__ import annotations

import contextlib
import time
from asyncio import Future
from collections.abc import Callable
from typing import Any

from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError

MAX_UNSENT_BYTES = 1 << 22
"""Maximum number of bytes that wait for a reader, besides the piece that exceeds it; then it is cut off (4 MiB)."""

MAX_AHEAD_BYTES = 1 << 18
"""Maximum number of bytes that a client may send ahead of the answer to its request (256 KiB)."""

STALL_SECONDS = 30.0
"""Time after which a reader that takes nothing is cut off, if anything waits for it."""

FAREWELL_SECONDS = 5.0
"""Time that a reader which is cut off has to read the reason."""

_NO_CONNECTION = (
    b'{"error": {"message": "the server has no connection left: try again later", "type": "server_error", '
    b'"param": null, "code": "too_many_connections"}}'
)
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: 5\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
) % (len(_NO_CONNECTION), _NO_CONNECTION)
BAD_REQUEST = 400
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class WatchedStream(IOStream):
    """The part that plain and encrypted connections have in common.

    Attributes:
        client: Address of the client.
        is_reserve: The server has no connection left: this one is answered with status 503, except for /health.
        farewell: Bytes that tell a reader why it is cut off, in the protocol that it speaks at the time.
        num_requests: Number of requests whose headers were awaited.
        user: Name of the API key of the request that is being served; "" without one.
        allowed_origin: Origin of the page of another site that may read the answer; "" for none.
        lost_with: Status of a connection that ended while a request was awaited: that of the answer it got, 400 if
            there was none. None if nothing had arrived either, and if no request was awaited.
    """

    def watch(self, client: str, *, is_reserve: bool, on_closed: Callable[[WatchedStream], None]) -> None:
        """Set the attributes; called once, before the connection is served."""
        self.client = client
        self.is_reserve = is_reserve
        self.farewell: Callable[[str], bytes] | None = None
        self.num_requests = 0
        self.user = ""
        self.allowed_origin = ""
        self._written_before = 0
        self.cut_off_because = ""
        self._on_closed = on_closed
        self._in_headers = False
        self._waiting_since = self._sent_at = time.monotonic()
        self._partial_since: float | None = None
        self._num_sent = 0
        self._awaits_request = False
        self.lost_with: int | None = None

    # -- clients that are gone ---------------------------------------------------------------------------------

    def _maybe_add_error_listener(self) -> None:
        """Listen for the end of the connection, also while bytes of a next request are in the read buffer."""
        if not self.closed() and self._close_callback is not None and self._state in (None, IOLoop.ERROR):
            self._add_io_state(IOLoop.READ)

    def _handle_events(self, fd: Any, events: int) -> None:
        super()._handle_events(fd, events)
        if not self.closed():
            self._maybe_add_error_listener()

    def _read_to_buffer(self) -> int | None:
        """Read, and disconnect a client that sends too far ahead of its answers."""
        num_read = super()._read_to_buffer()
        if self._read_future is None and self._read_buffer_size > MAX_AHEAD_BYTES:
            self.close()
            return 0
        return num_read

    def close(self, exc_info: Any = False) -> None:
        """Close, and drop the requests that the client had sent ahead: nobody is there for their answers."""
        was_open = not self.closed()
        if was_open and self._awaits_request and (self._read_buffer_size or not self._in_headers):
            self.lost_with = self.lost_with or BAD_REQUEST
        super().close(exc_info)
        if was_open:
            self._read_buffer.clear()
            self._read_buffer_size = 0
            if self.error is not None:  # its frames hold this stream: only the garbage collector would free them
                self.error.__traceback__ = None
            self._on_closed(self)

    # -- readers that do not read ------------------------------------------------------------------------------

    @property
    def num_unsent(self) -> int:
        """Number of bytes that wait for the reader."""
        return len(self._write_buffer) if self._write_buffer is not None else 0

    @property
    def num_sent_for_request(self) -> int:
        """Number of bytes of the answer so far, headers included."""
        return self._total_write_index - self._written_before

    def begin_request(self) -> None:
        """Forget what belonged to the request before."""
        self.user, self.farewell, self._written_before = "", None, self._total_write_index
        self.allowed_origin = ""
        self._awaits_request = False

    def write(self, data: bytes | memoryview) -> Future[None]:
        """Send, or cut off a reader that is too far behind.

        Nothing more is sent to a reader that has been cut off. Such a write ends with the connection, as one does that
        waits for its reader: Tornado, which waits for it too, leaves the connection open for the farewell.

        Raises:
            StreamClosedError: The reader has disconnected.
        """
        if not self.cut_off_because and self.num_unsent > MAX_UNSENT_BYTES:
            self.cut_off(f"the reader is more than {MAX_UNSENT_BYTES} bytes behind")
        if not self.cut_off_because:
            return super().write(data)
        never_sent: Future[None] = Future()
        if self.closed():
            never_sent.set_exception(StreamClosedError())
        else:
            self._write_futures.append((self._total_write_index + 1, never_sent))
        never_sent.add_done_callback(lambda future: future.exception())
        return never_sent

    def cut_off(self, reason: str) -> None:
        """Send nothing more but the reason, and disconnect when it has been sent or after FAREWELL_SECONDS."""
        if self.closed() or self.cut_off_because:
            return
        if self.farewell is not None:
            super().write(self.farewell(reason))
        self.cut_off_because = reason
        callback, self._close_callback = self._close_callback, None
        if callback is not None:  # the request is over for everybody but this reader
            self.io_loop.add_callback(callback)
        self.io_loop.call_later(FAREWELL_SECONDS, self.close)
        if not self.num_unsent:
            self.close()

    def _handle_write(self) -> None:
        super()._handle_write()
        if self.cut_off_because and not self.closed() and not self.num_unsent:
            self.close()

    # -- time --------------------------------------------------------------------------------------------------

    def read_until_regex(self, regex: bytes, max_bytes: int | None = None) -> Any:
        """Read the headers of a request, which is the only use of this method."""
        if self.cut_off_because:
            raise StreamClosedError
        self.num_requests += 1
        self._written_before, self._awaits_request = self._total_write_index, True
        self._in_headers, self._waiting_since, self._partial_since = True, time.monotonic(), None
        return super().read_until_regex(regex, max_bytes)

    def _finish_read(self, size: int) -> None:
        self._in_headers = False
        super()._finish_read(size)

    def refuse(self, answer: bytes) -> None:
        """Answer a connection on which no request has arrived, and close it."""
        if not self.closed():
            with contextlib.suppress(OSError):  # the client does not read, or is gone
                self._total_write_index += self.write_to_fd(memoryview(answer))
            self.lost_with = int(answer.split(b" ", 2)[1])
            self.close()

    def check_time(self, now: float, header_seconds: float, idle_seconds: float) -> None:
        """Disconnect a client that takes too long to send a request or to read an answer."""
        if self._total_write_done_index != self._num_sent or not self.num_unsent:
            self._num_sent, self._sent_at = self._total_write_done_index, now
        elif now - self._sent_at > STALL_SECONDS:
            self.cut_off(f"the reader has read nothing for {STALL_SECONDS:g} s")
        if not self._in_headers:
            return
        if self._read_buffer_size and self._partial_since is None:
            self._partial_since = now
        begun = self._waiting_since if self.num_requests == 1 else self._partial_since
        if begun is not None and now - begun > header_seconds:
            self.refuse(UNAVAILABLE if self.is_reserve else TIMED_OUT)
        elif now - self._waiting_since > idle_seconds:
            self.close()


class PlainStream(WatchedStream):
    """A connection."""


class TlsStream(WatchedStream, SSLIOStream):
    """An encrypted connection."""
