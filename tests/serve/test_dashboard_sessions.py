"""Sessions of the dashboard: one at a time, limited in number, and gone with their page."""

import gc
import weakref
from functools import partial

from raw_clients import open_dashboard, server_of
from serve_helpers import wait_for


def test_sessions_of_the_dashboard_leave_time_for_others(chat_model):
    """Pages have no session; a burst of websockets gets theirs one by one, and none once its client has left."""
    with server_of(chat_model) as server:
        sessions = partial(server.server.dashboard.get_sessions, "/dashboard")
        sockets = [open_dashboard(server) for _ in range(8)]
        for socket_ in sockets[4:]:
            socket_.close()
        assert server.ask("GET", "/health")[0] == 200
        assert len(sessions()) < 4, "all sessions were created first"
        for socket_ in sockets[:4]:
            assert socket_.recv(12) == b"HTTP/1.1 101"
        guard = server.server.listener.request_callback
        wait_for(lambda: not guard._sessions.num_waiting)
        assert len(sessions()) == 4
        for socket_ in sockets[:4]:
            socket_.close()


def test_more_sessions_than_allowed_are_refused(chat_model, monkeypatch):
    monkeypatch.setattr("workbench.serve.dashboard.MAX_SESSIONS", 1)
    with server_of(chat_model) as server:
        first, second = open_dashboard(server), open_dashboard(server)
        assert first.recv(12) == b"HTTP/1.1 101" and second.recv(12) == b"HTTP/1.1 503"
        first.close()
        second.close()


def test_a_session_that_has_ended_leaves_nothing_behind(chat_model, monkeypatch):
    """Neither the pages that were open nor their views live as long as the trace."""
    monkeypatch.setattr("workbench.serve.dashboard.LOST_SESSION_SECONDS", 0.1)
    from workbench.viz.app import TracePage

    with server_of(chat_model) as server:
        open_dashboard(server).close()
        socket_ = open_dashboard(server)
        assert socket_.recv(12) == b"HTTP/1.1 101"
        wait_for(lambda: server.server.dashboard.num_sessions)
        trace = server.engine.trace
        pages = [weakref.ref(p) for p in gc.get_objects() if isinstance(p, TracePage) and p._feed.trace is trace]
        assert pages
        socket_.close()
        wait_for(lambda: not server.server.dashboard.num_sessions)

        def are_gone():
            gc.collect()
            return not any(page() for page in pages)

        wait_for(are_gone)
