"""Pages of other sites that may call the API (CORS), as far as ``--allowed-origins`` names them.

A browser lets a page read an answer of another site only if the answer names the page's origin, and asks before it
sends JSON or a key (a preflight). The dashboard and the trace, which show everyone's prompts, stay closed to other
sites. Cookies are never part of it: such a page has to know a key and send it.
"""

from __future__ import annotations

import re
from typing import Any

from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.web import OutputTransform, RequestHandler

from workbench.apps.serve.settings import ANY_ORIGIN, is_origin
from workbench.apps.serve.sockets import WatchedStream

OPEN_TO_PAGES = re.compile(r"/v1/.*|/(tokenize|detokenize|version|health|openapi\.json)")
"""Addresses that pages of other sites may call."""


def is_allowed(origin: str, path: str, allowed: tuple[str, ...]) -> bool:
    """Whether a page of an origin may call an address."""
    return (origin in allowed or (ANY_ORIGIN in allowed and is_origin(origin))) and bool(OPEN_TO_PAGES.fullmatch(path))


def is_preflight(request: HTTPServerRequest) -> bool:
    """Whether a browser asks which requests a page may send. It does so without a key."""
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


class NameOrigin(OutputTransform):
    """Adds to each answer the origin that may read it, errors included."""

    def __init__(self, request: HTTPServerRequest) -> None:
        connection: Any = request.connection
        stream: WatchedStream = connection.stream
        self._origin = stream.allowed_origin

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        """Add the header to the first part of an answer."""
        if self._origin:
            headers["Access-Control-Allow-Origin"] = self._origin
            headers["Access-Control-Expose-Headers"] = "Retry-After, X-Unconstrained-Arguments"
            headers["Vary"] = "Origin"
        return status_code, headers, chunk


class Preflight(RequestHandler):
    """Answers the question before a request."""

    def options(self, *_: str) -> None:
        """The methods and headers that a page may send; "*" does not include Authorization."""
        self.set_status(204)
        self.set_header("Access-Control-Allow-Methods", "GET, POST")
        self.set_header("Access-Control-Allow-Headers", "Authorization, *")
        self.set_header("Access-Control-Max-Age", "600")
