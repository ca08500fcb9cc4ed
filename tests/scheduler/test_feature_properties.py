"""Invariants of asynchronous steps, speculation and KV cache groups on random workloads, and faults that they catch."""

import os
import random

import pytest
from feature_workloads import KINDS, random_workload
from recorded_traces import assert_pool_fits

from workbench import Trace
from workbench.config import EngineConfig
from workbench.scheduler.block_pool import extend_block_hashes
from workbench.scheduler.kv_cache_groups import CachedState, GroupManager, SlidingWindow
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.run import SimulatedRun
from workbench.simulation.simulate import simulate
from workbench.simulation.workload import made_up_token, read_workload

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_FEATURE_WORKLOADS", "12"))
"""Random workloads of each kind."""


class Checked:
    """A scheduler's ``schedule()`` and ``update()``, with checks after each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update
        scheduler.schedule, scheduler.update = self.schedule, self.update

    def schedule(self):
        batch = self._schedule()
        for chunk in batch.chunks:
            self._check_chunk(chunk)
        self._check()
        return batch

    def update(self, *arguments, **options):
        batch = self._update(*arguments, **options)
        self._check()
        for request in self.scheduler.running:
            if not request.is_prefill and not request.num_in_flight_tokens:
                assert request.num_kv_computed == request.num_tokens - 1, "all but the last token are computed"
                assert not request.num_output_placeholders
        return batch

    def _check_chunk(self, chunk) -> None:
        """Every token that the rows of a chunk read or write has its block."""
        request, end = chunk.request, chunk.start + chunk.num_tokens
        processed = chunk.start - (max(0, request.num_in_flight_tokens - chunk.num_tokens))
        for manager, table in zip(self.scheduler.kv_cache.groups, request.block_tables):
            size = manager.block_size
            if isinstance(manager, CachedState) or not manager.group.is_attention:
                assert any(table), "a request without a state"
                continue
            if manager.drops_last_block:
                continue  # vLLM's rounding of a dropped block can leave a hole in a window
            first = max(0, processed - manager.group.sliding_window + 1) if manager.group.sliding_window else 0
            assert all(table[first // size : -(-end // size)]), f"a row of {request} reads or writes no block"
            assert len(table) * size >= end

    def _check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        kv_cache = scheduler.kv_cache
        lookahead = scheduler.config.speculation.num_hash_lookahead_tokens
        for request in scheduler.requests.values():
            hashes = []
            unit = kv_cache._hash_block_size
            known = (request.num_tokens - lookahead) // unit
            extend_block_hashes(hashes, request.token_ids, known, unit, lookahead)
            for manager, table in zip(kv_cache.groups, request.block_tables):
                for place, block in enumerate(table):
                    if block and (found := kv_cache.block_pool.hash_of(block)) is not None:
                        per_block = manager.block_size // unit
                        own = range(place * per_block, (place + 1) * per_block)
                        known_by = [index for index in own if index < len(hashes) and found.startswith(hashes[index])]
                        assert known_by, "a block is cached before its tokens are accepted, or under other tokens' hash"


def run_checked(workload) -> int:
    """Run a workload with checks at every step; returns the number of steps."""
    config, arrivals = read_workload(workload)
    run = SimulatedRun(config, iter(sorted(arrivals, key=lambda a: a.arrival_step)), None, None)
    Checked(run.scheduler)

    def sample(request):
        return made_up_token(f"{request.request_id}:{request.num_tokens}")

    while not run.over and not run.stuck and run.scheduler.step < 500:
        run.arrive()
        run.step(sample)
    list(run.rest(sample))
    if run.over:
        assert run.scheduler.num_free_blocks == config.num_usable_blocks, "everything is given back"
    return run.scheduler.step


def workloads(kind, count=NUM_WORKLOADS, seed="properties"):
    return [random_workload(kind, random.Random(f"{seed}:{kind}:{index}")) for index in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_shared_or_cached_too_early(kind):
    assert sum(run_checked(workload) for workload in workloads(kind)) > 5 * NUM_WORKLOADS


@pytest.mark.parametrize("kind", KINDS)
def test_records_hold_enough_to_rebuild_tables_and_pool(kind, tmp_path):
    for index, workload in enumerate(workloads(kind, 3, "records")):
        trace = simulate(workload, max_steps=300)
        trace.save(tmp_path / f"{index}.jsonl")
        loaded = Trace.load(tmp_path / f"{index}.jsonl")
        assert list(loaded) == list(trace)
        for mine, theirs in zip(loaded, trace, strict=True):
            assert mine.block_tables_by_group == theirs.block_tables_by_group
        assert_pool_fits(loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_the_same_however_steps_are_scheduled(kind):
    """A request's tokens depend on its positions alone, so a lost or doubled one shows."""
    for workload in workloads(kind, 6, "tokens"):
        trace = simulate(workload, max_steps=500)
        tokens = {request["id"]: [] for request in workload["requests"]}
        for record in trace:
            for chunk in record.chunks:
                tokens[chunk.request_id] += chunk.accepted
        for request_id, made in tokens.items():
            first = trace.requests[request_id].num_prompt_tokens
            assert made == [made_up_token(f"{request_id}:{first + i}") for i in range(len(made))]


# -- planted faults --------------------------------------------------------------------------------------------


def caught(kinds, match) -> bool:
    """Whether the checks fail on some workload, with this message."""
    for kind in kinds:
        for workload in workloads(kind, 40):
            try:
                run_checked(workload)
            except (AssertionError, ValueError, IndexError, KeyError) as problem:
                return match in str(problem) or match == ""
    return False


def test_fault_drafts_are_published_before_their_acceptance(monkeypatch):
    original = KVCacheManager.cache_full_blocks

    def with_drafts(self, request, num_computed):
        num_known = len(request.token_ids)
        request.token_ids += [5] * max(0, num_computed - num_known)
        original(self, request, num_computed)
        del request.token_ids[num_known:]

    monkeypatch.setattr(KVCacheManager, "cache_full_blocks", with_drafts)
    assert caught(["spec", "async_spec"], "a block is cached before its tokens are accepted, or under other")


def test_fault_roll_back_is_off_by_one(monkeypatch):
    original = Scheduler._take_output

    def off_by_one(self, chunk, sampled):
        reason = original(self, chunk, sampled)
        chunk.request.num_kv_computed += bool(chunk.drafts) and chunk.num_accepted < len(chunk.drafts)
        return reason

    monkeypatch.setattr(Scheduler, "_take_output", off_by_one)
    assert caught(["spec"], "all but the last token are computed")


def test_fault_a_window_gives_back_a_block_too_many(monkeypatch):
    original = SlidingWindow.num_skipped_blocks
    monkeypatch.setattr(SlidingWindow, "num_skipped_blocks", lambda self, n: original(self, n + self.block_size))
    assert caught(["window_only", "hybrid_window"], "reads or writes no block")


def test_fault_a_step_in_flight_loses_its_window(monkeypatch):
    """With asynchronous steps the window moves when a step is done, not when it is scheduled."""
    original = KVCacheManager.remove_skipped_blocks

    def too_early(self, request):
        in_flight, request.num_in_flight_tokens = request.num_in_flight_tokens, 0
        try:
            return original(self, request)
        finally:
            request.num_in_flight_tokens = in_flight

    monkeypatch.setattr(KVCacheManager, "remove_skipped_blocks", too_early)
    assert caught(["window_only", "hybrid_window"], "reads or writes no block")


def test_fault_a_group_is_not_freed(monkeypatch):
    def only_the_first(self, request, *, keep_cached=True):
        self.block_pool.free_blocks([block for block in request.block_tables[0] if block], keep_cached=keep_cached)

    monkeypatch.setattr(KVCacheManager, "free", only_the_first)
    assert caught(["hybrid_window", "hybrid_mamba"], "reference counts differ")


def test_fault_a_hit_is_not_touched(monkeypatch):
    original = GroupManager.add_cached_blocks

    def untouched(self, request, hit):
        touch, self._pool.touch = self._pool.touch, lambda blocks: None
        try:
            original(self, request, hit)
        finally:
            self._pool.touch = touch

    monkeypatch.setattr(GroupManager, "add_cached_blocks", untouched)
    assert caught(["async", "hybrid_window_prefix"], "")


def test_fault_stale_output_counts(monkeypatch):
    """Output of a step before a preemption must not move what the preemption has reset."""
    original = Scheduler._take_output

    def fresh(self, chunk, sampled):
        stale, chunk.request.num_stale_output_tokens = chunk.request.num_stale_output_tokens, 0
        try:
            return original(self, chunk, sampled)
        finally:
            chunk.request.num_stale_output_tokens = max(0, stale - chunk.num_tokens)

    monkeypatch.setattr(Scheduler, "_take_output", fresh)
    assert caught(["async", "async_spec"], "")


@pytest.mark.parametrize(("asynchronous", "expected"), [(False, 7), (True, 11)])
def test_an_admission_counts_no_more_blocks_than_a_window_and_the_steps_in_flight_hold(asynchronous, expected):
    """As in vLLM: ceil((window - 1 + tokens in flight) / block size) + 1; asynchronous steps are two in flight."""
    groups = [
        {"kind": "full_attention", "block_size": 4},
        {"kind": "sliding_window", "sliding_window": 8, "block_size": 4},
    ]
    config = EngineConfig(
        max_num_batched_tokens=16, block_size=4, num_blocks=64, kv_cache_groups=groups, async_scheduling=asynchronous
    )
    full, window = KVCacheManager(config).groups
    assert full.max_admission_blocks is None and window.max_admission_blocks == expected
