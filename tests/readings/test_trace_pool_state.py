"""The pool rebuilt from records equals the scheduler's BlockPool, for every block and in queue order."""

from __future__ import annotations

import numpy as np
import pytest
import trace_helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from trace_helpers import PoolTruth, run_scheduler

from workbench import EngineConfig, simulate
from workbench.scheduler.policy import SchedulingPolicy
from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceError, TraceMeta
from workbench.trace.readings import pool_state
from workbench.trace.readings.pool_state import CACHED, FREE, KEYFRAME_STEPS, OWNED, RESERVED


def assert_same(trace: Trace, index: int, moment: str, truth: PoolTruth) -> None:
    state = trace.pool_state(index, moment)
    assert state.free_queue.tolist() == truth.free_queue
    assert set(np.flatnonzero(state.cached)) == truth.cached
    assert {request_id: list(table) for request_id, table in state.block_tables.items()} == truth.tables
    assert state.consistent
    for block in range(state.num_blocks):
        holders = [request_id for request_id, table in truth.tables.items() if block in table]
        assert state.ref_count[block] == len(holders)
        assert state.owners(block) == holders
        owner = state.request_ids[state.owner[block]] if state.owner[block] >= 0 else None
        assert owner == (holders[0] if holders else None)
        free = CACHED if block in truth.cached else FREE
        assert state.state[block] == (RESERVED if block == 0 else OWNED if holders else free)


@settings(max_examples=examples(60), deadline=None)
@given(
    trace_helpers.configs,
    trace_helpers.workloads,
    trace_helpers.aborts,
    trace_helpers.failures,
    st.randoms(use_true_random=False),
)
def test_every_block_at_every_step(config, requests, aborts, failures, random):
    trace, truths = run_scheduler(config, requests, aborts, failures)
    moments = list(truths)
    random.shuffle(moments)  # seeks go back and forth
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_state, "KEYFRAME_STEPS", 5)
        for index, moment in moments[:40]:
            assert_same(trace, index, moment, truths[index, moment])


def test_blocks_allocated_and_freed_in_the_same_step():
    """With priorities, the victim may already be in the batch; its new blocks are then in no chunk."""
    config = EngineConfig(
        block_size=4,
        num_blocks=8,
        policy="priority",
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold=8,
        enable_prefix_caching=False,
        max_model_len=64,
    )
    requests = [(0, 1, [1] * 30, 2), (0, 2, [2] * 4, 8), (1, 0, [3] * 4, 8)]
    trace, truths = run_scheduler(config, requests, aborts={1: 1}, num_steps=30)
    assert trace[2].preempted == ("r0",)
    assert trace[2].unscheduled_block_ids == {"r0": (6, 7)}
    assert trace.pool_state(2).free_queue.tolist() == [6, 4, 3, 2, 1]
    for (index, moment), truth in truths.items():
        assert_same(trace, index, moment, truth)


def long_trace():
    config = EngineConfig(max_num_batched_tokens=24, max_num_seqs=4, block_size=4, num_blocks=12, max_model_len=40)
    requests = [(3 * n, 0, [1] * (n % 9) + [2] * (5 + n % 7), 14) for n in range(40)]
    return run_scheduler(config, requests, {5: 17, 9: 40}, num_steps=3 * KEYFRAME_STEPS)


def test_seeking_with_the_real_keyframe_distance():
    trace, truths = long_trace()
    assert sum(len(record.preempted) for record in trace) > 0, "the trace should hold preemptions"
    for index in (150, 0, 191, 64, 63, 65, 128, 127, 3, -1):
        index %= len(trace)
        assert_same(trace, index, "end", truths[index, "end"])
        assert_same(trace, index, "scheduled", truths[index, "scheduled"])


def test_growing_trace():
    trace, truths = long_trace()
    growing = Trace(trace.meta)
    for info in trace.requests.values():
        growing.add_request(info)
    for index, record in enumerate(trace):
        growing.append(record)
        if index % 3 == 0:
            assert_same(growing, index, "scheduled", truths[index, "scheduled"])


def test_a_slice_saved_and_loaded_knows_its_pool(tmp_path):
    trace, truths = long_trace()
    part = trace[70:140]
    assert_same(part, 0, "scheduled", truths[70, "scheduled"])
    part.save(tmp_path / "part.jsonl")
    loaded = Trace.load(tmp_path / "part.jsonl")
    assert list(loaded) == list(part)
    assert [record.block_tables for record in loaded] == [record.block_tables for record in part]
    for index in (0, 1, 30, 69):
        original, again = part.pool_state(index), loaded.pool_state(index)
        assert again.free_queue.tolist() == original.free_queue.tolist()
        assert again.block_tables == original.block_tables
        np.testing.assert_array_equal(again.state, original.state)
        np.testing.assert_array_equal(again.ref_count, original.ref_count)
    deeper = loaded[10:20]
    deeper.save(tmp_path / "deeper.jsonl")
    assert Trace.load(tmp_path / "deeper.jsonl").pool_state(3).block_tables == trace.pool_state(83).block_tables


class FirstRests(SchedulingPolicy):
    """Leaves the first running request out in steps 5 to 12."""

    def running_order(self, view):
        return view.running[1:] if 5 <= view.step <= 12 else view.running


def test_a_slice_of_a_slice_knows_requests_that_have_rested_since_before_both(tmp_path):
    requests = [{"id": name, "prompt": {"len": 10}, "max_tokens": 20} for name in "abc"]
    trace = simulate({"config": {"block_size": 4}, "requests": requests}, policy=FirstRests())
    trace[6:].save(tmp_path / "slice.jsonl")
    Trace.load(tmp_path / "slice.jsonl")[2:].save(tmp_path / "deeper.jsonl")
    deeper = Trace.load(tmp_path / "deeper.jsonl")
    assert deeper.keyframe.num_kv_computed == trace[8:].keyframe.num_kv_computed
    assert list(deeper) == list(trace[8:])


def test_a_trace_of_other_rules_is_marked_and_never_raises():
    config = {"block_size": 4, "num_blocks": 10}
    trace = Trace(TraceMeta(source="another engine", config=config))
    trace.add_request(RequestInfo("a", 8))
    trace.add_request(RequestInfo("b", 8))
    table = (3, 3, 9)
    trace.append(StepRecord(0, admitted=("a",), chunks=(Chunk("a", 0, 8, False, "new_final", 5, "complete", table),)))
    trace.append(
        StepRecord(
            1,
            admitted=("b",),
            finished=("a", "b"),
            cached_block_ids=(3, 7),
            chunks=(Chunk("b", 0, 8, False, "new_final", 5, "complete", table),),
        )
    )
    assert not trace.pool_state(0).consistent
    assert not trace.pool_state(1).consistent
    assert not trace.pool_state(1, "end").consistent


def test_questions_without_an_answer_raise():
    trace = Trace(TraceMeta(config={"block_size": 4}))
    trace.append(StepRecord(0))
    trace.append(StepRecord(1))
    assert len(trace[1:].metrics().steps.step) == 1
    with pytest.raises(TraceError, match="num_blocks"):
        trace.pool_state(0)
    trace, _ = long_trace()
    with pytest.raises(IndexError):
        trace.pool_state(len(trace))
    with pytest.raises(ValueError, match="moment"):
        trace.pool_state(0, "before")
    assert "owned" in repr(trace.pool_state(20))
    state = trace.pool_state(20)
    assert state.num_owned + state.num_free == state.num_blocks - 1
