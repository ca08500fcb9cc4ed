"""The access log: a line per request, in the combined log format of Apache and nginx.

    127.0.0.1 - alice [22/Nov/2026:15:58:01 +0000] "POST /v1/completions HTTP/1.1" 200 512 "-" "curl/8.5"

Fields: address, "-", name of the API key, time, request, status, bytes sent with the headers (Apache's ``%O``),
referrer, user agent. The query is left out, because /dashboard takes the key there. A file that has been moved or
removed, as logrotate does, is opened again.

A connection that ends before a request has arrived has a line too, unless it brought nothing and got nothing. The
request is then "-"; status 400 means that the client left or sent something else, 408 that it took too long, and 503
that the server was full.
"""

from __future__ import annotations

import logging
import sys
import time
from logging.handlers import WatchedFileHandler
from typing import cast

from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPServerRequest
from tornado.web import RequestHandler

from workbench.apps.serve.sockets import WatchedStream
from workbench.base.served_names import is_address

log = logging.getLogger("workbench")

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
MAX_FIELD = 1000
"""Maximum number of characters of the address, the referrer and the user agent."""

CLIENT_CLOSED_REQUEST = 499
"""Status, as in nginx' logs, of a request whose client left before an answer began."""


class AccessLog:
    """Writes the line of each request; called by Tornado when its answer is complete.

    Args:
        destination: File to append to; "-" for standard output.
        trusted_proxies: Addresses of proxies whose X-Forwarded-For names the client.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, destination: str, trusted_proxies: tuple[str, ...] = ()) -> None:
        self._trusted = trusted_proxies
        self._handler = logging.StreamHandler(sys.stdout) if destination == "-" else _LogFile(destination, delay=False)

    def __call__(self, handler: RequestHandler) -> None:
        """Write the line of a request that has been answered."""
        stream = cast(WatchedStream, cast(HTTP1Connection, handler.request.connection).stream)
        gone = stream.closed() and not stream.num_sent_for_request
        self.add_request(handler.request, stream, CLIENT_CLOSED_REQUEST if gone else handler.get_status())

    def add_request(self, request: HTTPServerRequest, stream: WatchedStream, status: int) -> None:
        """Write the line of a request.

        Args:
            request: Its headers.
            stream: Its connection.
            status: Status of the answer, or why there is none.
        """
        agent, referrer = (escape(request.headers.get(name, "")) or "-" for name in ("User-Agent", "Referer"))
        client = client_of(request, stream, self._trusted)
        what = escape(f"{request.method} {request.path} {request.version}")
        self._write(client, stream.user, what, status, stream.num_sent_for_request, referrer, agent)

    def add_connection(self, stream: WatchedStream, status: int) -> None:
        """Write the line of a connection that ended before a request had arrived."""
        self._write(stream.client, "", "-", status, stream.num_sent_for_request, "-", "-")

    def _write(self, client: str, user: str, what: str, status: int, num_sent: int, referrer: str, agent: str) -> None:
        line = (
            f'{client} - {user or "-"} [{clock_time(time.time())}] "{what}" {status} {num_sent or "-"} '
            f'"{referrer}" "{agent}"'
        )
        self._handler.handle(logging.LogRecord("access", logging.INFO, __file__, 0, line, None, None))

    def close(self) -> None:
        """Close the file; lines that its disk has no room for are lost."""
        try:
            self._handler.close()
        except OSError as problem:
            log.warning("the access log cannot be written: %s", problem)


class _LogFile(WatchedFileHandler):
    """A file whose failures go to the server's own log, which counts what repeats."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say that the line is lost."""
        log.warning("the access log cannot be written: %s", sys.exc_info()[1])


def client_of(request: HTTPServerRequest, stream: WatchedStream, trusted_proxies: tuple[str, ...]) -> str:
    """The address of a client: behind trusted proxies, the last one in X-Forwarded-For that is no such proxy."""
    client = stream.client
    forwarded = request.headers.get("X-Forwarded-For", "").split(",")
    while client in trusted_proxies and forwarded:
        before = forwarded.pop().strip()
        if not is_address(before):
            break
        client = before
    return client


def clock_time(seconds: float) -> str:
    """A time as the log format writes it, in UTC; month names do not depend on the language of the system."""
    now = time.gmtime(seconds)
    return f"{now.tm_mday:02}/{MONTHS[now.tm_mon - 1]}/{now.tm_year}:{time.strftime('%H:%M:%S', now)} +0000"


def escape(text: str) -> str:
    r"""A field as Apache writes it: quotes and backslashes behind a backslash, other special bytes as ``\xHH``."""
    data = text[:MAX_FIELD].encode("latin-1", "backslashreplace")
    return "".join(
        f"\\{chr(byte)}" if byte in b'"\\' else chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data
    )
