"""One definition of every latency: the accumulator by hand, and its users on the same records.

``tests/simulation/test_simulate_at_scale.py`` compares the fourth user with latencies calculated from a full trace.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from workbench.apps.serve.prometheus import ServerMetrics
from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceMeta
from workbench.trace.readings.latency import LatencyAccumulator
from workbench.viz.layout.columns import FLAG_FIRST_TOKEN, columns_of
from workbench.viz.layout.packet import decode_packet, encode_packet

STEP_SECONDS = 0.0625


def recording(*, token_ids: bool, timed: bool = True) -> Trace:
    """Two requests on a clock (a prompt in two chunks, a pause, an abort), with or without token ids."""
    trace = Trace(TraceMeta(source="another engine", config={"block_size": 4, "num_blocks": 20}))
    trace.add_request(RequestInfo("a", 6, tuple(range(6)) if token_ids else (), arrival_step=0, arrival_time=0.0))
    trace.add_request(RequestInfo("b", 3, tuple(range(3)) if token_ids else (), arrival_step=1, arrival_time=0.125))

    def chunk(request_id, start, num_tokens, arm, blocks=()):
        samples = arm != "intermediate"
        token = 7 if samples and token_ids else None
        return Chunk(request_id, start, num_tokens, not samples, arm, token, "complete", blocks)

    steps = [
        (0.0, [chunk("a", 0, 4, "intermediate", (1,))], {"admitted": ("a",)}),
        (0.25, [chunk("a", 4, 2, "cached_final", (2,)), chunk("b", 0, 3, "new_final", (3,))], {"admitted": ("b",)}),
        (0.5, [chunk("a", 6, 1, "decode"), chunk("b", 3, 1, "decode")], {}),
        (1.0, [chunk("b", 4, 1, "decode", (4,))], {}),  # "a" rests
        (1.5, [chunk("a", 7, 1, "decode")], {"aborted": ("b",), "finished": ("a",), "finish_reasons": {"a": "stop"}}),
    ]
    for step, (time, chunks, fields) in enumerate(steps):
        timings = {"forward": STEP_SECONDS} if timed else {}
        trace.append(StepRecord(step, time if timed else 0.0, tuple(chunks), timings=timings, **fields))
    return trace


TTFT = {"a": 0.3125, "b": 0.1875}
ITL = {"a": [0.25, 1.0], "b": [0.25, 0.5]}
E2E = {"a": 1.5625, "b": 1.375}
"""Seconds, calculated by hand: a token exists at the end of its step; "b" is aborted before its last step begins."""


def arrivals_by_step(trace: Trace) -> list[list[RequestInfo]]:
    return [[info for info in trace.requests.values() if info.arrival_step == record.step] for record in trace]


def drawn(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Latency of each chunk as a view draws it, and whether it is that of a first token."""
    _, arrays = decode_packet(encode_packet(columns_of(trace)))
    return arrays["chunk.latency"], (arrays["chunk.flags"] & FLAG_FIRST_TOKEN) > 0


@pytest.mark.parametrize("token_ids", [True, False])
class TestTheUsersAgree:
    """They agree on a recording without token ids too: every chunk but a partial prefill gave a token."""

    def test_metrics(self, token_ids):
        requests = recording(token_ids=token_ids).metrics().requests
        assert {name: request.ttft.seconds for name, request in requests.items()} == TTFT
        assert {name: request.itl_seconds.tolist() for name, request in requests.items()} == ITL
        assert {name: request.e2e.seconds for name, request in requests.items()} == E2E

    def test_views(self, token_ids):
        latency, first = drawn(recording(token_ids=token_ids))
        expected = [math.nan, TTFT["a"], TTFT["b"], ITL["a"][0], ITL["b"][0], ITL["b"][1], ITL["a"][1]]
        np.testing.assert_array_equal(latency, np.float32(expected))
        assert first.tolist() == [False, True, True, False, False, False, False]

    def test_prometheus(self, token_ids):
        trace = recording(token_ids=token_ids)
        server = ServerMetrics(SimpleNamespace(name="m"))
        for record, arrivals in zip(trace, arrivals_by_step(trace)):
            server.add_step(record, arrivals)
        for histogram, values in (
            (server.time_to_first_token, TTFT.values()),
            (server.inter_token_latency, ITL["a"] + ITL["b"]),
            (server.e2e_latency, E2E.values()),
        ):
            assert (sum(histogram.counts), histogram.total) == (len(values), pytest.approx(sum(values)))
        assert server.generation_tokens == 6


def test_the_accumulator_by_hand():
    trace = recording(token_ids=True)
    latencies = LatencyAccumulator()
    times, steps = {}, []
    for record, arrivals in zip(trace, arrivals_by_step(trace)):
        times |= {info.request_id: latencies.arrive(info) for info in arrivals}
        steps.append(latencies.add(record))
    a, b = times["a"], times["b"]
    assert (a.queue, a.prefill, a.ttft) == ((0, 0.0), (2, 0.3125), (2, 0.3125))
    assert (b.queue, b.prefill, b.ttft) == ((0, 0.125), (1, 0.0625), (1, 0.1875))
    assert (a.decode, a.e2e) == ((3, 1.25), (5, 1.5625))
    assert (b.decode, b.e2e) == ((2, 0.75), (3, 1.375))
    assert [set(step.first_tokens) for step in steps] == [set(), {"a", "b"}, set(), set(), set()]
    assert [step.num_following for step in steps] == [0, 0, 2, 1, 0]
    assert steps[4].previous_tokens == [steps[2].end] and not any(step.previous_tokens for step in steps[:4])
    assert steps[4].ended == {"b": b, "a": a}
    assert latencies.get("a") is None, "a request that has ended is forgotten"


def test_a_simulation_without_a_clock_counts_steps():
    trace = recording(token_ids=True, timed=False)
    metrics = trace.metrics()
    assert {name: request.ttft for name, request in metrics.requests.items()} == {"a": (2, None), "b": (1, None)}
    assert {name: request.e2e for name, request in metrics.requests.items()} == {"a": (5, None), "b": (3, None)}
    latency, _ = drawn(trace)
    np.testing.assert_array_equal(latency, np.float32([math.nan, 2, 1, 1, 1, 1, 2]))


@pytest.mark.parametrize("token_ids", [True, False])
def test_a_slice_without_the_first_token_has_no_time_to_first_token(token_ids):
    """Nor does it have a gap before the first token that it holds."""
    part = recording(token_ids=token_ids)[2:]
    metrics = part.metrics()
    assert [request.ttft for request in metrics.requests.values()] == [None, None]
    assert metrics.requests["a"].itl_seconds.tolist() == ITL["a"][1:]
    latency, first = drawn(part)
    np.testing.assert_array_equal(latency, np.float32([math.nan, math.nan, ITL["b"][1], ITL["a"][1]]))
    assert not first.any()


def test_a_failed_request_got_no_token_from_its_last_chunk():
    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 5}))
    trace.add_request(RequestInfo("a", 3))
    chunk = Chunk("a", 0, 3, False, "new_final", None, "complete", (1,))
    fields = {"admitted": ("a",), "finished": ("a",), "finish_reasons": {"a": "error"}}
    trace.append(StepRecord(0, chunks=(chunk,), timings={"forward": 0.5}, **fields))
    assert trace.metrics().requests["a"].token_steps == ()
    assert np.isnan(drawn(trace)[0]).all()


def test_prometheus_ignores_requests_that_were_open_before_the_server():
    trace = recording(token_ids=True)
    server = ServerMetrics(SimpleNamespace(name="m"))
    for record, arrivals in zip(trace, arrivals_by_step(trace)):
        server.add_step(record, [info for info in arrivals if info.request_id == "b"])
    assert (server.generation_tokens, server.prompt_tokens, server.prefix_hits.queries) == (3, 3, 3)
    assert sum(server.e2e_latency.counts) == 1
    assert server.finished["stop"] == server.finished["abort"] == 1, "they are counted when they end"
