"""Who may ask at all, and how much: Host, Origin, API key and the body's size, before any handler sees a request.

One router stands before the API, the dashboard, its websocket and the trace alike, so that none can be forgotten.

- *Host*: a web page elsewhere can point a name of its own at 127.0.0.1 ("DNS rebinding") and read the answers. The
  browser then sends that name, so only addresses, "localhost" and the names the operator listed are served.
- *Origin*: browsers let any page open a websocket or post a form to any server, and say which page it was.
- *API key*: compared in constant time. A browser cannot add the header to a page or a websocket, so /dashboard takes
  the key once as ``?api_key=`` and turns it into a cookie that scripts cannot read and other sites cannot send.
- *Body*: one that is too large is read to its end and dropped: a client that is still sending would not see an answer.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from tornado.httputil import (
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerRequest,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.routing import Router
from tornado.web import Application, RequestHandler

from workbench.serve.errors import ApiError
from workbench.serve.settings import LOOPBACK_NAMES, ServeSettings, is_address

COOKIE = "workbench_api_key"
DASHBOARD = "/dashboard"
OPEN_PATHS = ("/health",)
"""Answered without a key: they say nothing but that the server lives, to whatever watches over it."""


class Guard(Router):
    """Lets requests through to the API or to the dashboard, or refuses them.

    Args:
        settings: Who may ask.
        api: Answers everything but the dashboard.
        dashboard: Answers below /dashboard, and serves the scripts of its page below /static.
    """

    def __init__(self, settings: ServeSettings, api: Application, dashboard: Application) -> None:
        self._settings = settings
        self._api = api
        self._dashboard = dashboard

    def find_handler(self, request: HTTPServerRequest, **kwargs: object) -> HTTPMessageDelegate:
        """What answers a request: one of the applications, or a refusal."""
        limit = self._settings.max_body_bytes
        too_large = ApiError(413, f"the body is too large: allowed are {limit} bytes")
        return BodyLimit(self._find(request, **kwargs), limit, lambda: self._refuse(request, too_large))

    def _find(self, request: HTTPServerRequest, **kwargs: object) -> HTTPMessageDelegate:
        try:
            check_host(request.headers, self._settings.allowed_hosts)
            check_origin(request.headers)
            if self._settings.api_key is not None and request.path not in OPEN_PATHS:
                if cookie := self._sign_in(request):
                    return self._api.get_handler_delegate(request, SignIn, {"cookie": cookie})
                check_api_key(request.headers, self._settings.api_key)
        except ApiError as refusal:
            return self._refuse(request, refusal)
        application = self._dashboard if _is_dashboard(request.path) else self._api
        return application.find_handler(request, **kwargs)

    def _refuse(self, request: HTTPServerRequest, refusal: ApiError) -> HTTPMessageDelegate:
        return self._api.get_handler_delegate(request, Refusal, {"refusal": refusal})

    def _sign_in(self, request: HTTPServerRequest) -> str | None:
        """The cookie to set, when a browser brings the right key to the dashboard."""
        given = parse_qs(request.query).get("api_key", [""])[0]
        if request.method != "GET" or request.path != DASHBOARD or not given:
            return None
        if not _equal(given, self._settings.api_key or ""):
            raise _wrong_key()
        return f"{COOKIE}={_digest(given)}; Path=/; HttpOnly; SameSite=Strict"


def check_host(headers: HTTPHeaders, allowed: tuple[str, ...]) -> None:
    """Refuse a Host header with a name that is not ours.

    Raises:
        ApiError: Status 403.
    """
    host = _name_of(headers.get("Host", ""))
    if not (is_address(host) or host in LOOPBACK_NAMES or host in map(str.lower, allowed)):
        raise ApiError(
            403, "this Host is not served: call the server by its address, or start it with --allowed-host NAME"
        )


def check_origin(headers: HTTPHeaders) -> None:
    """Refuse what a page of another site sends.

    Raises:
        ApiError: Status 403.
    """
    origin = headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("Host", "").lower():
        raise ApiError(403, "this Origin is not served: only the server's own pages may call it from a browser")


def check_api_key(headers: HTTPHeaders, api_key: str) -> None:
    """Refuse who has neither the key nor its cookie.

    Raises:
        ApiError: Status 401.
    """
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and _equal(given.strip(), api_key):
        return
    try:
        cookie = SimpleCookie(headers.get("Cookie", "")).get(COOKIE)
    except CookieError:
        cookie = None
    if cookie is None or not _equal(cookie.value, _digest(api_key)):
        raise _wrong_key()


def _wrong_key() -> ApiError:
    return ApiError(
        401,
        "give the server's API key as 'Authorization: Bearer KEY', or open /dashboard?api_key=KEY in a browser",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _is_dashboard(path: str) -> bool:
    return path == DASHBOARD or path.startswith((DASHBOARD + "/", "/static/"))


def _name_of(host: str) -> str:
    """The name in a Host header, without its port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _equal(given: str, expected: str) -> bool:
    """Comparison whose time says neither where two texts differ nor how long they are."""
    return hmac.compare_digest(_digest(given), _digest(expected))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class BodyLimit(HTTPMessageDelegate):
    """Hands a request on as it comes, or a refusal in its place once its body is too large.

    Args:
        delegate: Takes the request.
        limit: Bytes of its body at most.
        refuse: Makes what takes its place; that sees no body.
    """

    def __init__(self, delegate: HTTPMessageDelegate, limit: int, refuse: Callable[[], HTTPMessageDelegate]) -> None:
        self._delegate = delegate
        self._left = limit
        self._refuse = refuse

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        """Hand on the headers."""
        self._headers = start_line, headers
        return self._delegate.headers_received(start_line, headers)

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        """Hand on a part of the body, or drop it."""
        was_within = self._left >= 0
        self._left -= len(chunk)
        if self._left >= 0:
            return self._delegate.data_received(chunk)
        if was_within:
            self._delegate = self._refuse()
            return self._delegate.headers_received(*self._headers)
        return None

    def finish(self) -> None:
        """The request is whole."""
        self._delegate.finish()

    def on_connection_close(self) -> None:
        """The client went away."""
        self._delegate.on_connection_close()


class Refusal(RequestHandler):
    """Answers any method with an error."""

    def initialize(self, refusal: ApiError) -> None:
        """Keep the error."""
        self._refusal = refusal

    async def prepare(self) -> None:
        """Answer before the method is looked at."""
        self.set_status(self._refusal.status)
        for name, value in self._refusal.headers.items():
            self.set_header(name, value)
        await self.finish(self._refusal.body())


class SignIn(RequestHandler):
    """Gives the browser its cookie, and an address without the key in it."""

    def initialize(self, cookie: str) -> None:
        """Keep the cookie."""
        self._cookie = cookie

    async def prepare(self) -> None:
        """Redirect to the dashboard."""
        self.set_header("Set-Cookie", self._cookie)
        self.set_header("Referrer-Policy", "no-referrer")
        self.redirect(DASHBOARD)
