"""Readers that do not read are cut off with the reason, and what waits for them is bounded."""

import asyncio
import json
import logging
import socket
import time

import pytest
from raw_clients import PROMPT, connect, get, is_idle, open_dashboard, post, read_to_end, read_until, server_of
from serve_helpers import wait_for

from workbench.apps.serve.guard import stream_of


@pytest.fixture(scope="module")
def server(chat_model):
    with server_of(chat_model) as client:
        yield client


@pytest.fixture
def small_buffers(monkeypatch):
    """The system's buffers take megabytes from a server; here they take little."""
    from workbench.apps.serve import listener

    monkeypatch.setattr(
        listener, "_find_lost_peers", lambda peer: peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    )


@pytest.fixture
def small_limits(monkeypatch, small_buffers):
    from workbench.apps.serve import sockets

    monkeypatch.setattr(sockets, "MAX_UNSENT_BYTES", 20_000)
    monkeypatch.setattr(sockets, "FAREWELL_SECONDS", 300.0)


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
        (bokeh_message("PATCH-DOC", {"events": [READY]}), 300.0, "20000 bytes behind"),
        (bokeh_message("PULL-DOC-REQ", {}) * 20, 0.5, "read nothing for 0.5 s"),  # each waits for the one before
    ],
    ids=["follows the steps", "asks for the page again and again"],
)
def test_a_reader_of_the_dashboard_that_never_reads_is_cut_off(
    server, small_limits, monkeypatch, messages, stall_seconds, reason
):
    from workbench.apps.serve import sockets

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
    received = read_until(connection, b'"ACK"')  # Bokeh takes no message before
    connection.sendall(messages)

    def is_cut_off():
        server.ask("POST", "/v1/completions", {"prompt": PROMPT * 20, "max_tokens": 60})
        return stream.cut_off_because

    wait_for(is_cut_off)
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
    remove = server.engine.on_step(lambda record: time.sleep(0.02))  # so that no answer is complete before
    try:
        connections = [
            connect(server, post(stream=True, n=4, logprobs=5, max_tokens=240), receive_buffer=2048) for _ in range(4)
        ]
        wait_for(lambda: bridge.metrics.finished["abort"] == aborted + 16)
    finally:
        remove()
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
    connection = connect(server, get("/trace/stream", version) + post(), receive_buffer=4096)
    wait_for(lambda: bridge.step_listeners)
    [handler] = [listener.__self__ for listener in bridge.step_listeners]
    stream = stream_of(handler.request)

    async def cut_off():
        handler.send_event(b"x" * 1_000_000)
        stream.cut_off("the test says so")
        handler.send_event(b"y")

    asyncio.run_coroutine_threadsafe(cut_off(), server.loop).result(30)
    wait_for(lambda: not bridge.num_readers)
    rest = read_to_end(connection)
    assert b"the test says so" in rest[-200:] and b"data: y" not in rest
    assert stream.num_requests == 1, "its next request is not read"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


def test_a_reader_that_takes_nothing_for_long_is_cut_off(server, small_buffers, monkeypatch):
    from workbench.apps.serve import sockets

    monkeypatch.setattr(sockets, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(sockets, "FAREWELL_SECONDS", 0.5)
    metrics = server.server.bridge.metrics
    before = sum(metrics.finished.values())
    connection = connect(server, post(stream=True, n=8, logprobs=5, max_tokens=240), receive_buffer=2048)
    wait_for(lambda: server.server.bridge.num_open or sum(metrics.finished.values()) > before)
    wait_for(lambda: not server.server.listener.streams)
    wait_for(lambda: is_idle(server))
    connection.close()


def test_slow_readers_together_are_bounded(server, small_buffers, monkeypatch):
    from workbench.apps.serve import listener

    monkeypatch.setattr(listener, "MAX_TOTAL_UNSENT", 500_000)
    monkeypatch.setattr(listener, "SWEEP_SECONDS", 0.01)  # so that little is sent between two sweeps
    readers = [connect(server, get("/trace/stream"), receive_buffer=4096) for _ in range(4)]
    wait_for(lambda: len(server.server.bridge.step_listeners) == 4)
    for _ in range(2000):
        server.ask("POST", "/v1/completions", {"prompt": PROMPT * 20, "max_tokens": 15})
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
