"""Sessions of the dashboard: one at a time, limited in number, and gone with their page."""

import asyncio
import base64
import datetime
import gc
import json
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from bokeh.server.views import ws
from raw_clients import open_dashboard, read_to_end, read_until, server_of
from serve_helpers import wait_for


def test_sessions_of_the_dashboard_leave_time_for_others(chat_model):
    """Pages have no session; a burst of websockets gets theirs one by one, and none once its client has left."""
    with server_of(chat_model) as server:
        sessions = partial(server.server.dashboard.get_sessions, "/dashboard")
        listener = server.server.listener
        queue = listener.request_callback._sessions
        asyncio.run_coroutine_threadsafe(queue._turn.acquire(), server.loop).result(60)
        sockets = [open_dashboard(server) for _ in range(8)]
        wait_for(lambda: queue.num_waiting == 8)
        for socket_ in sockets[4:]:
            socket_.close()
        assert server.ask("GET", "/health")[0] == 200
        wait_for(lambda: len(listener.streams) == 4)  # the server has seen who left
        assert not sessions(), "sessions were created before their turn"
        server.loop.call_soon_threadsafe(queue._turn.release)
        for socket_ in sockets[:4]:
            assert socket_.recv(12) == b"HTTP/1.1 101"
        wait_for(lambda: not queue.num_waiting)
        assert len(sessions()) == 4
        for socket_ in sockets[:4]:
            socket_.close()


def test_more_sessions_than_allowed_are_refused(chat_model, monkeypatch):
    monkeypatch.setattr("workbench.apps.serve.dashboard.MAX_SESSIONS", 1)
    with server_of(chat_model) as server:
        first, second = open_dashboard(server), open_dashboard(server)
        assert first.recv(12) == b"HTTP/1.1 101" and second.recv(12) == b"HTTP/1.1 503"
        first.close()
        second.close()


def test_a_session_that_has_ended_leaves_nothing_behind(chat_model, monkeypatch):
    """Neither the pages that were open nor their views live as long as the trace."""
    monkeypatch.setattr("workbench.apps.serve.dashboard.LOST_SESSION_SECONDS", 0.1)
    from workbench.viz.app import TracePage

    with server_of(chat_model) as server:
        open_dashboard(server).close()
        socket_ = open_dashboard(server)
        read_until(socket_, b'"ACK"')  # its session exists; that of the first may have ended
        trace = server.engine.trace
        # By type(), because a dead weakref.proxy of another test raises an error when it is asked for its class.
        living = [each for each in gc.get_objects() if issubclass(type(each), TracePage)]
        pages = [weakref.ref(page) for page in living if page._feed.trace is trace]
        del living
        assert pages
        socket_.close()
        wait_for(lambda: not server.server.dashboard.num_sessions)

        def are_gone():
            gc.collect()
            return not any(page() for page in pages)

        wait_for(are_gone)


def test_a_page_connects_after_the_wall_clock_has_jumped(chat_model, monkeypatch):
    """Bokeh's tokens end by the wall clock, which may be set between a page and its websocket."""

    class NextMonth(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) + datetime.timedelta(days=30)

    monkeypatch.setattr(ws, "dt", SimpleNamespace(datetime=NextMonth, timezone=datetime.timezone))
    with server_of(chat_model) as server:
        socket_ = open_dashboard(server)
        read_until(socket_, b'"ACK"')
        socket_.close()


@pytest.mark.repeats(step=5)
@pytest.mark.parametrize(
    "token",
    [
        {"session_id": "mine", "session_expiry": 1},
        {"session_id": "mine"},
        {"session_id": "mine", "__bk__zlib_": "eJw"},
        ["mine"],
        "mine",
    ],
    ids=["expired", "without its end", "cut", "of another shape", "a text"],
)
def test_a_token_that_no_page_has_is_refused_without_a_traceback(chat_model, token, caplog):
    written = base64.urlsafe_b64encode(json.dumps(token).encode()).decode().rstrip("=")
    with server_of(chat_model) as server:
        socket_ = open_dashboard(server, token=written)
        assert b"HTTP/1.1 101" in read_to_end(socket_)
        assert not server.server.dashboard.get_sessions("/dashboard")
    assert not [record for record in caplog.records if record.exc_info], caplog.text
