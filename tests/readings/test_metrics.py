"""Metrics against numbers calculated by hand, and against a naive implementation of their definitions."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import example, given, settings
from trace_helpers import one_trace, traces

from workbench import simulate
from workbench.apps.cli import main
from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceMeta
from workbench.trace.readings.block_replay import BlockReplay
from workbench.trace.readings.metrics import Distribution, StepMetrics
from workbench.trace.readings.pool_state import PoolState
from workbench.trace.readings.speculation_metrics import SpeculationCounter, SpeculationMetrics


def by_hand() -> Trace:
    """Two requests on a clock: "a" in two chunks, "b" waits for a step and is aborted after one token."""
    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 11, "max_num_batched_tokens": 6}))
    trace.add_request(RequestInfo("a", 8, tuple(range(8)), max_tokens=3, arrival_step=0, arrival_time=0.5))
    trace.add_request(RequestInfo("b", 3, (1, 2, 3), max_tokens=1, arrival_step=0, arrival_time=0.75))

    def step(number, time, *chunks, free, **fields):
        free_end = fields.pop("free_end", free)
        timings = {"forward": 0.5, "sample": 0.25}
        record = StepRecord(
            number, time, chunks, free_blocks=free, free_blocks_end=free_end, token_budget=6, timings=timings, **fields
        )
        trace.append(record)

    a, b = Chunk("a", 0, 6, True, "intermediate", None, "token_budget", (1, 2)), None
    step(0, 1.0, a, free=8, admitted=("a",), arrived=("a", "b"), running=("a",), waiting=("b",))
    a = Chunk("a", 6, 2, False, "cached_final", 41, "complete")
    b = Chunk("b", 0, 3, False, "new_final", 51, "complete", (3,))
    step(1, 2.0, a, b, free=7, admitted=("b",), running=("a", "b"))
    step(2, 3.0, Chunk("a", 8, 1, False, "decode", 42, "complete", (4,)), free=7, aborted=("b",), running=("a",))
    a = Chunk("a", 9, 1, False, "decode", 43, "complete")
    step(3, 5.0, a, free=7, free_end=10, finished=("a",), finish_reasons={"a": "length"}, running=("a",))
    trace.end = "done"
    return trace


def test_by_hand():
    metrics = by_hand().metrics()
    a, b = metrics.requests["a"], metrics.requests["b"]
    assert (a.queue, a.prefill, a.ttft) == ((0, 0.5), (2, 1.75), (2, 2.25))
    assert a.queue.seconds + a.prefill.seconds == a.ttft.seconds
    assert a.token_steps == (1, 2, 3)
    assert a.token_times == (2.75, 3.75, 5.75)
    assert a.itl_seconds.tolist() == [1.0, 2.0]
    assert a.itl_steps.tolist() == [1, 1]
    assert a.decode == (2, 3.0)
    assert a.e2e == (4, 5.25)
    assert (a.finish_reason, a.finish_step, a.first_scheduled_step) == ("length", 3, 0)
    assert (b.queue, b.prefill, b.ttft) == ((1, 1.25), (1, 0.75), (2, 2.0))
    assert b.e2e == (2, 2.25)  # aborted before step 2 was scheduled
    assert (b.finish_reason, b.num_output_tokens) == ("abort", 1)
    steps = metrics.steps
    assert steps.num_tokens.tolist() == [6, 5, 1, 1]
    assert steps.num_decode_tokens.tolist() == [0, 0, 1, 1]
    assert steps.num_prefill_tokens.tolist() == [6, 5, 0, 0]
    assert steps.budget_use.tolist() == [1, 5 / 6, 1 / 6, 1 / 6]
    assert steps.owned_blocks.tolist() == [2, 3, 3, 3]
    assert steps.kv_use.tolist() == [0.2, 0.3, 0.3, 0.3]
    assert steps.unused_slots.tolist() == [2, 1, 3, 2]
    assert steps.fragmentation.tolist() == [2 / 8, 1 / 12, 3 / 12, 2 / 12]
    assert steps.duration.tolist() == [0.75] * 4
    summary = metrics.summary
    assert summary.unit == "s"
    assert (summary.num_requests, summary.num_finished, summary.num_output_tokens) == (2, 2, 4)
    assert summary.duration == 4.75
    assert summary.output_throughput == 4 / 4.75
    assert summary.total_throughput == 13 / 4.75
    assert summary.ttft.mean == 2.125
    assert summary.peak_kv_use == 0.3
    assert "time to first token" in repr(metrics)
    assert "4.750 s" in repr(metrics)
    said = repr(metrics.requests["a"])
    assert said == (
        "RequestMetrics(a: 8 prompt tokens, 3 output tokens, queue 500 ms, ttft 2.25 s, e2e 5.25 s, hit max_tokens)"
    )
    row = next(line for line in repr(metrics).splitlines() if line.startswith("time to first token"))
    assert row.split("token")[1].split()[:2] == ["2.13", "s"] and "2.13\u00a0s" in metrics._repr_html_()


def aborted_at_once() -> Trace:
    """A run of one empty step, which has no clock."""
    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 11}))
    trace.add_request(RequestInfo("a", 3, (1, 2, 3)))
    trace.append(StepRecord(0, aborted=("a",), free_blocks=10))
    return trace


@settings(max_examples=40, deadline=None)
@given(traces())
@example(one_trace())
@example(aborted_at_once())
def test_against_the_definitions(trace):
    metrics = trace.metrics()
    assert list(metrics.requests) == list(trace.requests)
    for request_id, found in metrics.requests.items():
        info = trace.requests[request_id]
        tokens, waste, first_scheduled, finish = [], 0, None, None
        for record in trace:
            end = record.end
            for chunk in record.chunks:
                if chunk.request_id == request_id:
                    first_scheduled = first_scheduled or (record.step, record.time)
                    waste += chunk.num_recomputed_tokens
                    if chunk.sampled is not None:
                        tokens.append((record.step, end))
            if request_id in record.finished:
                finish = (record.step + 1, end)
            elif request_id in record.aborted:
                finish = (record.step, record.time)
        assert found.num_recomputed_tokens == waste
        assert list(zip(found.token_steps, found.token_times)) == tokens
        assert found.num_preemptions == sum(request_id in record.preempted for record in trace)
        if first_scheduled:
            assert found.queue.steps == first_scheduled[0] - info.arrival_step
            assert found.queue.seconds == pytest.approx(first_scheduled[1] - info.arrival_time)
        else:
            assert found.queue is None
        if tokens:
            assert found.ttft.steps == tokens[0][0] - info.arrival_step + 1
            assert found.ttft.seconds == pytest.approx(tokens[0][1] - info.arrival_time)
            assert found.ttft.steps == found.queue.steps + found.prefill.steps
            assert found.decode.seconds == pytest.approx(found.itl_seconds.sum())
            assert found.decode.steps == found.itl_steps.sum()
        else:
            assert found.ttft is None
        if finish is None:
            assert found.e2e is None
        else:
            timed = metrics.summary.unit == "s"  # not if the only step is the first, and it is empty
            seconds = pytest.approx(finish[1] - info.arrival_time) if timed else None
            assert found.e2e == (finish[0] - info.arrival_step, seconds)
    steps = metrics.steps
    computed: dict[str, int] = {}
    for index, record in enumerate(trace):
        pool = trace.pool_state(index)
        computed.update({chunk.request_id: chunk.end for chunk in record.chunks})
        assert steps.owned_blocks[index] == pool.num_owned
        assert steps.cached_blocks[index] == pool.num_cached_free
        assert steps.free_blocks[index] == pool.num_free
        slots_in_use = {}  # of each owned block, counted once if it is shared
        for request_id, table in pool.block_tables.items():
            for position, block in enumerate(table):
                used = min(trace.block_size, computed[request_id] - position * trace.block_size)
                slots_in_use[block] = max(used, slots_in_use.get(block, 0))
        assert steps.unused_slots[index] == sum(trace.block_size - used for used in slots_in_use.values())
        assert steps.num_recomputed_tokens[index] == sum(chunk.num_recomputed_tokens for chunk in record.chunks)


def test_a_simulation_has_no_seconds():
    workload = {
        "config": {"max_num_batched_tokens": 10, "num_blocks": 20, "block_size": 4},
        "requests": [{"id": "a", "prompt": {"len": 25}, "max_tokens": 3}],
    }
    metrics = simulate(workload).metrics()
    request = metrics.requests["a"]
    assert request.ttft == (3, None)
    assert request.token_steps == (2, 3, 4)
    assert request.token_times == ()
    assert metrics.summary.unit == "steps"
    assert metrics.summary.ttft.mean == 3
    assert metrics.summary.output_throughput == 3 / 5


def test_collected_while_it_grows():
    whole = one_trace()
    growing = Trace(whole.meta)
    for info in whole.requests.values():
        growing.add_request(info)
    for record in whole:
        growing.append(record)
        if record.step % 4 == 0:
            metrics = growing.metrics()
            assert len(metrics.steps.step) == len(growing)
    assert growing.metrics().requests == whole.metrics().requests
    assert growing.metrics().summary == whole.metrics().summary
    np.testing.assert_array_equal(growing.metrics().steps.unused_slots, whole.metrics().steps.unused_slots)


def test_the_pool_is_replayed_only_for_its_columns(monkeypatch):
    """A summary needs no block: most commands ask for nothing else, and a replay is a third of their time."""
    whole = one_trace()
    growing = Trace(whole.meta)
    for info in whole.requests.values():
        growing.add_request(info)
    for record in whole[:9]:
        growing.append(record)
    early = growing.metrics()
    with monkeypatch.context() as patch:
        patch.delattr(BlockReplay, "schedule")
        for record in whole[9:]:
            growing.append(record)
        assert growing.metrics().summary == whole.metrics().summary
    assert set(early.columns) == {field.name for field in fields(StepMetrics)} - {"block_size"}
    for name in ("cached_blocks", "unused_slots"):
        np.testing.assert_array_equal(getattr(early.steps, name), getattr(whole.metrics().steps, name)[:9])


def test_no_reader_changes_what_the_next_one_reads():
    """Metrics and the state of the pool are kept with the trace, and everybody gets the same ones."""
    trace, same = one_trace(), one_trace()
    requests, (name, *_) = trace.metrics().requests, same.requests
    for change in (
        lambda: requests.pop(name),
        lambda: requests.update({name: requests[name]}),
        lambda: requests.clear(),
        lambda: trace.pool_state(3).block_tables.clear(),
        lambda: trace.pool_state(3).other_tables.setdefault(name, ()),
    ):
        with pytest.raises(TypeError, match=r"never changes: copy this with dict\(...\)"):
            change()
    arrays = [getattr(trace.pool_state(3), field.name) for field in fields(PoolState)]
    arrays += [getattr(trace.metrics().steps, field.name) for field in fields(StepMetrics)]
    for array in filter(lambda each: isinstance(each, np.ndarray), arrays):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    for column in trace.metrics().columns:
        trace.metrics().columns[column][0] = 77
    assert dict(trace.metrics().requests) == dict(same.metrics().requests)
    for column, expected in same.metrics().columns.items():
        assert trace.metrics().columns[column] == expected, column
    mine = dict(requests)
    mine.pop(name)
    assert name in requests and type(copy.copy(requests)) is type(pickle.loads(pickle.dumps(requests))) is type(
        requests
    )


def test_of_a_part_of_a_run():
    whole = one_trace()
    parts = whole[:9].metrics(), whole[9:].metrics()
    for request_id, in_whole in whole.metrics().requests.items():
        before, after = (part.requests.get(request_id) for part in parts)
        assert sum((part.token_steps for part in (before, after) if part), ()) == in_whole.token_steps
        if before and before.token_steps:
            assert before.ttft == in_whole.ttft
            assert after is None or after.ttft is None  # its first token is not in this part
        assert in_whole.e2e in [part.e2e for part in (before, after) if part]
        assert (after is None) == bool(before and before.e2e), "a request that has ended is not in the next part"
    for name in ("owned_blocks", "cached_blocks", "unused_slots", "num_tokens"):
        joined = np.concatenate([getattr(part.steps, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole.metrics().steps, name))


def test_a_recording_without_token_ids():
    """An engine's recording may leave prompts and sampled tokens out; latencies are the same."""
    trace = Trace(TraceMeta(source="another engine", config={"block_size": 4}))
    trace.add_request(RequestInfo("a", 6))
    chunks = [
        Chunk("a", 0, 4, True, "intermediate", None, "token_budget", (1,)),
        Chunk("a", 4, 2, False, "cached_final", None, "complete", (2,)),
        Chunk("a", 6, 1, False, "decode", None, "complete"),
    ]
    for step, chunk in enumerate(chunks):
        admitted = ("a",) if step == 0 else ()
        trace.append(StepRecord(step, chunks=(chunk,), admitted=admitted, free_blocks=step))
    request = trace.metrics().requests["a"]
    assert request.token_steps == (1, 2)
    assert request.ttft.steps == 2
    steps = trace.metrics().steps
    assert steps.owned_blocks.tolist() == [-1, -1, -1]
    assert np.isnan(steps.kv_use).all()
    assert np.isnan(steps.budget_use).all()
    assert trace.metrics().summary.mean_kv_use is None
    assert "KV blocks -" in repr(trace.metrics())


def test_failed_requests_get_no_token():
    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 5}))
    trace.add_request(RequestInfo("a", 3))
    chunk = Chunk("a", 0, 3, False, "new_final", None, "complete", (1,))
    trace.append(StepRecord(0, chunks=(chunk,), admitted=("a",), finished=("a",), finish_reasons={"a": "error"}))
    assert trace.metrics().requests["a"].token_steps == ()
    assert trace.metrics().requests["a"].finish_reason == "error"


@pytest.mark.parametrize(("aborted", "failed"), [(0, 0), (2, 0), (0, 1), (1, 2)])
def test_requests_that_were_aborted_or_failed_are_counted_apart(aborted, failed, tmp_path, capsys):
    trace = Trace(TraceMeta(source="another engine", config={"block_size": 4}))
    names = tuple("abcde")
    for name in names:
        trace.add_request(RequestInfo(name, 2, (1, 2)))
    chunks = tuple(Chunk(name, 0, 2, False, "new_final", 7, "complete", (n,)) for n, name in enumerate(names, 1))
    trace.append(StepRecord(0, chunks=chunks, admitted=names, running=names))
    gone, ended = names[:aborted], names[aborted:4]
    reasons = {name: "error" if name in ended[:failed] else "length" for name in ended}
    trace.append(StepRecord(1, aborted=gone, finished=ended, finish_reasons=reasons, running=names[4:]))
    summary = trace.metrics().summary
    assert (summary.num_finished, summary.num_aborted, summary.num_failed) == (4, aborted, failed)
    unusual = [f"{count} {word}" for count, word in ((aborted, "aborted"), (failed, "failed")) if count]
    words = f" ({', '.join(unusual)})" if unusual else ""
    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "info", str(tmp_path / "run.jsonl")]) == 0
    assert f"4 of 5 requests ended{words} in 2 steps" in capsys.readouterr().out
    assert f"4 of 5 requests ended{words} in 2 steps" in trace.metrics()._repr_html_()


def test_an_empty_trace():
    metrics = Trace(TraceMeta(config={"num_blocks": 5})).metrics()
    assert metrics.summary.num_steps == 0
    assert metrics.summary.output_throughput is None
    assert metrics.summary.ttft == Distribution(0)
    assert "0 of 0 requests" in repr(metrics)


def test_distribution():
    values = np.arange(101.0)
    assert Distribution.of(values) == Distribution(101, 50.0, 50.0, 95.0, 99.0, 100.0)
    assert Distribution.of([3.0]).median == 3.0
    assert Distribution.of([]).mean is None


def test_drafts_and_rows_for_nothing():
    def chunk(drafts=(), accepted=0, sampled=5, **fields):
        before = tuple(range(accepted))
        fields = {"arm": "decode", "start": 8, "num_tokens": 1 + len(drafts)} | fields
        return Chunk(
            "r",
            is_partial_prefill=False,
            sampled=sampled,
            limited_by="complete",
            drafts=drafts,
            sampled_before=before,
            num_accepted=accepted,
            **fields,
        )

    counter = SpeculationCounter()
    assert counter.metrics() == SpeculationMetrics()
    assert counter.metrics().acceptance_rate is counter.metrics().mean_acceptance_length is None
    counter.add(StepRecord(0, chunks=(chunk((3, 4, 5), 2), chunk((3, 4), 0), chunk())))
    counter.add(StepRecord(1, chunks=(chunk((7,), 1), chunk((-1, -1), 0, arm="new_final"))))
    counter.add(StepRecord(2, chunks=(chunk((8, 9), 0, sampled=None, discarded=True),)))
    metrics = counter.metrics()
    assert (metrics.num_verifications, metrics.num_drafts, metrics.num_accepted) == (3, 6, 3)
    assert metrics.drafts_per_position == (3, 2, 1) and metrics.accepted_per_position == (2, 1, 0)
    assert metrics.acceptance_rates == (2 / 3, 1 / 2, 0)
    assert metrics.mean_acceptance_length == 2 and metrics.tokens_per_step == 8 / 5
    assert (metrics.num_rejected_rows, metrics.num_discarded_rows, metrics.num_wasted_rows) == (5, 3, 8)


def test_tokens_of_one_step_share_its_number():
    requests = [{"id": f"r{i}", "prompt": {"len": 5}, "max_tokens": 300} for i in range(4)]
    found = simulate({"requests": requests}).metrics()
    steps = [step for request in found.requests.values() for step in request.token_steps if step > 256]
    assert len(steps) > 100 and len({id(step) for step in steps}) == len(set(steps))
