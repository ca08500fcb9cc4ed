"""Clients that take connections, send ahead, do not read, or leave: the server stays responsive and bounded."""

import asyncio
import contextlib
import gc
import http.client
import json
import logging
import re
import resource
import socket
import sys
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from serve_helpers import ENGINE, make_chat_model, serving, wait_for

from workbench.serve.guard import stream_of

PROMPT = [101, 5, 9, 102, 17, 33, 8, 103]


@pytest.fixture(scope="module")
def model():
    return make_chat_model()


@contextlib.contextmanager
def server_of(model, **settings):
    from workbench import Engine, EngineConfig

    with Engine(model, EngineConfig(**ENGINE), keep_steps=200) as engine, serving(engine, **settings) as client:
        yield client


@pytest.fixture(scope="module")
def server(model):
    with server_of(model) as client:
        yield client


def connect(server, data=b"", receive_buffer=None):
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def post(path="/v1/completions", **fields):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, **fields})
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def read_to_end(connection):
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    connection.close()
    return b"".join(parts)


def open_dashboard(server, receive_buffer=None):
    """A connection that asks for the websocket of a page of the dashboard."""
    token = re.search(r'"token":"([^"]+)"', server.ask("GET", "/dashboard")[2])[1]
    return connect(
        server,
        b"GET /dashboard/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: bokeh, %b\r\n\r\n" % token.encode(),
        receive_buffer,
    )


def is_idle(server):
    return server.engine.state == "idle" and not server.server.bridge.num_open


# -- clients that are gone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [b"\r\n", b"x", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"x" * 100_000])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_is_noticed_behind_bytes_of_a_next_request(server, behind, stream):
    wait_for(lambda: is_idle(server))
    bridge = server.server.bridge
    aborted = bridge.metrics.finished["abort"]
    steps = []

    def slow_step(record):
        time.sleep(0.02)
        steps.append(record.step)

    remove = server.engine.on_step(slow_step)
    try:
        connection = connect(server, post(stream=stream) + behind)
        wait_for(lambda: steps)  # a request that has not been tokenized would not be added at all
        connection.close()
        num_steps = len(steps)
        wait_for(lambda: is_idle(server))
        assert len(steps) - num_steps < 100, "much was computed for nobody"
    finally:
        remove()
    assert bridge.metrics.finished["abort"] == aborted + 1


def test_pipelined_requests_of_a_client_that_leaves_are_not_computed(server):
    wait_for(lambda: is_idle(server))
    metrics = server.server.bridge.metrics
    before = sum(metrics.finished.values())
    connection = connect(server, post(max_tokens=100) * 50)
    wait_for(lambda: server.server.bridge.num_open or sum(metrics.finished.values()) > before)
    connection.close()
    time.sleep(0.3)
    wait_for(lambda: is_idle(server))
    assert sum(metrics.finished.values()) - before < 10


def test_pipelined_requests_of_a_client_that_stays_are_answered(server):
    connection = connect(server, post(max_tokens=3) * 20)
    answers = b""
    while answers.count(b'"usage"') < 20:
        answers += connection.recv(65536)
    connection.close()
    assert answers.count(b"HTTP/1.1 200") == 20


def test_a_client_that_sends_far_ahead_is_disconnected(server):
    remove = server.engine.on_step(lambda record: time.sleep(0.02))
    try:
        connection = connect(server, post())
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(1000):
                connection.sendall(b"x" * 65536)
        connection.close()
        wait_for(lambda: is_idle(server))
    finally:
        remove()


# -- connections ----------------------------------------------------------------------------------------------------


def test_connections_beyond_the_limits_get_503_and_health_is_answered(model, monkeypatch):
    from workbench.serve import listener

    with server_of(model, max_connections=20, max_connections_per_client=12, header_seconds=60) as server:
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
def test_a_burst_of_connections_is_kept_until_the_event_loop_accepts_it(server):
    """A connection that the system drops tries again after a second, and /health with it."""
    accepted = threading.Event()
    server.loop.call_soon_threadsafe(accepted.wait, 30)
    held = []
    try:
        for _ in range(300):
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=5))
    finally:
        accepted.set()
    for connection in held:
        connection.close()


def test_health_is_answered_before_a_burst_of_connections_is_served(server, monkeypatch):
    listener, blocked, order = server.server.listener, threading.Event(), []
    serve = listener._serve
    monkeypatch.setattr(
        listener, "_serve", lambda stream: (order.append(stream.socket.getpeername()[1]), serve(stream))
    )
    server.loop.call_soon_threadsafe(blocked.wait, 30)
    held = [connect(server, b"GET /h") for _ in range(100)]
    health = connect(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    blocked.set()
    first, others = health.getsockname()[1], {connection.getsockname()[1] for connection in held}
    assert read_to_end(health).startswith(b"HTTP/1.1 200 ")
    wait_for(lambda: others <= set(order))
    assert order.index(first) <= 24, "connections are accepted faster than served"
    for connection in held:
        connection.close()


def test_connections_are_accepted_in_every_turn_of_the_event_loop(server):
    assert server.loop._fair_selector.first == set(server.server.listener._sockets)


def test_a_connection_that_asks_for_health_late_is_served_before_others_that_wait(server):
    listener, order = server.server.listener, []

    async def hold():
        listener._is_serving = True  # so that nothing is served

    async def serve():
        order.extend(stream.socket.getpeername()[1] for stream in listener._waiting)
        listener._serve_some()
        order.extend(stream.socket.getpeername()[1] for stream in listener._waiting)

    asyncio.run_coroutine_threadsafe(hold(), server.loop).result(30)
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


def test_a_waiting_connection_that_is_refused_waits_no_more(server):
    from workbench.serve.sockets import UNAVAILABLE

    listener = server.server.listener

    async def hold():
        listener._is_serving = True  # so that nothing is served

    async def refuse():
        next(iter(listener._waiting)).refuse(UNAVAILABLE)
        num_waiting = len(listener._waiting)
        listener._serve_some()
        return num_waiting

    asyncio.run_coroutine_threadsafe(hold(), server.loop).result(30)
    connection = connect(server, b"GET /h")
    wait_for(lambda: len(listener._waiting) == 1)
    assert asyncio.run_coroutine_threadsafe(refuse(), server.loop).result(30) == 0
    assert read_to_end(connection).startswith(b"HTTP/1.1 503 ")


def test_trusted_proxies_have_no_limit_of_a_client_but_that_of_all(model):
    settings = {"max_connections": 20, "max_connections_per_client": 3, "trusted_proxies": ("127.0.0.1",)}
    with server_of(model, **settings) as server:
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
    from workbench.serve import listener, sockets

    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    for module in (listener, sockets):
        monkeypatch.setattr(module, "time", clock)

    def advance(seconds):
        ahead[0] += seconds

    return advance


def test_a_request_that_does_not_arrive_is_ended_in_time(model, clock):
    """No time passes that the test does not set, so a slow machine makes no difference."""
    with server_of(model, header_seconds=20) as server:
        streams = server.server.listener.streams
        silent, partial = connect(server), connect(server, b"GET /health HT")
        again = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

        def health():
            again.request("GET", "/health")
            response = again.getresponse()
            response.read()
            return response.status

        assert health() == 200
        wait_for(lambda: sorted(stream.num_requests for stream in streams) == [1, 1, 2])
        clock(21)
        assert read_to_end(silent).startswith(b"HTTP/1.1 408 ") and read_to_end(partial).startswith(b"HTTP/1.1 408 ")
        # A connection that has been used may be idle for longer; then its next request has to arrive in time too.
        assert health() == 200
        again.sock.sendall(b"GET /hea")
        wait_for(lambda: [stream._partial_since for stream in streams] != [None])
        clock(21)
        assert b"408 Request Timeout" in read_to_end(again.sock)


def test_no_file_descriptors_left_is_a_pause_and_a_line(server, monkeypatch, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
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
            for connection in held:
                connection.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    waiting.close()
    assert server.ask("GET", "/health")[0] == 200


def test_importing_mlx_lm_keeps_the_limit_on_open_files():
    import subprocess

    program = (
        "import resource; limit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, ({0}, {1}))\n"
        "import workbench.models.load, mlx_lm.utils; print(resource.getrlimit(limit), mlx_lm.utils.load.__name__)"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limits, expected in (((1024, hard), (2048, hard)), ((512, 1000), (1000, 1000))):
        run = subprocess.run(
            [sys.executable, "-c", program.format(*limits)], capture_output=True, text=True, timeout=120
        )
        assert run.stdout == f"{expected} load\n", run.stderr


# -- readers that do not read ---------------------------------------------------------------------------------------


def get(path, version="1.1"):
    return f"GET {path} HTTP/{version}\r\nHost: 127.0.0.1\r\n\r\n".encode()


@pytest.fixture
def small_buffers(monkeypatch):
    """The system's buffers take megabytes from a server; here they take little."""
    from workbench.serve import listener

    monkeypatch.setattr(
        listener, "_find_lost_peers", lambda peer: peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    )


@pytest.fixture
def small_limits(monkeypatch, small_buffers):
    from workbench.serve import sockets

    monkeypatch.setattr(sockets, "MAX_UNSENT_BYTES", 20_000)
    monkeypatch.setattr(sockets, "FAREWELL_SECONDS", 30.0)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_reader_of_the_trace_that_never_reads_is_cut_off(server, small_limits, version):
    streams, bridge = server.server.listener.streams, server.server.bridge
    connection = connect(server, get("/trace/stream", version), receive_buffer=4096)
    wait_for(lambda: bridge.step_listeners)
    stream = max(streams, key=lambda stream: stream.num_unsent)
    most = 0
    for _ in range(4000):
        status, _, _ = server.ask("POST", "/v1/completions", {"prompt": PROMPT * 20, "max_tokens": 60})
        assert status == 200
        stream = max([*streams, stream], key=lambda stream: stream.num_unsent)
        most = max(most, stream.num_unsent)
        if not bridge.step_listeners:
            break
    assert most < 20_000 + 40_000, "the limit, one record and the farewell"
    rest = read_to_end(connection)
    last = rest[rest.rindex(b"data: ") + 6 :].partition(b"\n")[0]
    assert "20000 bytes behind" in json.loads(last)["error"]["message"]
    if version == "1.1":
        assert rest.endswith(b"\r\n0\r\n\r\n"), "the answer is complete"


def frames(data):
    """Opcode and payload of each of a server's websocket frames."""
    while data:
        opcode, length, start = data[0] & 15, data[1] & 127, 2
        if length >= 126:
            size = 2 if length == 126 else 8
            length, start = int.from_bytes(data[2 : 2 + size], "big"), 2 + size
        yield opcode, data[start : start + length]
        data = data[start + length :]


def bokeh_message(kind, content):
    """A message of Bokeh's protocol as a client sends it: three masked text frames, here with a mask of zeros."""
    parts = [json.dumps(part).encode() for part in ({"msgid": "1", "msgtype": kind}, {}, content)]
    return b"".join(b"\x81\xfe%b\0\0\0\0%b" % (len(part).to_bytes(2, "big"), part) for part in parts)


READY = {
    "kind": "MessageSent",
    "msg_type": "bokeh_event",
    "msg_data": {"type": "event", "name": "document_ready", "values": {"type": "map", "entries": []}},
}
"""The event with which a page says that it is loaded; the server then sends it every step."""


@pytest.mark.parametrize(
    "messages, stall_seconds, reason",
    [
        (bokeh_message("PATCH-DOC", {"events": [READY]}), 30.0, "20000 bytes behind"),
        (bokeh_message("PULL-DOC-REQ", {}) * 20, 0.5, "read nothing for 0.5 s"),  # each waits for the one before
    ],
    ids=["follows the steps", "asks for the page again and again"],
)
def test_a_reader_of_the_dashboard_that_never_reads_is_cut_off(
    server, small_limits, monkeypatch, messages, stall_seconds, reason
):
    from workbench.serve import sockets

    monkeypatch.setattr(sockets, "STALL_SECONDS", stall_seconds)
    others = set(server.server.listener.streams)
    connection = open_dashboard(server, receive_buffer=4096)
    wait_for(lambda: any(stream.farewell for stream in server.server.listener.streams - others))
    [stream] = [stream for stream in server.server.listener.streams - others if stream.farewell]
    most = largest = 0
    write = stream.write

    def watched_write(data):
        nonlocal most, largest
        largest = max(largest, len(data))
        result = write(data)
        most = max(most, stream.num_unsent)
        return result

    stream.write = watched_write
    received = b""
    while b'"ACK"' not in received:  # Bokeh takes no message before
        received += connection.recv(4096)
    connection.sendall(messages)

    def is_cut_off():
        server.ask("POST", "/v1/completions", {"prompt": PROMPT * 20, "max_tokens": 60})
        return stream.cut_off_because

    wait_for(is_cut_off, 60)
    assert reason in stream.cut_off_because
    assert 20_000 < most <= 20_000 + largest, "the limit and one piece"
    answer, _, rest = (received + read_to_end(connection)).partition(b"\r\n\r\n")
    *messages, (opcode, payload) = frames(rest)
    assert answer.startswith(b"HTTP/1.1 101 ") and messages
    assert (opcode, int.from_bytes(payload[:2], "big")) == (8, 1013) and reason in payload[2:].decode()
    wait_for(stream.closed)


def test_a_reader_of_an_answer_that_never_reads_is_cut_off_and_its_request_aborted(server, small_limits):
    bridge = server.server.bridge
    wait_for(lambda: is_idle(server))
    aborted = bridge.metrics.finished["abort"]
    connections = [
        connect(server, post(stream=True, n=4, logprobs=5, max_tokens=240), receive_buffer=2048) for _ in range(4)
    ]
    wait_for(lambda: bridge.metrics.finished["abort"] == aborted + 16)
    assert all(b'"cut_off"' in read_to_end(connection) for connection in connections)


def test_an_event_for_a_connection_that_has_just_closed_is_dropped(server, small_buffers, caplog):
    """The write before it is still waiting for the reader, and is given up."""
    bridge = server.server.bridge
    connection = connect(server, get("/trace/stream"), receive_buffer=4096)
    wait_for(lambda: bridge.step_listeners)
    [handler] = [listener.__self__ for listener in bridge.step_listeners]
    stream = stream_of(handler.request)

    async def send_close_and_send():
        handler.send_event(b"x" * 1_000_000)
        assert stream.num_unsent > 100_000
        stream.close()
        assert not handler.gone.is_set()
        handler.send_event(b"y")
        assert handler.gone.is_set()

    asyncio.run_coroutine_threadsafe(send_close_and_send(), server.loop).result(30)
    wait_for(lambda: not bridge.num_readers)
    assert "InvalidStateError" not in caplog.text
    connection.close()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_an_answer_whose_reader_was_cut_off_ends_without_a_failure(server, small_buffers, caplog, version):
    bridge = server.server.bridge
    connection = connect(server, get("/trace/stream", version), receive_buffer=4096)
    wait_for(lambda: bridge.step_listeners)
    [handler] = [listener.__self__ for listener in bridge.step_listeners]

    async def cut_off():
        handler.send_event(b"x" * 1_000_000)
        stream_of(handler.request).cut_off("the test says so")
        handler.send_event(b"y")

    asyncio.run_coroutine_threadsafe(cut_off(), server.loop).result(30)
    wait_for(lambda: not bridge.num_readers)
    rest = read_to_end(connection)
    assert b"the test says so" in rest[-200:] and b"data: y" not in rest
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


def test_a_reader_that_takes_nothing_for_long_is_cut_off(server, small_buffers, monkeypatch):
    from workbench.serve import sockets

    monkeypatch.setattr(sockets, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(sockets, "FAREWELL_SECONDS", 0.5)
    connection = connect(server, post(stream=True, n=8, logprobs=5, max_tokens=240), receive_buffer=2048)
    wait_for(lambda: server.server.bridge.num_open)
    wait_for(lambda: not server.server.listener.streams)
    wait_for(lambda: is_idle(server))
    connection.close()


def test_slow_readers_together_are_bounded(server, small_buffers, monkeypatch):
    from workbench.serve import listener

    monkeypatch.setattr(listener, "MAX_TOTAL_UNSENT", 2_000_000)
    monkeypatch.setattr(listener, "SWEEP_SECONDS", 0.01)  # so that little is sent between two sweeps
    readers = [connect(server, get("/trace/stream"), receive_buffer=4096) for _ in range(4)]
    wait_for(lambda: len(server.server.bridge.step_listeners) == 4)
    for _ in range(2000):
        server.ask("POST", "/v1/completions", {"prompt": PROMPT * 20, "max_tokens": 60})
        if len(server.server.bridge.step_listeners) < 4:
            break
    assert 0 < len(server.server.bridge.step_listeners) < 4, "the reader that is most behind leaves, the others stay"
    for reader in readers:
        reader.close()
    wait_for(lambda: not server.server.bridge.step_listeners)


def test_readers_of_the_trace_are_counted(server):
    readers = [connect(server, get("/trace/stream")) for _ in range(32)]
    wait_for(lambda: server.server.bridge.num_readers == 32)
    assert server.ask("GET", "/trace/stream")[0] == 503
    for reader in readers:
        reader.close()
    wait_for(lambda: not server.server.bridge.num_readers)


# -- the log --------------------------------------------------------------------------------------------------------


def test_a_log_counts_what_repeats():
    import io

    from workbench.serve.log_limit import RepeatFilter

    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(RepeatFilter())
    log = logging.Logger("test")
    log.addHandler(handler)
    for number in range(1000):
        try:
            raise OSError(number)
        except OSError:
            log.exception("accepting failed: %d", number)
        log.warning("x" * 20_000)
    log.error("something else")
    text = out.getvalue()
    assert text.count("Traceback") == 5 and "only counted" in text and "something else" in text
    assert len(text) < 100_000


# -- addresses and headers that no browser sends --------------------------------------------------------------------


def raw(server, data):
    """Status of a request as bytes."""
    connection = connect(server, data)
    status = int(connection.recv(65536).split(b" ", 2)[1])
    connection.close()
    return status


@pytest.mark.parametrize("key", [None, "secret-key-1"])
def test_odd_headers_and_addresses_are_never_a_failure_of_the_server(model, key, caplog):
    odd_headers = [
        ("Origin", "http://["), ("Origin", "http://]"), ("Origin", "null"), ("Origin", "http://[::1"),
        ("Origin", "\xff"),
        ("Host", "["), ("Host", "[]"), ("Host", "a b"), ("Host", "\xff"), ("Host", ":"), ("Cookie", "=;=;\xff"),
        ("Cookie", "workbench_api_key=\"\\777"), ("Authorization", "Bearer \xff"), ("Authorization", "Bearer"),
        ("Content-Type", "multipart/form-data; boundary="), ("Content-Type", "multipart/form-data; boundary=\""),
        ("Content-Type", "application/x-www-form-urlencoded; charset=nowhere"), ("Content-Encoding", "gzip"),
        ("If-None-Match", "\"\\"), ("If-Modified-Since", "never"), ("Range", "bytes=9-1"), ("Accept", "\xff"),
    ]  # fmt: skip
    odd_paths = [
        "/static/%00", "/static/js/%00.js", "/%00", "/dashboard/%00", "/static/" + "a" * 5000, "/static/%ff%fe",
        "/static/../../etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd", "/static//etc/passwd", "//", "/dashboard/ws",
        "/dashboard/ws%00", "/dashboard?bokeh-session-id=%00", "/dashboard?api_key=%00", "/dashboard?" + "a=1&" * 3000,
        "/v1/models/%0a", "/v1/models/" + "%20" * 3000, "/static/extensions/panel/%00", "/static/extensions/none/x.js",
        "/dashboard/autoload.js?bokeh-autoload-element=%00", "/dashboard/metadata", "*", "http://[/", "/?%",
    ]  # fmt: skip
    with server_of(model, api_key=key) as server, caplog.at_level(logging.ERROR):
        for name, value in odd_headers:
            host = b"" if name == "Host" else b"Host: 127.0.0.1\r\n"
            line = f"{name}: {value}\r\n".encode("latin-1")
            for path in (b"/v1/models", b"/dashboard", b"/static/js/bokeh.min.js", b"/health"):
                status = raw(server, b"GET " + path + b" HTTP/1.1\r\n" + host + line + b"\r\n")
                assert status < 500, (name, value, path)
        for path in odd_paths:
            bearer = f"Authorization: Bearer {key}\r\n" if key else ""
            status = raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{bearer}\r\n".encode())
            assert (status < 500 and status != 200) or path.startswith(("/dashboard", "/?")), (path, status)
        assert server.ask("GET", "/health")[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


def test_the_body_of_a_rejected_request_is_not_kept(model):
    with server_of(model, api_key="secret-key-1", max_body_bytes=1 << 24) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", b"x" * 1_000_000)
        response = connection.getresponse()
        assert response.status == 401 and "API key" in response.read().decode()
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_sessions_of_the_dashboard_leave_time_for_others(model):
    """Pages have no session; a burst of websockets gets theirs one by one, and none once its client has left."""
    with server_of(model) as server:
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


def test_more_sessions_than_allowed_are_refused(model, monkeypatch):
    monkeypatch.setattr("workbench.serve.dashboard.MAX_SESSIONS", 1)
    with server_of(model) as server:
        first, second = open_dashboard(server), open_dashboard(server)
        assert first.recv(12) == b"HTTP/1.1 101" and second.recv(12) == b"HTTP/1.1 503"
        first.close()
        second.close()


def test_a_session_that_has_ended_leaves_nothing_behind(model, monkeypatch):
    """Neither the pages that were open nor their views live as long as the trace."""
    monkeypatch.setattr("workbench.serve.dashboard.LOST_SESSION_SECONDS", 0.1)
    from workbench.viz.app import TracePage

    with server_of(model) as server:
        open_dashboard(server).close()
        socket_ = open_dashboard(server)
        assert socket_.recv(12) == b"HTTP/1.1 101"
        wait_for(lambda: server.server.dashboard.num_sessions)
        trace = server.engine.trace
        pages = [weakref.ref(p) for p in gc.get_objects() if isinstance(p, TracePage) and p._feed.trace is trace]
        assert pages
        socket_.close()

        def are_gone():
            gc.collect()
            return not any(page() for page in pages)

        wait_for(are_gone)
