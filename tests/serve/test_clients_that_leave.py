"""Clients that leave or send ahead: nothing is computed for those that are gone."""

import threading
import time

import pytest
from raw_clients import connect, is_idle, post, read_to_end, read_until, server_of
from serve_helpers import wait_for


@pytest.fixture(scope="module")
def server(chat_model):
    with server_of(chat_model) as client:
        yield client


@pytest.mark.parametrize("behind", [b"\r\n", b"x", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"x" * 100_000])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_is_noticed_behind_bytes_of_a_next_request(server, monkeypatch, behind, stream):
    wait_for(lambda: is_idle(server))
    bridge = server.server.bridge
    aborted = bridge.metrics.finished["abort"]
    steps, may_run, abort = [], threading.Event(), server.engine.abort
    monkeypatch.setattr(server.engine, "abort", lambda name: (abort(name), may_run.set()))

    def wait_in_step(record):
        steps.append(record.step)
        may_run.wait(120)

    remove = server.engine.on_step(wait_in_step)
    try:
        connection = connect(server, post(stream=stream) + behind)
        wait_for(lambda: steps)  # a request that has not been tokenized would not be added at all
        connection.close()
        wait_for(may_run.is_set)
        wait_for(lambda: is_idle(server))
        assert len(steps) < 3, "much was computed for nobody"
    finally:
        may_run.set()
        remove()
    assert bridge.metrics.finished["abort"] == aborted + 1


def test_pipelined_requests_of_a_client_that_leaves_are_not_computed(server):
    wait_for(lambda: is_idle(server))
    metrics = server.server.bridge.metrics
    before = sum(metrics.finished.values())
    has_left = threading.Event()
    remove = server.engine.on_step(lambda record: has_left.wait(120))
    try:
        connection = connect(server, post(max_tokens=100) * 50)
        wait_for(lambda: server.server.bridge.num_open)
        connection.close()
    finally:
        has_left.set()
        remove()
    time.sleep(0.3)
    wait_for(lambda: is_idle(server))
    assert sum(metrics.finished.values()) - before < 10


def test_pipelined_requests_of_a_client_that_stays_are_answered(server):
    connection = connect(server, post(max_tokens=3) * 20)
    answers = read_until(connection, b'"usage"', 20)
    connection.close()
    assert answers.count(b"HTTP/1.1 200") == 20


def test_a_client_that_sends_far_ahead_is_disconnected(server, monkeypatch):
    """Long before Tornado's read buffer is full, which logs an error."""
    from workbench.apps.serve import sockets

    monkeypatch.setattr(sockets, "MAX_AHEAD_BYTES", 20_000)
    is_cut_off = threading.Event()
    remove = server.engine.on_step(lambda record: is_cut_off.wait(120))
    try:
        connection = connect(server, post() + b"x" * 100_000)
        assert read_to_end(connection) == b""
        is_cut_off.set()
        wait_for(lambda: is_idle(server))
    finally:
        is_cut_off.set()
        remove()
