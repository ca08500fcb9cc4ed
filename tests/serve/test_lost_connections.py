"""The access log's lines of connections that ended before a request, and of requests that no handler has seen."""

import asyncio
import re
import socket
from dataclasses import replace

import pytest
from serve_helpers import ENGINE, make_chat_model, serving, wait_for

from workbench.apps.serve.keys import ApiKey

KEY = "key-of-alice-1"
HEAD = f"Host: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from workbench import Engine, EngineConfig

    log = tmp_path_factory.mktemp("log") / "access.log"
    with (
        Engine(make_chat_model(), EngineConfig(**ENGINE)) as engine,
        serving(engine, api_keys=(ApiKey.of(KEY, "alice"),), access_log=str(log)) as client,
    ):
        client.log = log
        yield client


@pytest.fixture
def new_line(server):
    """A function that gives the one new line of the log when no connection is left: user, request, status and size."""
    before = len(server.log.read_text().splitlines())

    def find():
        wait_for(lambda: not server.server.listener._connections)
        [line] = server.log.read_text().splitlines()[before:]
        return re.fullmatch(r'127\.0\.0\.1 - (\S+) \[[^]]+\] "([^"]+)" (\d+) (\S+) "-" "-"', line).groups()

    return find


def ask(server, text):
    """The answer to a client that sends nothing after a text, read to its end."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(text.encode())
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read()


@pytest.mark.parametrize(
    ("sent", "user", "request_line"),
    [
        ("GET /h", "-", "-"),
        ("nonsense\r\n\r\n", "-", "-"),
        (
            f"POST /v1/completions HTTP/1.1\r\n{HEAD}Content-Length: 9\r\n\r\n{{",
            "alice",
            "POST /v1/completions HTTP/1.1",
        ),
        ("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n", "-", "GET / HTTP/1.1"),
    ],
    ids=["partial headers", "no request", "partial body", "partial body without a key"],
)
def test_a_client_that_leaves_before_its_request_is_complete_is_status_400(server, new_line, sent, user, request_line):
    ask(server, "")  # a connection that brings nothing has no line
    answer = ask(server, sent)
    assert new_line() == (user, request_line, "400", str(len(answer)) if answer else "-")


@pytest.mark.parametrize(
    ("limit", "status"), [({"header_seconds": 0.1}, "408"), ({"max_connections_per_client": 1}, "503")]
)
def test_a_connection_that_is_refused_has_the_status_of_its_answer(server, new_line, monkeypatch, limit, status):
    listener = server.server.listener
    wait_for(lambda: not listener.streams)
    monkeypatch.setattr(listener, "_settings", replace(listener._settings, **limit))
    with socket.create_connection(("127.0.0.1", server.port)) as first:
        client = first
        if status == "503":
            wait_for(lambda: listener.streams)
            client = socket.create_connection(("127.0.0.1", server.port))
            wait_for(lambda: listener._reserve)
            server.loop.call_soon_threadsafe(listener._refuse_oldest)
        with client:
            answer = client.makefile("rb").read()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert new_line() == ("-", "-", status, str(len(answer)))


def test_a_session_that_is_not_created_because_its_client_left_is_status_499(server, new_line, monkeypatch):
    opened = []
    monkeypatch.setattr("workbench.apps.serve.dashboard.SocketInTurn.open", lambda socket: opened.append(socket))
    sessions = server.server.listener.request_callback._sessions
    asyncio.run_coroutine_threadsafe(sessions._turn.acquire(), server.loop).result(30)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"GET /dashboard/ws HTTP/1.1\r\n{HEAD}Upgrade: websocket\r\n\r\n".encode())
            wait_for(lambda: sessions.num_waiting)
        assert new_line() == ("alice", "GET /dashboard/ws HTTP/1.1", "499", "-")
    finally:
        server.loop.call_soon_threadsafe(sessions._turn.release)
    wait_for(lambda: not sessions.num_waiting)
    assert not opened, "it takes no turn"
