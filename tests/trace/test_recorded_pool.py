"""The pool in the records is the scheduler's: with every feature, and if the scheduler is at fault."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from assumed_pool import AssumedPool
from feature_workloads import KINDS, random_workload
from msgspec import structs
from trace_helpers import PoolTruth, watch_pools

from workbench import Trace, simulate
from workbench.scheduler.block_pool import BlockPool
from workbench.trace.fields import MAX_BLOCKS
from workbench.trace.pool_change import NO_CHANGE, PoolChange, PoolLog, length_of, pack, unpack
from workbench.trace.readings.pool_state import OWNED

NUM_WORKLOADS = 12
"""Random workloads of each kind."""


def workload(kind: str, index: int):
    return random_workload(kind, random.Random(f"pool:{kind}:{index}"))


def assert_same(trace: Trace, index: int, moment: str, truth: PoolTruth) -> None:
    state = trace.pool_state(index, moment)
    assert state.free_queue.tolist() == truth.free_queue
    assert set(np.flatnonzero(state.cached)) == truth.cached
    assert {request_id: list(table) for request_id, table in state.block_tables.items()} == truth.tables
    if state.other_tables:
        assert dict(state.other_tables) == truth.others
    assert state.consistent


def moments_of(trace: Trace) -> list[tuple[int, str]]:
    return [(index, moment) for index in range(len(trace)) for moment in ("scheduled", "end")]


def watched(given, patch: pytest.MonkeyPatch) -> tuple[Trace, dict[tuple[int, str], PoolTruth]]:
    truths = watch_pools(patch)
    return simulate(given, max_steps=300), truths


@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_at_every_moment(kind, monkeypatch, tmp_path):
    seen = Counter()
    for index in range(NUM_WORKLOADS):
        with monkeypatch.context() as patch:
            trace, truths = watched(workload(kind, index), patch)
        for record in trace:
            for change in (record.pool, record.pool_end):
                seen.update({name: len(getattr(change, name)) for name in ("evicted", "front", "back")})
            seen.update(preempted=len(record.preempted), aborted=len(record.aborted))
        for moment in moments_of(trace):
            assert_same(trace, *moment, truths[moment])
        # A part that begins with a keyframe, by way of a file.
        first = len(trace) // 3
        trace[first:].save(tmp_path / "part.jsonl")
        part = Trace.load(tmp_path / "part.jsonl")
        assert list(part) == list(trace[first:])
        for place, moment in moments_of(part):
            assert_same(part, place, moment, truths[first + place, moment])
    assert seen["front"] and (seen["preempted"] or seen["aborted"])
    assert kind != "hybrid_window_prefix" or (seen["evicted"] and seen["back"])


def leak(pool, table, **options):
    """The last block of a table is forgotten."""
    FREE_BLOCKS(pool, table[:-1], **options)


def give_back_twice(pool, table, **options):
    """A block that another request holds goes back too, and is handed out to a second one."""
    FREE_BLOCKS(pool, table, **options)
    held = [block for block in range(1, pool.num_blocks) if pool.ref_count(block) == 1]
    FREE_BLOCKS(pool, held[:1])


def first_to_last(pool, table, **options):
    """The order is another one."""
    FREE_BLOCKS(pool, table[::-1], **options)


def evict_another(pool, count):
    """A block that stays where it is loses its content."""
    blocks = GET_NEW_BLOCKS(pool, count)
    for block in sorted(pool.cached_blocks.keys() - {*blocks})[:1]:
        pool.evict(block)
    return blocks


def keep_content(pool, count):
    """A block that is handed out keeps the content that it lost."""
    evict, pool.evict = pool.evict, lambda block: None
    try:
        return GET_NEW_BLOCKS(pool, count)
    finally:
        pool.evict = evict


def from_the_tail(pool, count):
    """Blocks are taken from the other end of the queue."""
    pool._free = type(pool._free).fromkeys(reversed(pool._free))
    blocks = GET_NEW_BLOCKS(pool, count)
    pool._free = type(pool._free).fromkeys(reversed(pool._free))
    return blocks


FREE_BLOCKS, GET_NEW_BLOCKS = BlockPool.free_blocks, BlockPool.get_new_blocks
FAULTS = {
    leak: "free_blocks",
    give_back_twice: "free_blocks",
    first_to_last: "free_blocks",
    evict_another: "get_new_blocks",
    keep_content: "get_new_blocks",
    from_the_tail: "get_new_blocks",
}


def two_at_a_time(index: int):
    """A workload with room, so that a faulty run goes some way."""
    rng = random.Random(f"faults:{index}")
    config = {"block_size": 4, "num_blocks": 22, "max_num_seqs": 2, "max_model_len": 64}
    requests = [
        {"id": f"r{n}", "prompt": {"len": rng.randint(4, 30), "seed": rng.choice("AB")}, "max_tokens": 2 + n % 8}
        for n in range(12)
    ]
    return {"config": config, "requests": requests}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_pool_is_shown_as_it_was(fault, monkeypatch):
    differs = 0
    for index in range(10):
        with monkeypatch.context() as patch:
            patch.setattr(BlockPool, FAULTS[fault], fault)
            truths = watch_pools(patch)
            trace = simulate(two_at_a_time(index), max_steps=100)
        for moment in moments_of(trace):
            assert_same(trace, *moment, truths[moment])
        # The rules of vLLM's pool, by which traces without these facts are read, tell another story.
        rules = AssumedPool(trace.kv_cache_groups)
        differs += any(rules.complete(record) != record for record in trace)
    assert differs or fault is from_the_tail  # tables name the blocks that are handed out


def test_a_leak_and_a_double_holder_are_seen(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "free_blocks", leak)
        trace = simulate(two_at_a_time(0), max_steps=100)
    state = trace.pool_state(-1, "end")
    lost = np.flatnonzero((state.state == OWNED) & (state.owner < 0))
    assert len(lost) and not state.block_tables and not set(lost) & set(state.free_queue.tolist())
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "free_blocks", give_back_twice)
        trace = simulate(two_at_a_time(0), max_steps=100)
    states = [trace.pool_state(*moment) for moment in moments_of(trace)]
    assert any(state.owner[block] >= 0 for state in states for block in state.free_queue)


def test_a_recorder_that_cannot_know_says_so(tmp_path):
    """Tables and the number of blocks are known, content and the order of the queue are not; nothing raises."""
    trace = simulate(workload("async", 3), max_steps=300)
    blind = Trace(trace.meta)
    for info in trace.requests.values():
        blind.add_request(info)
    for record in trace:
        blind.append(structs.replace(record, pool=None, pool_end=None))
    blind.save(tmp_path / "blind.jsonl")
    loaded = Trace.load(tmp_path / "blind.jsonl")
    assert all(record.pool is None for record in loaded)
    for index, moment in moments_of(trace):
        there, here = trace.pool_state(index, moment), loaded.pool_state(index, moment)
        assert here.block_tables == there.block_tables and here.consistent
        assert sorted(here.free_queue) == sorted(there.free_queue)


def test_the_net_change_of_a_log():
    """Random calls: the queue that follows from the net change is the one that the calls left."""
    rng = random.Random(7)
    for _ in range(300):
        queue, held, log = list(range(8)), list(range(8, 16)), PoolLog()
        before, taken = queue.copy(), []
        for _ in range(rng.randint(0, 6)):
            if rng.random() < 0.4 and queue:
                block = queue.pop(rng.randrange(len(queue)))
                held.append(block)
                taken.append(block)
            else:
                chosen = rng.sample(held, rng.randint(0, min(3, len(held))))
                front, back = chosen[:1], chosen[1:]
                held = [block for block in held if block not in chosen]
                queue = front + queue + back
                log.give_back(front, back)
        change = log.take(queue.__contains__)
        middle = [block for block in before if block not in {*taken, *change.front, *change.back}]
        assert [*change.front, *middle, *change.back] == queue
        assert log.take(queue.__contains__) is NO_CHANGE
    both = PoolChange.of([1], [2], [3]).then(PoolChange.of([4], [5], [6]))
    assert both == PoolChange.of([1, 4], [5, 2], [3, 6])


def test_runs():
    rng = random.Random(3)
    for _ in range(500):
        blocks: list[int] = []
        while len(blocks) < 30:
            first, length = rng.randint(0, 60), rng.randint(1, 6)
            run = range(first, first + length)
            blocks += rng.choice([run, run[::-1]])
        packed = pack(blocks)
        assert unpack(packed) == blocks and length_of(packed) == len(blocks) >= len(packed)
    assert pack(range(1000, 0, -1)) == (1000, -1)
    for nonsense in ((-3,), (1, -3, -5), (2, -3, 4, -6, -6)):
        assert length_of(nonsense) == MAX_BLOCKS
