"""The dashboard: its page, its sessions, and their turns.

A session holds the state of an open page on the server: about a megabyte, and 13 milliseconds of the event loop to
create. The page is the same for every browser but for a token, so it is rendered once, and a session is created when
the page's websocket opens. Sessions are limited in number and created one at a time, so that the event loop serves
others in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from bokeh.server.tornado import BokehTornado
from bokeh.util.token import generate_jwt_token, generate_session_id
from panel.io.application import build_applications
from panel.io.document import _cleanup_doc
from panel.io.resources import LOCAL_DIST, Resources, patch_model_css
from panel.io.server import server_html_page_for_session  # importing it puts Panel's handlers in place of Bokeh's
from panel.io.session import generate_session
from panel.io.state import set_curdoc
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine
from tornado.web import RequestHandler

from workbench.apps.serve.dashboard_socket import MAX_MESSAGE_BYTES, DashboardSocket

DASHBOARD = "/dashboard"
DASHBOARD_SOCKET = DASHBOARD + "/ws"

LOST_SESSION_SECONDS = 15
"""Time that a browser has to connect again to its session."""

PAUSE_SECONDS = 0.2
"""Pause after a session has been created."""

MAX_SESSIONS = 32
"""Maximum number of sessions that exist or wait for their turn; one more gets status 503."""

TOKEN_SECONDS = 10 * 365 * 86_400
"""Time that a page may wait until it connects. The guard decides who may connect. Bokeh's five minutes of the wall
clock would refuse a page when that clock is set forward, or when a phone wakes up."""

_TOKEN = "TOKEN-OF-THE-SESSION"  # noqa: S105


class Dashboard(BokehTornado):
    """Bokeh's application, with a page that needs no session.

    Args:
        app: Builds the view of a session.
        log_request: Called with each handler that has answered.
    """

    def __init__(self, app: Callable[[], Any], log_request: Callable[[RequestHandler], None]) -> None:
        super().__init__(
            build_applications({DASHBOARD: app}, title="Workbench", location=False),
            use_index=False,
            redirect_root=False,
            # The guard compares Origin with Host before Bokeh sees a websocket.
            extra_websocket_origins=["*"],
            unused_session_lifetime_milliseconds=int(1000 * LOST_SESSION_SECONDS),
            check_unused_sessions_milliseconds=1000,
            session_token_expiration=TOKEN_SECONDS,
            websocket_max_message_size_bytes=MAX_MESSAGE_BYTES,
            log_function=log_request,
        )
        arguments = {"application_context": self.applications[DASHBOARD], "bokeh_websocket_path": DASHBOARD_SOCKET}
        self.add_handlers(".*", [(DASHBOARD_SOCKET, DashboardSocket, arguments)])  # before Panel's
        self._html = self._render()

    def _render(self) -> str:
        session = generate_session(self.applications[DASHBOARD].application)
        document = session.document
        with set_curdoc(document):
            html: str = server_html_page_for_session(
                session, Resources.from_bokeh(self.resources()), document.title, token=_TOKEN,
                template=document.template, template_variables=document.template_variables,
            )  # fmt: skip
        _cleanup_doc(document)
        return html

    def page(self) -> str:
        """The page, with the token of a new session, which its websocket brings back."""
        session_id = generate_session_id(self.secret_key, self.sign_sessions)
        return self._html.replace(
            _TOKEN,
            generate_jwt_token(
                session_id, self.secret_key, self.sign_sessions, expiration=self.session_token_expiration
            ),
        )

    @property
    def num_sessions(self) -> int:
        """Number of sessions that exist."""
        return len(self.get_sessions(DASHBOARD))

    def new_connection(self, protocol: Any, socket: Any, application_context: Any, session: Any) -> Any:
        """Connect a websocket to its session; if it has closed meanwhile, Bokeh would keep the session forever."""
        for root in session.document.roots:  # style sheets from this server, as in Panel's pages
            patch_model_css(root, dist_url=LOCAL_DIST)
        connection = super().new_connection(protocol, socket, application_context, session)
        if socket.ws_connection is None:
            self.client_lost(connection)
        return connection


class PageHandler(RequestHandler):
    """/dashboard: the page."""

    def initialize(self, dashboard: Dashboard) -> None:
        """Keep the dashboard."""
        self._dashboard = dashboard

    def get(self) -> None:
        """Answer with the page, which no cache may keep: its token is that of one session."""
        self.set_header("Cache-Control", "no-store")
        self.finish(self._dashboard.page())


class SessionQueue:
    """The turns of sessions.

    Args:
        dashboard: Creates the sessions.
    """

    def __init__(self, dashboard: Dashboard) -> None:
        self._turn = asyncio.Lock()
        self._dashboard = dashboard
        self.num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether no more session may be created."""
        return self._dashboard.num_sessions + self.num_waiting >= MAX_SESSIONS

    async def open(self, socket: SocketInTurn) -> None:
        """Open a websocket when it is its turn, unless its client has disconnected."""
        self.num_waiting += 1
        try:
            async with self._turn:
                if socket.is_wanted:
                    socket.open()
                    await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self.num_waiting -= 1


class SocketInTurn(HTTPMessageDelegate):
    """Passes on a request for a websocket, whose handler begins when it is its turn.

    Args:
        delegate: Handles the request.
        queue: The turns.
        on_lost: Called if the client leaves before the handler begins.
    """

    def __init__(self, delegate: HTTPMessageDelegate, queue: SessionQueue, on_lost: Callable[[], None]) -> None:
        self._delegate = delegate
        self._queue = queue
        self._on_lost = on_lost
        self.is_wanted = True
        self.is_begun = False

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        """Pass on the headers."""
        return self._delegate.headers_received(start_line, headers)

    def finish(self) -> None:
        """Wait for the turn."""
        self._opening = asyncio.ensure_future(self._queue.open(self))

    def open(self) -> None:
        """Begin the handler."""
        self.is_begun = True
        self._delegate.finish()

    def on_connection_close(self) -> None:
        """Leave the session out if it has not begun."""
        self.is_wanted = False
        if not self.is_begun:
            self._on_lost()
        self._delegate.on_connection_close()
