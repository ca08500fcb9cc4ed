"""Access control: Host, Origin, API key and the size of the body, checked before any handler sees a request.

One router stands before the API, the dashboard, its websocket and the trace, so that none can be forgotten.

- *Host* and *Origin*: pages of other sites are refused (workbench/base/served_names.py), but the origins in
  ``allowed_origins`` may call the API (workbench/apps/serve/cross_origin.py).
- *API key*: compared in constant time (workbench/apps/serve/keys.py), and limited in its POST requests per minute. A
  browser cannot add the header to a page or a websocket, so /dashboard takes the key once as ``?api_key=`` and turns it
  into a cookie that scripts cannot read and other sites cannot send.
- *Body*: a body that is too large is read to its end and dropped, because a client that is still sending would not see
  an answer.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from http.cookies import CookieError, SimpleCookie
from typing import cast
from urllib.parse import parse_qs, unquote

from tornado.http1connection import HTTP1Connection
from tornado.httputil import (
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerRequest,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.routing import Router
from tornado.web import Application, RequestHandler

from workbench.apps.serve.access_log import CLIENT_CLOSED_REQUEST
from workbench.apps.serve.cross_origin import Preflight, is_allowed, is_preflight
from workbench.apps.serve.dashboard import DASHBOARD, DASHBOARD_SOCKET, Dashboard, SessionQueue, SocketInTurn
from workbench.apps.serve.errors import ApiError, too_busy, unavailable
from workbench.apps.serve.keys import ApiKey, KeyRing
from workbench.apps.serve.settings import ServeSettings
from workbench.apps.serve.sockets import BAD_REQUEST, WatchedStream
from workbench.base.served_names import HOST_REFUSED, ORIGIN_REFUSED, ServedNames

COOKIE = "workbench_api_key"
NO_BODY = -1
LostRequest = Callable[[HTTPServerRequest, WatchedStream, int], None]
OPEN_PATHS = ("/health",)
"""Paths that need no key: a supervisor asks them whether the server lives, and they tell nothing else."""


class Guard(Router):
    """Passes requests to the API or to the dashboard, or rejects them.

    Args:
        settings: Access and limits.
        api: Answers all other paths.
        dashboard: Answers the websocket of the dashboard's page, and serves the page's scripts below /static.
        on_lost: Called with a request whose client left before a handler was there to log it, and with its status.
    """

    def __init__(self, settings: ServeSettings, api: Application, dashboard: Dashboard, on_lost: LostRequest) -> None:
        self._settings = settings
        self._api = api
        self._dashboard = dashboard
        self._sessions = SessionQueue(dashboard)
        self._keys = KeyRing(settings.keys)
        self._on_lost = on_lost

    def find_handler(self, request: HTTPServerRequest, **kwargs: object) -> HTTPMessageDelegate:
        """The handler of a request: one of the applications, or a rejection."""
        limit = self._settings.max_body_bytes
        too_large = ApiError(413, f"the body is too large: allowed are {limit} bytes")
        try:
            delegate = self._find(request, **kwargs)
        except ApiError as problem:
            # The body of a request that is rejected is dropped as it arrives.
            delegate, limit = self._reject(request, problem), NO_BODY
        on_lost = partial(self._on_lost, request, stream_of(request), BAD_REQUEST)
        return BodyLimit(delegate, limit, lambda: self._reject(request, too_large), on_lost)

    def _find(self, request: HTTPServerRequest, **kwargs: object) -> HTTPMessageDelegate:
        stream = stream_of(request)
        stream.begin_request()
        if stream.client in self._settings.trusted_proxies and request.headers.get("X-Forwarded-Proto") == "https":
            request.protocol = "https"
        if stream.is_reserve and request.path not in OPEN_PATHS:
            raise unavailable("the server has no connection left: try again later")
        check_path(request.path)
        names = self._settings.names
        if not names.serves_host(request.headers.get("Host", "")):
            raise ApiError(403, HOST_REFUSED)
        stream.allowed_origin = check_origin(request, names, self._settings.allowed_origins)
        if stream.allowed_origin and is_preflight(request):
            return self._api.get_handler_delegate(request, Preflight)
        if self._keys and request.path not in OPEN_PATHS:
            if cookie := self._sign_in(request):
                return self._api.get_handler_delegate(request, SignIn, {"cookie": cookie})
            key = find_api_key(request.headers, self._keys)
            stream.user = key.name
            if request.method == "POST" and (seconds := self._keys.take(key)):
                raise too_busy(f"the key may send {key.per_minute:g} requests a minute", math.ceil(seconds))
        if request.path.startswith("/static/"):
            return self._dashboard.find_handler(request, **kwargs)
        if request.path != DASHBOARD_SOCKET:
            return self._api.find_handler(request, **kwargs)
        stream.farewell = close_frame
        handler = self._dashboard.find_handler(request, **kwargs)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return handler  # answers that it is a websocket
        if self._sessions.is_full:
            raise unavailable("the dashboard has no session left: try again later")
        in_turn = SocketInTurn(handler, self._sessions, partial(self._on_lost, request, stream, CLIENT_CLOSED_REQUEST))
        cast(HTTP1Connection, request.connection).set_close_callback(in_turn.on_connection_close)
        return in_turn

    def _reject(self, request: HTTPServerRequest, problem: ApiError) -> HTTPMessageDelegate:
        return self._api.get_handler_delegate(request, Rejection, {"problem": problem})

    def _sign_in(self, request: HTTPServerRequest) -> str | None:
        """The cookie to set if a browser opens the dashboard with the right key."""
        given = parse_qs(request.query).get("api_key", [""])[0]
        if request.method != "GET" or request.path != DASHBOARD or not given:
            return None
        key = self._keys.find(given)
        if key is None:
            raise _wrong_key()
        stream_of(request).user = key.name
        secure = "; Secure" if request.protocol == "https" else ""
        return f"{COOKIE}={key.digest}; Path=/; HttpOnly; SameSite=Strict{secure}"


def stream_of(request: HTTPServerRequest) -> WatchedStream:
    """The connection on which a request arrived."""
    return cast(WatchedStream, cast(HTTP1Connection, request.connection).stream)


def close_frame(reason: str) -> bytes:
    """The websocket frame that ends a connection: "try again later", with the reason."""
    payload = (1013).to_bytes(2, "big") + reason.encode()[:120]
    return bytes((0x88, len(payload))) + payload


def check_path(path: str) -> None:
    """Reject addresses with control characters, which no file and no page has.

    Raises:
        ApiError: Status 400.
    """
    if not unquote(path, errors="replace").isprintable():
        raise ApiError(400, "the address holds a character that no address of this server has")


def check_origin(request: HTTPServerRequest, names: ServedNames, allowed: tuple[str, ...]) -> str:
    """Reject requests from the pages of other sites, but those that are allowed.

    Returns:
        The origin of a page of another site that may call this address; "" for any other request.

    Raises:
        ApiError: Status 403.
    """
    origin = request.headers.get("Origin")
    if origin is None or names.serves_origin(origin, request.headers.get("Host", "")):
        return ""
    if is_allowed(origin, request.path, allowed):
        return origin
    raise ApiError(403, f"{ORIGIN_REFUSED}, and those of --allowed-origins its API")


def find_api_key(headers: HTTPHeaders, keys: KeyRing) -> ApiKey:
    """The key that a request brings, itself or as the cookie.

    Raises:
        ApiError: Status 401: it brings neither.
    """
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    key = keys.find(given.strip()) if scheme.lower() == "bearer" else None
    if key is not None:
        return key
    try:
        cookie = SimpleCookie(headers.get("Cookie", "")).get(COOKIE)
    except CookieError:
        cookie = None
    key = None if cookie is None else keys.find_digest(cookie.value)
    if key is None:
        raise _wrong_key()
    return key


def _wrong_key() -> ApiError:
    return ApiError(
        401,
        "give the server's API key as 'Authorization: Bearer KEY', or open /dashboard?api_key=KEY in a browser",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class BodyLimit(HTTPMessageDelegate):
    """Passes a request on as it arrives, and replaces its handler when the body gets too large.

    Args:
        delegate: Handles the request.
        limit: Maximum size of the body in bytes; NO_BODY drops it without an objection.
        reject: Makes the handler that takes over, which sees no body.
        on_lost: Called if the body does not arrive.
    """

    def __init__(
        self,
        delegate: HTTPMessageDelegate,
        limit: int,
        reject: Callable[[], HTTPMessageDelegate],
        on_lost: Callable[[], None],
    ) -> None:
        self._delegate = delegate
        self._left = limit
        self._reject = reject
        self._on_lost = on_lost

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        """Pass on the headers."""
        self._headers = start_line, headers
        return self._delegate.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        """Pass on a part of the body, or drop it."""
        was_within = self._left >= 0
        self._left -= len(chunk)
        if self._left >= 0:
            return self._delegate.data_received(chunk)
        if was_within:
            self._delegate = self._reject()
            return self._delegate.headers_received(*self._headers)
        return None

    def finish(self) -> None:
        """Pass on that the request is complete."""
        self._delegate.finish()

    def on_connection_close(self) -> None:
        """Pass on that the client has disconnected, or was disconnected, before the request was complete."""
        self._on_lost()
        self._delegate.on_connection_close()


class Rejection(RequestHandler):
    """Answers any method with an error."""

    def initialize(self, problem: ApiError) -> None:
        """Keep the error."""
        self._problem = problem

    async def prepare(self) -> None:
        """Answer, whatever the method is."""
        self.set_status(self._problem.status)
        for name, value in self._problem.headers.items():
            self.set_header(name, value)
        await self.finish(self._problem.body())


class SignIn(RequestHandler):
    """Gives the browser its cookie, and an address without the key."""

    def initialize(self, cookie: str) -> None:
        """Keep the cookie."""
        self._cookie = cookie

    async def prepare(self) -> None:
        """Redirect to the dashboard."""
        self.set_header("Set-Cookie", self._cookie)
        self.set_header("Referrer-Policy", "no-referrer")
        self.redirect(DASHBOARD)
