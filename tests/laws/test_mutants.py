"""Planted faults: each law has faults that it catches first, and one that no other law catches.

A fault is a change of one function of the scheduler. Its workloads are random, with a fixed seed.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from feature_workloads import random_workload
from law_runs import checked_run, checked_workload
from scheduler_helpers import random_workload as plain_workload

from workbench.scheduler import kv_cache_manager, outputs, starvation
from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.cache_groups import CacheGroups
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.partial_prefills import PartialPrefills
from workbench.scheduler.queues import FCFSRequestQueue, PriorityRequestQueue, Queues, ServiceOrder
from workbench.scheduler.recurrent_state import CachedState
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.sliding_window import SlidingWindow
from workbench.trace.laws import LAWS
from workbench.trace.pool_change import PoolLog

NUM_WORKLOADS = 30

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutant(NamedTuple):
    """A fault, the law that catches it first, and the workloads in which it shows."""

    law: str
    plant: Patch
    kinds: tuple[str, ...]
    alone: bool
    changes: dict[str, Any]


MUTANTS: dict[str, Mutant] = {}


def priorities_under_pressure(rng):
    """Later requests are more urgent, every token fills a block, and blocks run out while prompts are computed."""
    config = {"policy": "priority", "block_size": 1, "max_num_batched_tokens": 12, "num_blocks": 31}
    config |= {"long_prefill_token_threshold": rng.randint(3, 6), "scheduler_reserve_full_isl": False}
    requests = [
        {
            "id": f"r{index}",
            "prompt": {"len": rng.randint(12, 26) if index < 2 else rng.randint(2, 8), "seed": rng.choice("AB")},
            "max_tokens": rng.randint(2, 4) if index < 2 else rng.randint(4, 20),
            "arrival_step": index + rng.randint(0, 2),
            "priority": 9 - index,
        }
        for index in range(rng.randint(3, 6))
    ]
    return {"config": config, "requests": requests}


def long_prompts_through_a_small_window(rng):
    """A pool that holds a window and two steps, and prompts that are longer than it."""
    groups = [{"kind": "sliding_window", "sliding_window": rng.choice([4, 8])}]
    config = {"block_size": 4, "kv_cache_groups": groups, "max_num_batched_tokens": 8, "num_blocks": 8}
    requests = [
        {"id": f"r{index}", "prompt": {"len": rng.randint(40, 80)}, "max_tokens": rng.randint(1, 9)}
        for index in range(rng.randint(1, 3))
    ]
    return {"config": config, "requests": requests}


def hits_under_a_small_budget(rng):
    """Requests with a token left behind a prefix hit, and a budget below 1 + drafts."""
    config = {"block_size": 4, "enable_prefix_caching": True, "num_speculative_tokens": 3, "num_blocks": 64}
    config |= {"max_num_batched_tokens": rng.randint(1, 3), "max_num_seqs": 1}
    requests = [
        {"id": f"r{index}", "prompt": {"len": 4 * rng.randint(1, 3) + 1, "seed": "A"}, "max_tokens": rng.randint(1, 5)}
        for index in range(rng.randint(2, 4))
    ]
    return {"config": config, "requests": requests}


LONG = {"max_long_partial_prefills": 1, "long_prefill_token_threshold": 3, "max_num_scheduled_tokens": None}
DIRECTED = {"urgent_last": priorities_under_pressure, "small_window": long_prompts_through_a_small_window}
DIRECTED["small_budget"] = hits_under_a_small_budget


def mutant(law: str, *kinds: str, alone: bool = False, **changes: Any) -> Callable[[Patch], Patch]:
    """Add a fault to the list. ``alone``: no other law catches it. ``changes``: fields of the configuration."""

    def add(plant: Patch) -> Patch:
        MUTANTS[plant.__name__] = Mutant(law, plant, kinds or ("plain",), alone, changes)
        return plant

    return add


def replace(patch, owner, name, make):
    """Replace a method or a function by ``make(original)``."""
    patch.setattr(owner, name, make(getattr(owner, name)))


# -- blocks ----------------------------------------------------------------------------------------------------


@mutant("blocks", "plain", alone=True, num_blocks=400, max_num_seqs=8)
def a_finished_request_keeps_its_last_block(patch):
    def make(original):
        def free(self, request, *, keep_cached=True):
            self.block_pool.free_blocks(request.block_tables[0][:-1], keep_cached=keep_cached)

        return free

    replace(patch, KVCacheManager, "free", make)


@mutant("blocks", "plain", num_blocks=400)
def a_request_is_given_a_block_too_many(patch):
    def make(original):
        def allocate_slots(self, request, num_tokens, *rest):
            return original(self, request, num_tokens + self.block_size * (not request.block_tables[0]), *rest)

        return allocate_slots

    replace(patch, KVCacheManager, "allocate_slots", make)


@mutant("blocks", "plain", enable_prefix_caching=True)
def a_hit_stays_in_the_free_queue(patch):
    def touch(self, blocks):
        for block in blocks:
            self._ref_counts[block] += 1

    patch.setattr(BlockPool, "touch", touch)


@mutant("blocks", "window_only", "hybrid_window")
def a_window_gives_back_a_block_too_many(patch):
    replace(
        patch, SlidingWindow, "num_skipped_blocks", lambda original: lambda self, n: original(self, n + self.block_size)
    )


@mutant("blocks", "window_only", "hybrid_window", async_scheduling=True)
def a_step_in_flight_loses_its_window(patch):
    """With asynchronous steps the window moves when a step is done, not when it is scheduled."""

    def make(original):
        def too_early(self, request):
            flight, request.flight = request.flight, None
            try:
                return original(self, request)
            finally:
                request.flight = flight

        return too_early

    replace(patch, CacheGroups, "remove_skipped_blocks", make)


@mutant("blocks", "hybrid_mamba", alone=True, enable_prefix_caching=True)
def a_state_is_kept_when_it_was_read(patch):
    replace(
        patch, CachedState, "num_skipped_blocks", lambda original: lambda self, n: original(self, n - self.block_size)
    )


@mutant("blocks", "hybrid_window", "hybrid_mamba")
def only_the_first_group_is_freed(patch):
    def free(self, request, *, keep_cached=True):
        self.block_pool.free_blocks([block for block in request.block_tables[0] if block], keep_cached=keep_cached)

    patch.setattr(KVCacheManager, "free", free)


@mutant("blocks", "plain", enable_prefix_caching=True)
def a_block_that_stays_free_is_evicted(patch):
    def make(original):
        def get_new_blocks(self, count):
            blocks = original(self, count)
            spared = next((block for block in self._free if block in self._hash_of), None)
            if blocks and spared is not None:
                self.evict(spared)
            return blocks

        return get_new_blocks

    replace(patch, BlockPool, "get_new_blocks", make)


@mutant("blocks", "plain", alone=True, enable_prefix_caching=True)
def cached_blocks_that_are_given_back_are_not_named(patch):
    replace(patch, PoolLog, "give_back", lambda original: lambda self, front, back: original(self, front, ()))


# -- content ---------------------------------------------------------------------------------------------------


@mutant("content", "urgent_last", alone=True)
def hashes_of_a_chunk_that_is_taken_back_stay(patch):
    patch.setattr(KVCacheManager, "evict_newly_cached", lambda self, request, num_computed: set())


@mutant("content", "plain", enable_prefix_caching=True)
def a_hash_does_not_cover_the_blocks_before(patch):
    def make(original):
        def extend(hashes, tokens, num_blocks, size, *rest):
            for index in range(len(hashes), num_blocks):
                own = []
                original(own, tokens[index * size :], 1, size, *rest)
                hashes += own

        return extend

    replace(patch, kv_cache_manager, "extend_block_hashes", make)


@mutant("content", "spec", "async_spec", enable_prefix_caching=True)
def drafts_are_published_before_their_acceptance(patch):
    def make(original):
        def with_drafts(self, request, num_computed):
            num_known = len(request.token_ids)
            request.token_ids += [5] * max(0, num_computed - num_known)
            original(self, request, num_computed)
            del request.token_ids[num_known:]

        return with_drafts

    replace(patch, CacheGroups, "cache_full_blocks", make)


@mutant("content", "hybrid_mamba", alone=True, enable_prefix_caching=True)
def a_state_is_found_in_the_step_that_computes_it(patch):
    replace(
        patch,
        CachedState,
        "num_admission_blocks",
        lambda original: lambda self, *a, **k: (self.fresh.clear(), original(self, *a, **k))[1],
    )


# -- counters --------------------------------------------------------------------------------------------------


@mutant("counters", "spec")
def rejected_drafts_are_not_all_taken_back(patch):
    def make(original):
        def take(chunk, *args, **kwargs):
            reason = original(chunk, *args, **kwargs)
            chunk.request.num_kv_computed += bool(chunk.drafts) and chunk.num_accepted < len(chunk.drafts)
            return reason

        return take

    replace(patch, outputs, "take_output", make)


@mutant("counters", "async", alone=True, num_blocks=400)
def tokens_in_flight_are_counted_twice(patch):
    def make(original):
        def advance(self, chunk):
            original(self, chunk)
            chunk.request.flight.num_tokens += not chunk.samples

        return advance

    replace(patch, Scheduler, "_advance", make)


@mutant("counters", "async", "async_spec")
def stale_output_counts(patch):
    def make(original):
        def fresh(chunk, *args, **kwargs):
            flight = chunk.request.flight
            stale, flight.stale = flight.stale, 0
            try:
                return original(chunk, *args, **kwargs)
            finally:
                flight.stale = max(0, stale - chunk.num_tokens)

        return fresh

    replace(patch, outputs, "take_output", make)


# -- limits ----------------------------------------------------------------------------------------------------


@mutant("limits", "plain", alone=True, max_num_seqs=2, max_num_active_seqs=None)
def a_request_more_than_seats_runs(patch):
    def make(original):
        def configure(self, config):
            original(self, config)
            self.max_running += 1

        return configure

    replace(patch, Scheduler, "_configure", make)


@mutant("limits", "plain", alone=True)
def the_budget_is_one_token_too_large(patch):
    def make(original):
        def configure(self, config):
            original(self, config)
            self._token_budget += 1

        return configure

    replace(patch, Scheduler, "_configure", make)


@mutant("limits", "plain", alone=True, long_prefill_token_threshold=4)
def the_cap_of_long_prefills_is_ignored(patch):
    patch.setattr(ServiceOrder, "limit_chunk", lambda self, plan, batch: plan.limit_to_step())


@mutant("limits", "plain", alone=True, watermark=0.3)
def the_watermark_is_ignored(patch):
    replace(
        patch,
        KVCacheManager,
        "refuse",
        lambda original: lambda self, *a, others_run: original(self, *a, others_run=False),
    )


@mutant("limits", "plain", max_num_partial_prefills=4, max_num_batched_tokens=16, **LONG)
def any_number_of_long_prompts_is_in_progress(patch):
    patch.setattr(PartialPrefills, "consider", lambda self, plan, batch: None)


# -- exactly once ----------------------------------------------------------------------------------------------


@mutant("exactly_once", "plain", alone=True)
def a_request_ends_a_token_early(patch):
    def make(original):
        def add(self, request, **options):
            request.max_num_tokens -= request.max_tokens > 1
            original(self, request, **options)

        return add

    replace(patch, Scheduler, "add_request", make)


@mutant("exactly_once", "plain")
def an_admitted_request_stays_in_the_queue(patch):
    def make(original):
        def admit(self, request):
            original(self, request)
            if request.request_id == "r1":
                self.waiting.add(request)

        return admit

    replace(patch, Queues, "admit", make)


@mutant("exactly_once", "async")
def a_token_is_appended_twice(patch):
    def make(original):
        def take(chunk, *args, **kwargs):
            reason = original(chunk, *args, **kwargs)
            if chunk.sampled is not None and reason is None and chunk.request.num_output_tokens == 2:
                chunk.request.token_ids.append(chunk.sampled)
            return reason

        return take

    replace(patch, outputs, "take_output", make)


# -- order -----------------------------------------------------------------------------------------------------


@mutant("order", "plain", alone=True, policy="fcfs")
def a_preempted_request_goes_to_the_tail(patch):
    patch.setattr(FCFSRequestQueue, "put_back", FCFSRequestQueue.append)


@mutant("order", "plain", alone=True, policy="priority")
def the_first_request_is_preempted(patch):
    patch.setattr(ServiceOrder, "victim", lambda self, batch, budget: (self.queues.running[0], "first"))


@mutant("order", "plain", alone=True, policy="priority")
def priorities_are_ignored(patch):
    patch.setattr(PriorityRequestQueue, "add", list.append)


@mutant("order", "urgent_last", alone=True)
def the_request_behind_a_victim_is_skipped(patch):
    """vLLM up to 0.25.1: the victim stood before the cursor, which was not moved."""

    def make(original):
        def running_order(self, batch):
            running, position = self.queues.running, 0
            while position < len(running):
                yield running[position]
                position += 1

        return running_order

    replace(patch, ServiceOrder, "running_order", make)


@mutant("order", "plain", alone=True, policy="fcfs")
def the_last_request_is_skipped_with_budget_left(patch):
    """Nobody behind it gets a token, so only the budget that is left shows it."""

    def make(original):
        def running_order(self, batch):
            *first, last = self.queues.running or [None]
            yield from first or ([last] if last else [])

        return running_order

    replace(patch, ServiceOrder, "running_order", make)


# -- utilisation -----------------------------------------------------------------------------------------------


@mutant("utilisation", "plain", "async", "hybrid_window", alone=True)
def every_fifth_step_is_empty(patch):
    def make(original):
        def schedule(self):
            budget, self._token_budget = self._token_budget, 0 if self.step % 5 == 3 else self._token_budget
            try:
                return original(self)
            finally:
                self._token_budget = budget

        return schedule

    replace(patch, Scheduler, "schedule", make)


@mutant("utilisation", "plain", alone=True)
def nobody_is_admitted_in_the_step_of_an_arrival(patch):
    def make(original):
        return lambda self, batch, budget: budget if batch.arrived else original(self, batch, budget)

    replace(patch, Scheduler, "_schedule_waiting", make)


# -- progress --------------------------------------------------------------------------------------------------


@mutant("utilisation", "small_window", max_num_seqs=1)
def an_admission_asks_for_blocks_that_a_window_gives_back(patch):
    """vLLM 0.19: Running 0, Waiting 1, until the server is restarted. Ours would serve the request frugally."""
    patch.setattr(starvation, "starving", lambda waiting: None)

    def make(original):
        def init(self, index, group, shared, drops):
            original(self, index, group, shared, drops)
            self.max_admission_blocks = None

        return init

    replace(patch, SlidingWindow, "__init__", make)


@mutant("utilisation", "spec", alone=True)
def decodes_lose_their_drafts(patch):
    patch.setattr(Scheduler, "set_drafts", lambda self, drafts: None)


@mutant("utilisation", "plain", alone=True, long_prefill_token_threshold=3)
def a_prompt_that_is_alone_is_cut(patch):
    patch.setattr(Scheduler, "_long_prefill_cap", lambda self: self.config.long_prefill_token_threshold)


@mutant("utilisation", "plain", alone=True, enable_prefix_caching=True)
def full_blocks_are_not_cached(patch):
    patch.setattr(KVCacheManager, "cache_full_blocks", lambda self, request, num_computed: None)


@mutant("utilisation", "hybrid_window_prefix", alone=True)
def the_window_before_the_end_of_a_prompt_is_not_kept(patch):
    patch.setattr(SlidingWindow, "keeps", lambda self, request, first, last: [False] * (last - first))


@mutant("utilisation", "plain", alone=True, enable_prefix_caching=True)
def a_cached_prefix_is_computed_again(patch):
    patch.setattr(KVCacheManager, "get_computed_blocks", lambda self, request: self._no_hit)


@mutant("utilisation", "plain", alone=True)
def a_preemption_asks_for_a_block_too_many(patch):
    replace(patch, KVCacheManager, "num_new_blocks", lambda original: lambda self, *given: original(self, *given) + 1)


@mutant("utilisation", "plain", alone=True, max_num_partial_prefills=2, max_num_seqs=4, num_blocks=400)
def a_prompt_in_progress_takes_the_whole_budget(patch):
    patch.setattr(PartialPrefills, "limit_chunk", lambda self, plan, batch: self._order.limit_chunk(plan, batch))


@mutant("progress", "small_budget", alone=True)
def an_admission_waits_for_room_for_padding(patch):
    """vLLM 0.33.0: nothing runs, and the budget is below 1 + drafts."""
    replace(
        patch,
        Scheduler,
        "__init__",
        lambda original: (
            lambda self, *arguments, **options: original(self, *arguments, **(options | {"as_vllm": True}))
        ),
    )


@mutant("progress", "plain", alone=True, num_blocks=400, enable_prefix_caching=False)
def a_long_prompt_is_preempted_when_it_is_half_done(patch):
    def make(original):
        def allocate_slots(self, request, num_tokens, hit=None, removed=()):
            half = request.is_prefill and request.num_prompt_tokens > 30 and num_tokens > 20 and request.block_tables[0]
            return None if half else original(self, request, num_tokens, hit, removed)

        return allocate_slots

    replace(patch, KVCacheManager, "allocate_slots", make)


# -- crash -----------------------------------------------------------------------------------------------------


@mutant("crash", "plain", alone=True, enable_prefix_caching=True)
def a_held_block_is_taken_from_the_free_queue(patch):
    def touch(self, blocks):
        for block in blocks:
            del self._free[block]
            self._ref_counts[block] += 1

    patch.setattr(BlockPool, "touch", touch)


@mutant("crash", "plain", alone=True)
def one_free_block_too_many_is_counted(patch):
    patch.setattr(KVCacheManager, "num_free_blocks", property(lambda self: self.block_pool.num_free_blocks + 1))


# -- the tests -------------------------------------------------------------------------------------------------


def runs(kinds, changes, count=NUM_WORKLOADS):
    """The broken laws of each run."""
    for kind in kinds:
        for index in range(count):
            rng = random.Random(f"mutants:{kind}:{index}")
            if kind == "plain":
                config, arrivals = plain_workload(rng)
                yield checked_run(config.replace(**changes), arrivals)[1]
            else:
                workload = DIRECTED[kind](rng) if kind in DIRECTED else random_workload(kind, rng)
                workload["config"] |= changes
                yield checked_workload(workload)[1]


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("name", MUTANTS)
def test_each_fault_is_caught_first_by_its_law(name, monkeypatch):
    law, plant, kinds, alone, changes = MUTANTS[name]
    assert not any(runs(kinds, changes, 10)), "the laws hold without the fault"
    plant(monkeypatch)
    found = [broken for broken in runs(kinds, changes) if broken]
    assert found, "no workload shows the fault"
    assert {broken[0].law for broken in found} == {law}, found[0]
    if alone:
        assert {each.law for broken in found for each in broken} == {law}


def test_every_law_has_two_faults_and_one_that_it_alone_catches():
    for law in LAWS:
        own = [mutant for mutant in MUTANTS.values() if mutant.law == law.name]
        assert len(own) >= 2 and any(mutant.alone for mutant in own), law.name
