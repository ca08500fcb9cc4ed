"""The trace in memory: a sequence of records that one thread extends while others read."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from trace_helpers import one_trace

from workbench import simulate
from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceError, TraceMeta


@pytest.fixture(scope="module")
def trace():
    return one_trace()


def test_a_trace_is_a_sequence(trace):
    assert len(trace) == 25
    assert [record.step for record in trace] == list(range(25))
    assert trace[-1] is trace[24]
    for wrong in (25, -26):
        with pytest.raises(IndexError, match=f"step {wrong} of a trace of 25 steps"):
            trace[wrong]
    assert next(reversed(trace)) is trace[-1]
    assert trace[7] in trace


def test_a_request_is_not_looked_up_among_the_steps():
    trace = one_trace()
    for wrong in ("a", None, 1.5):
        with pytest.raises(TypeError, match=r"a trace has its steps by number, got .*; requests are in trace.requests"):
            trace[wrong]
    assert trace.requests._ipython_key_completions_() == list(trace.requests)


def test_slices_share_records(trace):
    part = trace[5:9]
    assert isinstance(part, Trace)
    assert [record.step for record in part] == [5, 6, 7, 8]
    assert all(mine is theirs for mine, theirs in zip(part, list(trace)[5:9]))
    assert part[1:3][0] is trace[6]
    assert part[0].block_tables == trace[5].block_tables
    assert len(trace[9:5]) == 0
    assert part.end == ""
    assert trace[20:].end == "done"
    ended = {request_id for record in trace[:20] for request_id in (*record.finished, *record.aborted)}
    assert ended and list(trace[20:].requests) == [name for name in trace.requests if name not in ended]
    assert trace[0:].requests == trace.requests
    assert [info.arrival_step for info in trace[:1].requests.values()] == [0, 0]
    with pytest.raises(ValueError, match="stride"):
        trace[::2]
    for change in (lambda: part.append(StepRecord(9)), lambda: part.add_request(RequestInfo("new", 1))):
        with pytest.raises(TraceError, match="a slice of a trace cannot be added to"):
            change()


def test_what_is_appended_is_checked():
    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 10}))
    trace.add_request(RequestInfo("a", 4))
    with pytest.raises(TraceError, match="request 'a' arrives twice"):
        trace.add_request(RequestInfo("a", 4))
    trace.append(StepRecord(0, arrived=("a",)))
    with pytest.raises(TraceError, match="step 2 follows step 0"):
        trace.append(StepRecord(2))
    finished = StepRecord(2)
    finished.attach_block_tables(4, [])
    with pytest.raises(TraceError, match="step 2 follows step 0"):
        trace.append(finished)
    assert len(trace) == 1


def test_block_tables_are_rebuilt():
    def chunk(start, num_tokens, blocks, arm="intermediate"):
        return (Chunk("a", start, num_tokens, arm != "decode", arm, None, "token_budget", blocks),)

    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 10}))
    trace.add_request(RequestInfo("a", 20))
    for record in (
        StepRecord(0, admitted=("a",), chunks=chunk(0, 6, (3, 1))),
        StepRecord(1, chunks=chunk(6, 2, ())),
        StepRecord(2, chunks=chunk(8, 4, (7,))),
        StepRecord(3, preempted=("a",)),
        StepRecord(4, resumed=("a",), chunks=chunk(0, 5, (2, 9))),
        StepRecord(5, chunks=chunk(5, 7, (4,))),
    ):
        trace.append(record)
    tables = [record.block_tables.get("a") for record in trace]
    assert tables == [[3, 1], [3, 1], [3, 1, 7], None, [2, 9], [2, 9, 4]]
    assert trace.block_size == 4


def test_requests_may_arrive_while_they_are_looked_at():
    trace = Trace(TraceMeta())
    trace.add_request(RequestInfo("r0", 1))
    for request_id, info in trace.requests.items():
        assert info.request_id == request_id
        trace.add_request(RequestInfo(f"after {request_id}", 1))
    assert list(trace.requests) == ["r0", "after r0"]


def test_readers_while_a_thread_appends(trace):
    growing = Trace(trace.meta)
    records = list(trace)
    problems = []
    done = threading.Event()

    def read():
        try:
            while not done.is_set():
                length = len(growing)
                assert [record.step for record in growing[:length]] == list(range(length))
                infos = list(growing.requests.values())
                names = list(growing.requests)[: len(infos)]  # more may have come between the two lines
                assert infos == [growing.requests[name] for name in names]
                metrics = growing.metrics()
                assert len(metrics.steps.step) >= length
                if length:
                    growing.pool_state(length - 1)
                assert len(growing.to_dict()["steps"]) >= length
        except BaseException as problem:
            problems.append(problem)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for info in trace.requests.values():
        growing.add_request(info)
    for number in range(300):
        growing.add_request(RequestInfo(f"more {number}", 1))
    for record in records:
        growing.append(record)
    done.set()
    for reader in readers:
        reader.join(timeout=60)
    assert not problems
    assert list(growing) == records


def test_other_shapes_of_a_trace(trace):
    frame = trace.to_pandas()
    assert len(frame) == sum(len(record.chunks) for record in trace)
    assert frame.num_tokens.sum() == sum(record.num_tokens for record in trace)
    assert set(frame.request_id) <= set(trace.requests)
    assert (frame.end == frame.start + frame.num_tokens).all()
    assert frame[frame.is_partial_prefill].sampled.isna().all()
    assert len(Trace(trace.meta).to_pandas()) == 0
    plain = trace.to_dict()
    assert plain["meta"]["config"]["block_size"] == 4
    assert plain["steps"][3]["chunks"][0][0] == trace[3].chunks[0].request_id
    assert plain["end"] == "done"


def test_without_pandas(trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the extra notebook \(pandas is not installed\): pip install"):
        trace.to_pandas()


def test_events_and_reprs(trace):
    assert [event for record in trace for event in record.events] == trace.events
    kinds = {event.kind for event in trace.events}
    assert {"arrive", "admit", "preempt", "resume", "finish"} <= kinds
    assert (
        repr(trace)
        == f"Trace(engine: 25 steps, 5 requests, {sum(r.num_tokens for r in trace):,} tokens scheduled, done)"
    )
    assert "r0" in repr(trace.requests)
    heading, *rows = repr(trace.events).splitlines()
    assert heading.split() == ["step", "event", "request", "reason"]
    for row, event in zip(rows, trace.events, strict=True):
        assert row.split(maxsplit=3) == [str(event.step), event.kind, event.request_id, *filter(None, [event.reason])]
    assert repr(trace[:0].events) == "no event" and len(repr(trace[:1].events).splitlines()) == 1 + len(trace[0].events)
    many = simulate({"requests": [{"id": f"r{n}", "prompt": {"len": 1}, "max_tokens": 1} for n in range(4000)]})
    assert repr(many.requests) == "requests(r0, r1, r2, r3, r4 and 3,995 more)"
    assert len(repr(many.events)) < 900 and repr(many.events).endswith(f"\n... and {len(many.events) - 20:,} more")
    assert "nobody" not in trace.requests
    with pytest.raises(KeyError):
        trace.requests["nobody"]


def test_a_trace_needs_neither_mlx_nor_the_views():
    program = (
        "import sys; from workbench.trace import Trace, TraceMeta; Trace(TraceMeta()).metrics(); "
        "print([name for name in sys.modules if name.startswith(('mlx', 'panel', 'bokeh', 'pandas', 'workbench.viz', "
        "'workbench.engine', 'workbench.kernels.attention'))])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
