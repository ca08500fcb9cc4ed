"""Checks Host and Origin before a served dashboard sees a request: its page, its websocket and its files alike."""

from __future__ import annotations

from typing import Any

from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.routing import Router
from tornado.web import Application, RequestHandler

from workbench.base.served_names import ServedNames


class HostGuard(Router):
    """Passes requests to an application, or refuses them with status 403.

    Args:
        application: Answers what is passed on.
        names: The names of the server.
    """

    def __init__(self, application: Application, names: ServedNames) -> None:
        self._application = application
        self._names = names

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate:
        """The handler of a request."""
        if problem := self._names.refusal(request.headers.get("Host"), request.headers.get("Origin")):
            return self._application.get_handler_delegate(request, Refusal, {"problem": problem})
        return self._application.find_handler(request, **kwargs)


class Refusal(RequestHandler):
    """Answers any method with status 403 and the reason."""

    def initialize(self, problem: str) -> None:
        """Keep the reason."""
        self._problem = problem

    async def prepare(self) -> None:
        """Answer, whatever the method is."""
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        await self.finish(self._problem + "\n")
