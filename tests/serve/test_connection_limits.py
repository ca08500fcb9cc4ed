"""Connections are limited in number and in time, and /health is answered all the same."""

import asyncio
import contextlib
import http.client
import logging
import resource
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from raw_clients import connect, read_to_end, server_of
from serve_helpers import wait_for


@pytest.fixture(scope="module")
def server(chat_model):
    with server_of(chat_model) as client:
        yield client


def test_connections_beyond_the_limits_get_503_and_health_is_answered(chat_model, monkeypatch):
    from workbench.apps.serve import listener

    with server_of(chat_model, max_connections=20, max_connections_per_client=12, header_seconds=60) as server:
        monkeypatch.setattr(listener, "MAX_RESERVE", 32)
        held = [connect(server, b"GET /h") for _ in range(100)]
        wait_for(lambda: len(server.server.listener.streams) == 12 + 32)
        for _ in range(5):
            assert server.ask("GET", "/health")[0] == 200
            status, headers, text = server.ask("GET", "/v1/models")
            assert status == 503 and headers["Connection"] == "close" and "no connection left" in text
        # The oldest ones beyond the limit have made room for the newer ones, and were told so.
        answers = [read_to_end(connection) for connection in held[12:50]]
        assert all(answer.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in answer for answer in answers)
        for connection in held:
            connection.close()
        wait_for(lambda: not server.server.listener.streams)
        assert server.ask("GET", "/v1/models")[0] == 200


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep fewer connections by default")
def test_a_burst_of_connections_is_kept_until_the_event_loop_accepts_it(chat_model):
    """A connection that the system drops tries again after a second, and /health with it."""
    with server_of(chat_model) as server:
        accepted, blocked = threading.Event(), threading.Event()
        server.loop.call_soon_threadsafe(lambda: (blocked.set(), accepted.wait(120)))
        assert blocked.wait(60)
        held = []
        try:
            for _ in range(300):
                held.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
        finally:
            accepted.set()
        for connection in held:
            connection.close()


@pytest.fixture
def server_of_one_test(chat_model):
    """Nothing that another test has left waits there."""
    with server_of(chat_model) as server:
        yield server


def test_health_is_answered_before_a_burst_of_connections_is_served(server_of_one_test, monkeypatch):
    server = server_of_one_test
    listener, accepting, blocked, order = server.server.listener, threading.Event(), threading.Event(), []
    serve = listener._serve
    monkeypatch.setattr(
        listener, "_serve", lambda stream: (order.append(stream.socket.getpeername()[1]), serve(stream))
    )
    server.loop.call_soon_threadsafe(lambda: (blocked.set(), accepting.wait(120)))
    assert blocked.wait(60)
    held = [connect(server, b"GET /h") for _ in range(100)]
    health = connect(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    accepting.set()
    first, others = health.getsockname()[1], {connection.getsockname()[1] for connection in held}
    assert read_to_end(health).startswith(b"HTTP/1.1 200 ")
    wait_for(lambda: others <= set(order))
    assert order.index(first) <= 24, "connections are accepted faster than served"
    for connection in held:
        connection.close()


def test_connections_are_accepted_in_every_turn_of_the_event_loop(server):
    assert server.loop._fair_selector.first == set(server.server.listener._sockets)


@contextlib.contextmanager
def busy_server_of(chat_model):
    """A server that accepts connections and serves none. No other test uses it, so nothing else waits there."""
    with server_of(chat_model) as server:
        listener = server.server.listener
        server.loop.call_soon_threadsafe(setattr, listener, "_is_serving", True)
        wait_for(lambda: listener._is_serving)
        yield server


@pytest.fixture
def busy_server(chat_model):
    with busy_server_of(chat_model) as server:
        yield server


def test_a_connection_that_asks_for_health_late_is_served_before_others_that_wait(busy_server):
    server, listener, order = busy_server, busy_server.server.listener, []

    async def serve():
        order.extend(stream.socket.getpeername()[1] for stream in listener._waiting)
        listener._serve_some()
        order.extend(stream.socket.getpeername()[1] for stream in listener._waiting)

    held = [connect(server, b"GET /h") for _ in range(10)]
    health = connect(server)
    wait_for(lambda: len(listener._waiting) == 11)
    health.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    asyncio.run_coroutine_threadsafe(serve(), server.loop).result(30)
    assert order[:11].index(health.getsockname()[1]) == 10 and health.getsockname()[1] not in order[11:]
    assert len(order[11:]) == 8, "and two others"
    assert read_to_end(health).startswith(b"HTTP/1.1 200 ")
    for connection in held:
        connection.close()


def test_a_waiting_connection_that_is_refused_waits_no_more(busy_server):
    from workbench.apps.serve.sockets import UNAVAILABLE

    listener = busy_server.server.listener

    async def refuse():
        next(iter(listener._waiting)).refuse(UNAVAILABLE)
        num_waiting = len(listener._waiting)
        listener._serve_some()
        return num_waiting

    connection = connect(busy_server, b"GET /h")
    wait_for(lambda: len(listener._waiting) == 1)
    assert asyncio.run_coroutine_threadsafe(refuse(), busy_server.loop).result(30) == 0
    assert read_to_end(connection).startswith(b"HTTP/1.1 503 ")


def test_trusted_proxies_have_no_limit_of_a_client_but_that_of_all(chat_model):
    settings = {"max_connections": 20, "max_connections_per_client": 3, "trusted_proxies": ("127.0.0.1",)}
    with server_of(chat_model, **settings) as server:
        held = [connect(server, b"GET /h") for _ in range(19)]
        assert server.ask("GET", "/v1/models")[0] == 200
        wait_for(lambda: len(server.server.listener.streams) == 19)
        held.append(connect(server, b"GET /h"))
        assert server.ask("GET", "/v1/models")[0] == 503, "the limit of all clients together holds"
        for connection in held:
            connection.close()


@pytest.fixture
def clock(monkeypatch):
    """The clock of the connections: a function that moves it forward."""
    from workbench.apps.serve import listener, sockets

    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    for module in (listener, sockets):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(listener, "SWEEP_SECONDS", 0.02)

    def advance(seconds):
        ahead[0] += seconds

    return advance


def test_a_request_that_does_not_arrive_is_ended_in_time(chat_model, clock):
    """No time passes that the test does not set, so a slow machine makes no difference."""
    with server_of(chat_model, header_seconds=20) as server:
        streams = server.server.listener.streams
        silent, partial = connect(server), connect(server, b"GET /health HT")
        used, idle = (http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(2))

        def health(connection):
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            return response.status

        assert health(used) == health(idle) == 200
        wait_for(lambda: sorted(stream.num_requests for stream in streams) == [1, 1, 2, 2])
        clock(21)
        assert read_to_end(silent).startswith(b"HTTP/1.1 408 ") and read_to_end(partial).startswith(b"HTTP/1.1 408 ")
        # A connection that has been used may be idle for longer; then its next request has to arrive in time too.
        assert health(used) == 200
        used.sock.sendall(b"GET /hea")
        wait_for(lambda: any(stream._partial_since for stream in streams))
        clock(21)
        assert b"408 Request Timeout" in read_to_end(used.sock)
        wait_for(lambda: len(streams) < 2)
        assert len(streams) == 1, "it has been idle for 42 of 75 seconds"
        clock(34)
        assert read_to_end(idle.sock) == b""


def test_a_body_that_does_not_arrive_ends_the_connection(chat_model, monkeypatch):
    from workbench.apps.serve import listener

    monkeypatch.setattr(listener, "BODY_SECONDS", 0.2)
    with server_of(chat_model) as server:
        begun = connect(server, b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20\r\n\r\n{")
        assert read_to_end(begun) == b""


def test_no_file_descriptors_left_is_a_pause_and_a_line(server, monkeypatch, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held, refused = [], []
    monkeypatch.setattr(server.server.listener, "_refuse_oldest", lambda: refused.append(1))
    with caplog.at_level(logging.WARNING):
        try:
            with open("/dev/null") as newest:
                resource.setrlimit(resource.RLIMIT_NOFILE, (newest.fileno() + 8, hard))
            with contextlib.suppress(OSError):
                while True:  # the client's sockets and the server's share one process here
                    held.append(connect(server, b"GET /h"))
            waiting = held.pop()
            start = time.monotonic()

            def lines():
                return [record for record in caplog.records if "no connection can be accepted" in record.message]

            wait_for(lines)
            time.sleep(1.0)
            assert len(lines()) <= 3 + 5 * (time.monotonic() - start), "five attempts a second"
            wait_for(lambda: refused)  # a connection of the reserve would make room
            for connection in held:
                connection.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    waiting.close()
    assert server.ask("GET", "/health")[0] == 200


def test_few_open_files_allow_few_connections(monkeypatch, caplog):
    from workbench.apps.serve import listener

    others = listener.MAX_RESERVE + listener.SPARE_FILES
    for soft, allowed in ((others + 1000, 1000), (others + 999, 999), (others + 1, 1)):
        caplog.clear()
        monkeypatch.setattr(listener, "raise_file_limit", lambda needed, soft=soft: soft)
        assert listener.allowed_connections(1000) == allowed
        assert (f"allows {allowed} connections instead of 1000" in caplog.text) == (allowed < 1000)
    monkeypatch.setattr(listener, "raise_file_limit", lambda needed: others)
    with pytest.raises(OSError, match=f"leaves no room for connections: raise it to {others + 1000}"):
        listener.allowed_connections(1000)


def test_a_peer_that_vanished_is_looked_for(busy_server):
    connection = connect(busy_server, b"GET /h")
    listener = busy_server.server.listener
    wait_for(lambda: listener.streams)
    [stream] = listener.streams
    assert stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    connection.close()


def test_a_connection_that_waits_ends_with_the_server(chat_model):
    with busy_server_of(chat_model) as server:
        listener = server.server.listener
        waiting = connect(server, b"GET /h")
        wait_for(lambda: listener._waiting)
        [stream] = listener._waiting
    assert stream.closed()
    waiting.close()
