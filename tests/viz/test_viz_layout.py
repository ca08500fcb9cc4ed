"""The layout functions: everything that was scheduled is drawn exactly once, for any trace."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viz_traces import random_trace

from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceMeta
from workbench.trace.pool_change import PoolChange
from workbench.trace.readings.pool_state import CACHED, FREE, OWNED, RESERVED
from workbench.viz.layout.packed_batch import packed_rows, readable_scale
from workbench.viz.layout.pool import FIRST_FOCUS, block_table_rows, pool_columns, pool_image
from workbench.viz.layout.pool_changes import PoolChanges
from workbench.viz.layout.timeline import step_bars

seeds = st.integers(0, 10_000)
few = settings(max_examples=15, deadline=None)


@given(seeds)
@few
def test_bars_tile_the_budget(seed):
    trace = random_trace(seed)
    bars = step_bars(trace[:])
    assert [sum(bar) for bar in zip(bars.decode, bars.prefill, bars.slack)] == bars.budget
    assert sum(bars.decode) + sum(bars.prefill) == sum(record.num_tokens for record in trace)
    assert len(bars.step) == len(trace)


def test_bins_keep_the_sum_and_the_extremes():
    records = random_trace(3, num_requests=20)[:]
    whole, binned = step_bars(records), step_bars(records, max_bars=7)
    assert len(binned.step) <= 7 and sum(binned.num_steps) == len(records)
    for mean, tokens in ((binned.decode, whole.decode), (binned.prefill, whole.prefill)):
        assert np.isclose(np.dot(mean, binned.num_steps), sum(tokens))
    assert max(binned.high) == max(whole.high) and min(binned.low) == min(whole.low)


def test_no_steps_have_no_bars():
    assert len(step_bars([]).step) == 0 and step_bars([]).top == 1.0


@given(seeds)
@few
def test_every_scheduled_token_is_in_one_row(seed):
    for record in random_trace(seed):
        rows = packed_rows(record)
        covered = [place for row in rows for place in range(row.q_start, row.q_end)]
        assert covered == list(range(record.num_tokens))
        for row, chunk in zip(rows, record.chunks, strict=True):
            assert (row.request_id, row.num_rows) == (chunk.request_id, chunk.num_tokens)
            assert (row.kv_start, row.kv_end) == (chunk.first_position, chunk.num_kv)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.floats(20, 4000), st.floats(0, 40))
@settings(deadline=None)
def test_readable_scale_fills_the_width_in_order(sizes, width, least):
    segments = readable_scale(sizes, width, least)
    assert segments[0].x0 == 0 and segments[-1].x1 == pytest.approx(width)
    floor = min(least, width / len(sizes))
    for before, after in itertools.pairwise(segments):
        assert before.x1 == after.x0
    for segment in segments:
        assert segment.x1 - segment.x0 >= floor - 1e-6
    longest = max(range(len(sizes)), key=lambda i: sizes[i])
    assert segments[longest].x1 - segments[longest].x0 == pytest.approx(max(s.x1 - s.x0 for s in segments))


@given(seeds)
@few
def test_block_tables_hold_every_kv_position(seed):
    for record in random_trace(seed):
        for row, chunk in zip(block_table_rows(record), record.chunks):
            assert sum(row.filled(logical) for logical in range(len(row.block_ids))) == chunk.end == row.num_kv
            assert 1 <= row.filled(len(row.block_ids) - 1) <= row.block_size
            assert row.block_ids[len(row.block_ids) - row.num_new :] == chunk.new_block_ids


def changed_between(before, after):
    """The blocks whose state, first owner or number of holders differs between two states of a pool."""

    def of(pool, block):
        owner = pool.owner[block]
        return pool.state[block], pool.ref_count[block], None if owner < 0 else pool.request_ids[owner]

    return {block for block in range(before.num_blocks) if of(before, block) != of(after, block)}


@given(seeds)
@few
def test_pool_changes_add_up_to_the_pool(seed):
    trace = random_trace(seed)
    changes = PoolChanges(trace)
    state = np.full(trace.num_blocks, FREE)
    state[0] = RESERVED
    owner = [None] * trace.num_blocks
    references = np.zeros(trace.num_blocks, int)
    became_cached = {}
    for index, record in enumerate(trace):
        parts = changes.advance(record)
        for changed in parts:
            assert len({change.block for change in changed}) == len(changed), "a block is named twice"
        if index:
            at_end = trace.pool_state(index - 1, "end")
            assert {change.block for change in parts[0]} == changed_between(
                trace.pool_state(index - 1, "scheduled"), at_end
            )
            assert {change.block for change in parts[1]} == changed_between(
                at_end, trace.pool_state(index, "scheduled")
            )
        for block, *after in itertools.chain(*parts):
            assert after != [state[block], owner[block], references[block]], "a change that changes nothing"
            if after[0] == CACHED and state[block] != CACHED:
                became_cached.pop(block, None)
                became_cached[block] = index
            state[block], owner[block], references[block] = after
        expected = trace.pool_state(index, "scheduled")
        assert expected.consistent
        assert np.array_equal(state, expected.state)
        assert np.array_equal(references, expected.ref_count)
        evicted_next = [block for block in expected.free_queue if state[block] == CACHED]
        assert [block for block in became_cached if state[block] == CACHED] == evicted_next
        names = [None if i < 0 else expected.request_ids[i] for i in expected.owner]
        assert owner == names
        assert changes.num_cached == expected.num_cached_free
        slots = sum(len(table) for table in expected.block_tables.values()) * trace.block_size
        computed = {chunk.request_id: chunk.end for before in trace[: index + 1] for chunk in before.chunks}
        assert changes.num_unused_slots == slots - sum(computed[rid] for rid in expected.block_tables)


def test_a_block_that_changes_in_one_step_without_a_chunk_is_drawn():
    """It was handed out to a request that was preempted in the same step: its content is lost."""
    trace = Trace(TraceMeta(config={"block_size": 4, "num_blocks": 4}))
    trace.add_request(RequestInfo("a", 4))
    trace.add_request(RequestInfo("b", 8))
    a = Chunk("a", 0, 4, False, "new_final", 7, "complete", (1,))
    b = Chunk("b", 0, 8, False, "new_final", 7, "complete", (2, 3))
    gone = PoolChange.of(back=[1])
    trace.append(StepRecord(0, chunks=(a,), admitted=("a",), finished=("a",), cached_block_ids=(1,), pool_end=gone))
    trace.append(StepRecord(1, chunks=(b,), admitted=("b",)))
    trace.append(StepRecord(2, preempted=("b",), pool=PoolChange.of([1], [1, 3, 2])))
    changes = PoolChanges(trace)
    parts = [changes.advance(record) for record in trace]
    states = [[{change.block: change.state for change in part} for part in both] for both in parts]
    assert states == [[{}, {1: OWNED}], [{1: CACHED}, {2: OWNED, 3: OWNED}], [{}, {1: FREE, 2: FREE, 3: FREE}]]
    assert trace.pool_state(2).state.tolist() == [RESERVED, FREE, FREE, FREE]


def test_pool_image_has_a_fixed_place_for_every_block():
    trace = random_trace(7)
    index = next(i for i, record in enumerate(trace) if len(record.chunks) > 1)
    state = trace.pool_state(index)
    focus = list(state.block_tables)[:2]
    image = pool_image(state, focus)
    assert image.shape[1] == pool_columns(trace.num_blocks)
    for block, value in enumerate(image.ravel()):
        if block >= state.num_blocks:
            assert value == RESERVED
        elif value >= FIRST_FOCUS:
            assert state.request_ids[state.owner[block]] == focus[value - FIRST_FOCUS]
        else:
            assert value == state.state[block]
            assert value != OWNED or state.request_ids[state.owner[block]] not in focus
    assert {FREE, OWNED} <= set(state.state) and CACHED == 2


@pytest.mark.parametrize(
    ("blocks", "columns"), [(1, 32), (1024, 32), (1025, 64), (16384, 128), (65536, 256), (10**7, 512)]
)
def test_pool_columns(blocks, columns):
    assert pool_columns(blocks) == columns
