"""One test for each fault that other engines have had in chunked prefill and that a scheduler can have.

The numbers are those of a list of such faults, collected from the histories of ATOM, nano-vllm, mini-sglang,
tiny_vLLM and mlx-lm; the missing ones concern attention and memory, not scheduling.
"""

import numpy as np
import pytest
from scheduler_helpers import CheckedKVCache, add, make_scheduler, next_token, run, sample, sizes, step, tokens
from trace_checks import said

from workbench.scheduler.scheduler import Scheduler
from workbench.trace import StepRecord


def prefilled(scheduler, *requests) -> None:
    """Step until the prefill of all these requests is complete."""
    while any(request.is_prefill for request in requests):
        step(scheduler)


def test_b01_a_resumed_request_computes_its_output_again_and_samples_only_at_its_end():
    """Progress compared to the prompt's length samples in the middle of the recomputed output."""
    scheduler = make_scheduler(max_num_batched_tokens=8, num_blocks=9)
    a, b = add(scheduler, "a", 8, max_tokens=20), add(scheduler, "b", 7, max_tokens=18)
    records = run(scheduler)
    resumed_at = next(record.step for record in records if "b" in record.resumed)
    chunks = [record.chunk("b") for record in records[resumed_at:] if "b" in sizes(record)]
    prefill = [chunk for chunk in chunks if chunk.arm != "decode"]
    assert len(prefill) > 1, "the case needs a recomputation in several chunks"
    assert prefill[0].end > b.num_prompt_tokens, "the case needs a chunk that ends in the output"
    assert [chunk.arm for chunk in prefill] == ["intermediate"] * (len(prefill) - 1) + ["cached_final"]
    assert [chunk.sampled is None for chunk in prefill] == [True] * (len(prefill) - 1) + [False]
    assert b.output_token_ids[-1] == b.token_ids[-1] and b.num_output_tokens == 18 and a.num_output_tokens == 20


def test_b02_the_chunk_is_counted_after_the_prefix_hit():
    """Tokens counted before the cache lookup reach past the end of the sequence."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, "a", tokens(18), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", tokens(18), max_tokens=1)
    record = step(scheduler)
    chunk = record.chunk("b")
    assert (chunk.start, chunk.num_tokens, chunk.num_cached_tokens) == (16, 2, 16)
    assert len(record.block_tables["b"]) == 5 and record.positions.tolist() == [16, 17]


def test_b03_the_kv_length_is_the_end_of_the_chunk():
    """A KV length of the whole prompt makes attention read slots that nobody has written."""
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, "a", 16)
    assert [step(scheduler).seqused_k for _ in range(4)] == [[6], [12], [16], [17]]


def test_b04_a_chunk_may_begin_in_the_middle_of_a_block():
    """Slots computed from a block-aligned start overwrite what the block holds already."""
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, "a", 16, max_tokens=1)
    records = run(scheduler)
    slots = np.concatenate([record.slot_mapping for record in records])
    expected = [block * 4 + offset for block in records[-1].block_tables["a"] for offset in range(4)]
    assert slots.tolist() == expected
    assert records[1].slot_mapping[0] % 4 == 2


def test_b05_a_failed_forward_withdraws_what_it_had_published():
    """A hash whose KV was never computed serves garbage to the next request with that prefix."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, "a", tokens(17))
    add(scheduler, "b", tokens(17))
    batch = scheduler.schedule()
    assert [chunk.num_cached_tokens for chunk in batch.chunks] == [0, 16], "b shares what a is only now filling"
    record = scheduler.fail(batch).to_record()
    assert set(record.cached_block_ids) == {*record.pool_end.evicted} and not record.pool_end.back
    assert dict(record.finish_reasons) == {"a": "error", "b": "error"}
    add(scheduler, "c", tokens(17))
    assert step(scheduler).chunk("c").num_cached_tokens == 0


def test_b05_an_unscheduled_victim_withdraws_what_it_had_published():
    """By priority a victim may have been scheduled already; on resuming it must not find its own blocks filled."""
    scheduler = make_scheduler(
        enable_prefix_caching=True, policy="priority", num_blocks=9, scheduler_reserve_full_isl=False
    )
    kv_cache = CheckedKVCache(4)
    victim = add(scheduler, "victim", 15, max_tokens=8, priority=9)
    add(scheduler, "other", 16, max_tokens=8, priority=0)
    unscheduled = False
    while scheduler.has_unfinished_requests():
        published = len(scheduler.kv_cache.block_pool.cached_blocks)
        batch = scheduler.schedule()
        kv_cache.forward(batch)
        if victim.request_id in batch.preempted:
            # At 15 + 1 tokens the victim was about to fill its fourth block when `other` ran short of one.
            unscheduled = True
            assert victim.num_kv_lost == 15
            assert len(scheduler.kv_cache.block_pool.cached_blocks) == published
        scheduler.update(batch, sample(batch)).to_record()
    assert unscheduled


def test_b06_a_hit_on_a_free_block_keeps_its_content_and_is_charged():
    """Free blocks that a hit brings back are neither forgotten nor free a second time."""
    scheduler = make_scheduler(enable_prefix_caching=True, num_blocks=9)
    add(scheduler, "a", tokens(17), max_tokens=1)
    step(scheduler)
    assert scheduler.num_free_blocks == 8
    add(scheduler, "b", tokens(17), max_tokens=2)
    record = step(scheduler)
    assert record.chunk("b").num_cached_tokens == 16
    assert record.free_blocks == 3, "4 blocks found and 1 new one are held"
    add(scheduler, "c", tokens(17), max_tokens=1)
    assert step(scheduler).chunk("c").num_cached_tokens == 16, "the first hit did not evict what it found"


def test_b06_hits_count_against_the_free_blocks_at_admission():
    scheduler = make_scheduler(enable_prefix_caching=True, num_blocks=7)
    add(scheduler, "a", tokens(8), max_tokens=1)
    step(scheduler)
    add(scheduler, "holder", 12, max_tokens=4)
    step(scheduler)
    assert scheduler.num_free_blocks == 3
    add(scheduler, "b", tokens(16), max_tokens=1)  # 2 blocks found + 2 new = 4 of 3 free ones
    record = step(scheduler)
    assert str(record.not_scheduled["b"]) == "no free KV blocks: needs 4 more for 16 tokens, 2 free"


def test_b07_a_block_is_published_when_its_last_token_is_scheduled_not_when_it_is_sampled():
    """The KV of a token that was only just sampled does not exist yet."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    request = add(scheduler, "a", 7, max_tokens=4)
    records = [step(scheduler)]
    assert request.num_tokens == 8, "the second block is full of tokens, but not of KV"
    assert records[0].cached_block_ids == (1,)
    records.append(step(scheduler))
    assert records[1].cached_block_ids == (2,)


def test_b08_generated_blocks_serve_the_next_turn():
    """A prefix cache that is silently never filled passes every other test."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    first = add(scheduler, "turn 1", 10, max_tokens=11)
    run(scheduler)
    add(scheduler, "turn 2", [*first.token_ids, *tokens(5)], max_tokens=1)
    assert step(scheduler).chunk("turn 2").num_cached_tokens == 20


def test_b09_no_token_leaves_before_the_final_chunk_and_none_is_lost():
    scheduler = make_scheduler(max_num_batched_tokens=7)
    request = add(scheduler, "a", 20, max_tokens=3)
    records = run(scheduler)
    assert [record.chunks[0].sampled is not None for record in records] == [False, False, True, True, True]
    assert [record.chunks[0].sampled for record in records[2:]] == request.output_token_ids


def test_b09_tokens_for_chunks_that_sample_nothing_are_refused():
    scheduler = make_scheduler(max_num_batched_tokens=7)
    request = add(scheduler, "a", 20)
    batch = scheduler.schedule()
    with pytest.raises(ValueError, match="'a' samples nothing and takes no token, got 5"):
        scheduler.update(batch, [5]).to_record()
    assert request.num_output_tokens == 0
    assert scheduler.update(batch, [None]).to_record().chunks[0].sampled is None


def test_b10_unscheduling_a_victim_leaves_the_other_chunks_in_place():
    """A victim that leaves the middle of the batch must not shift or skip anybody."""
    scheduler = make_scheduler(policy="priority", num_blocks=10, max_num_batched_tokens=64)
    add(scheduler, "a", 11, priority=0, max_tokens=12)
    add(scheduler, "victim", 9, priority=9, max_tokens=12)
    add(scheduler, "b", 12, priority=1, max_tokens=12)
    records = run(scheduler)
    record = next(record for record in records if record.preempted)
    assert record.preempted == ("victim",) and record.running == ("a", "b")
    assert [chunk.request_id for chunk in record.chunks] == ["a", "b"]
    assert all(chunk.num_tokens == 1 for chunk in record.chunks)


def test_b10_the_tokens_of_an_unscheduled_victim_go_back_to_the_budget():
    scheduler = make_scheduler(policy="priority", num_blocks=7, max_num_batched_tokens=20)
    add(scheduler, "victim", 5, priority=9)
    step(scheduler)
    add(scheduler, "a", 7, priority=0)
    add(scheduler, "b", 5, priority=0)
    step(scheduler)
    scheduler.reconfigure(scheduler.config.replace(max_num_batched_tokens=2))
    assert sizes(step(scheduler)) == {"victim": 1, "a": 1}
    record = step(scheduler)
    assert record.preempted == ("victim",) and sizes(record) == {"a": 1, "b": 1}


def test_b11_sampled_tokens_are_one_per_chunk_with_gaps_kept():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    short, long = add(scheduler, "short", 3), add(scheduler, "long", 40)
    batch = scheduler.schedule()
    with pytest.raises(ValueError, match="sampled has 1 entries, the batch has 2 chunks"):
        scheduler.update(batch, [7]).to_record()
    scheduler.update(batch, [7, None]).to_record()
    assert short.output_token_ids == [7] and long.output_token_ids == []
    record = step(scheduler)
    assert [chunk.sampled for chunk in record.chunks] == [short.token_ids[-1], None]


def test_b12_a_step_without_tokens_still_reports_what_happened():
    """Queues that are drained by a step that produces nothing must be drained into its record."""
    scheduler = make_scheduler(num_blocks=5, as_vllm=True)
    add(scheduler, "big", 30)
    add(scheduler, "gone", 4)
    scheduler.abort_request("gone")
    first, second = step(scheduler), step(scheduler)
    assert first.chunks == () and first.arrived == ("big", "gone") and first.aborted == ("gone",)
    assert second.arrived == () and second.aborted == ()
    assert [event.kind for event in first.events] == ["arrive", "arrive", "abort"]


def test_b13_a_fully_cached_prompt_still_has_tokens_to_run():
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, "a", tokens(16), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", tokens(16), max_tokens=1)
    chunk = step(scheduler).chunk("b")
    assert (chunk.num_cached_tokens, chunk.num_tokens) == (12, 4)
    assert chunk.sampled is not None


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_b14_a_preempted_request_is_not_in_the_batch_of_that_step(policy):
    scheduler = make_scheduler(policy=policy, num_blocks=8, enable_prefix_caching=True)
    for index in range(4):
        add(scheduler, f"r{index}", 5, max_tokens=9, priority=3 - index)
    kv_cache, num_preempted = CheckedKVCache(4), 0
    while scheduler.has_unfinished_requests():
        batch = scheduler.schedule()
        kv_cache.forward(batch)
        assert not set(batch.preempted) & {chunk.request.request_id for chunk in batch.chunks}
        assert not set(batch.preempted) & set(batch.running)
        num_preempted += len(batch.preempted)
        scheduler.update(batch, sample(batch)).to_record()
    assert num_preempted > 0


def test_b15_decodes_go_on_while_a_long_prompt_is_prefilled():
    """Steps of prefill alone stop everybody's output for as long as the longest prompt takes."""
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=200)
    early = [add(scheduler, f"r{index}", 3, max_tokens=30) for index in range(3)]
    prefilled(scheduler, *early)
    long = add(scheduler, "long", 200)
    mixed: list[StepRecord] = []
    while long.is_prefill:
        mixed.append(step(scheduler))
    assert len(mixed) == 16  # ceil(200 / 13): the budget less three decodes
    for record in mixed:
        assert [sizes(record)[request.request_id] for request in early] == [1, 1, 1]
        assert record.num_decode_tokens == 3


def test_b20_chunks_use_the_budget_up_without_slivers_or_rounding():
    """Chunks floored to whole blocks leave a remainder that costs one more step each time."""
    scheduler = make_scheduler(max_num_batched_tokens=10, block_size=4)
    add(scheduler, "a", 25)
    add(scheduler, "b", 25)
    records = [step(scheduler) for _ in range(5)]
    assert [sizes(record) for record in records] == [
        {"a": 10},
        {"a": 10},
        {"a": 5, "b": 5},
        {"a": 1, "b": 9},
        {"a": 1, "b": 9},
    ]
    assert said(records[0]) == {"b": "token budget used up (10 of 10)"}


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 100])
@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 40])
def test_progression_of_a_prompt(budget, length):
    """Chunks are contiguous and add up to the prompt, nothing is sampled before, and the next step decodes."""
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    request = add(scheduler, "a", length, max_tokens=2)
    records = run(scheduler)
    chunks = [record.chunks[0] for record in records]
    assert [chunk.start for chunk in chunks] == [0, *[chunk.end for chunk in chunks[:-1]]]
    num_prefill = -(-length // budget)
    assert sum(chunk.num_tokens for chunk in chunks[:num_prefill]) == length
    assert [chunk.sampled is None for chunk in chunks] == [True] * (num_prefill - 1) + [False, False]
    final = "new_final" if num_prefill == 1 else "cached_final"
    assert [chunk.arm for chunk in chunks] == ["intermediate"] * (num_prefill - 1) + [final, "decode"]
    assert request.output_token_ids == [chunk.sampled for chunk in chunks[-2:]]


@pytest.mark.parametrize("preempt_at", range(1, 12))
def test_a_preemption_at_any_step_changes_no_token(preempt_at):
    """For any step, the output is the same as alone, and every position that is read has been written since."""
    config = make_scheduler(max_num_batched_tokens=5, enable_prefix_caching=preempt_at % 2 == 0).config
    scheduler = Scheduler(config, clock=lambda: 0.0)  # a preemption between steps is in no record
    kv_cache = CheckedKVCache(4)
    request, other = add(scheduler, "a", 18, max_tokens=9), add(scheduler, "b", 6, max_tokens=12)
    while scheduler.has_unfinished_requests():
        if scheduler.step == preempt_at and request.status == "running":
            scheduler._preempt(request)
        batch = scheduler.schedule()
        kv_cache.forward(batch)
        scheduler.update(batch, sample(batch)).to_record()
    alone = add(make_scheduler(), "a", 18)
    for _ in range(9):
        alone.token_ids.append(next_token(alone))
    assert request.token_ids == alone.token_ids
    assert request.num_preemptions == 1 and other.num_output_tokens == 12
