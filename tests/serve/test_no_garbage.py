"""Ended connections and sessions are freed at once: collections stop the server, the longer the more there is."""

import gc
import json
import re
import socket
import weakref

import pytest
from serve_helpers import ENGINE, make_chat_model, serving, wait_for

from workbench.apps.serve.sockets import WatchedStream

READ_TRACE = b"GET /trace/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    from workbench import Engine, EngineConfig

    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(make_chat_model(), EngineConfig(**ENGINE), keep_steps=16) as engine,
    ):
        patch.setattr("workbench.apps.serve.dashboard.LOST_SESSION_SECONDS", 0.1)
        with serving(engine) as client:
            yield client


@pytest.fixture
def no_collections(monkeypatch):
    monkeypatch.setattr("panel.io.document._garbage_collect", lambda: None)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def post(**fields):
    body = json.dumps({"prompt": [5, 9, 17], "ignore_eos": True, **fields})
    return f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def connect(server, data):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(data)
    return connection


def connections():
    # By type(), because a dead weakref.proxy of another test raises an error when it is asked for its class.
    return [each for each in gc.get_objects() if issubclass(type(each), WatchedStream)]


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize(
    ("request_", "end"),
    [(post(max_tokens=3), b"}"), (post(max_tokens=3, stream=True), b"0\r\n\r\n"), (READ_TRACE, b"\n\n\r\n")],
    ids=["answer", "stream", "trace"],
)
@pytest.mark.parametrize("leaves", [False, True], ids=["reads", "leaves"])
def test_a_connection_is_freed_when_it_has_ended(server, no_collections, request_, end, leaves):
    before = len(connections())
    with connect(server, request_) as client:
        received = b""
        while not leaves and not received.endswith(end):
            received += client.recv(65536)
    wait_for(lambda: len(connections()) <= before)


def test_the_steps_of_a_session_that_has_ended_are_freed(server, no_collections):
    dashboard = server.server.dashboard
    token = re.search(r'"token":"([^"]+)"', server.ask("GET", "/dashboard")[2])[1]
    request = (
        b"GET /dashboard/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: bokeh, %b\r\n\r\n" % token.encode()
    )
    with connect(server, request):
        wait_for(lambda: dashboard.num_sessions)
        trace = weakref.ref(server.engine.trace)
        server.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 50, "ignore_eos": True})
        assert server.engine.trace is not trace() is not None, "the session has steps that the engine has forgotten"
    wait_for(lambda: trace() is None)
