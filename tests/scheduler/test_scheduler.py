"""The scheduler's interface: records, reasons, limits, errors, looking ahead and changing course."""

import random

import pytest
from scheduler_helpers import add, make_scheduler, run, sample, sizes, step, tokens
from trace_checks import said

from workbench.config import SamplingParams
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason


def test_the_arms_of_a_step():
    scheduler = make_scheduler(max_num_batched_tokens=12)
    add(scheduler, "a", 4)
    add(scheduler, "b", 14)
    add(scheduler, "c", 2)
    first, second = step(scheduler), step(scheduler)
    assert [(chunk.request_id, chunk.arm, chunk.limited_by) for chunk in first.chunks] == [
        ("a", "new_final", "complete"),
        ("b", "intermediate", "token_budget"),
    ]
    assert [(chunk.request_id, chunk.arm) for chunk in second.chunks] == [
        ("a", "decode"),
        ("b", "cached_final"),
        ("c", "new_final"),
    ]


def test_running_requests_go_in_order_of_admission_and_may_take_the_whole_budget():
    """As in vLLM there is no decode-first: a prefill that was admitted earlier goes before later decodes."""
    scheduler = make_scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=6)
    add(scheduler, "long", 40)
    add(scheduler, "short", 2)
    assert sizes(step(scheduler)) == {"long": 6, "short": 2}
    scheduler.reconfigure(scheduler.config.replace(long_prefill_token_threshold=0))
    assert sizes(step(scheduler)) == {"long": 8}


def test_limits_of_a_chunk_are_named():
    scheduler = make_scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=6)
    add(scheduler, "a", 20)
    add(scheduler, "b", 20)
    record = step(scheduler)
    assert record.long_prefill_cap == 6 and record.token_budget == 10
    assert [(chunk.num_tokens, chunk.limited_by) for chunk in record.chunks] == [
        (6, "long_prefill_token_threshold"),
        (4, "token_budget"),
    ]


def test_a_prompt_that_max_model_len_cuts_stops_without_an_end():
    """An engine refuses such a prompt; vLLM's scheduler does as this one."""
    scheduler = make_scheduler(max_num_batched_tokens=6, max_model_len=10, as_vllm=True)
    add(scheduler, "a", 12)
    add(scheduler, "b", 4, max_tokens=2)
    records = [step(scheduler) for _ in range(4)]
    assert [sizes(record) for record in records] == [{"a": 6}, {"a": 3, "b": 3}, {"b": 1}, {"b": 1}]
    assert records[1].chunks[0].limited_by == "max_model_len"
    assert sizes(step(scheduler)) == {}, "a has nowhere to go, and nobody behind it was held up"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_num_seqs": 1}, "max_num_seqs reached (1)"),
        ({"max_num_active_seqs": 1}, "max_num_active_seqs reached (1)"),
        ({"max_num_batched_tokens": 8}, "token budget used up (8 of 8)"),
        ({"num_blocks": 4}, "no free KV blocks: needs 2 more for 6 tokens, 1 free"),
        (
            {"num_blocks": 6, "watermark": 0.4},
            "no free KV blocks: needs 2 more for 6 tokens, 3 free, 2 of them kept by the watermark",
        ),
    ],
)
def test_the_head_of_the_queue_gets_its_reason(fields, reason):
    scheduler = make_scheduler(**fields)
    add(scheduler, "a", 8)
    add(scheduler, "b", 6)
    assert said(step(scheduler)) == {"b": reason}


def test_those_behind_the_head_get_theirs():
    scheduler = make_scheduler(num_blocks=4)
    for request_id, length in (("a", 8), ("b", 6), ("c", 1)):
        add(scheduler, request_id, length)
    not_scheduled = step(scheduler).not_scheduled
    assert list(not_scheduled) == ["b", "c"]
    assert str(not_scheduled["c"]) == f"waiting behind b: {not_scheduled['b']}"
    assert not_scheduled["c"] == not_scheduled["b"].for_those_behind("b")


def test_preemption_gives_its_reasons_and_counts_the_waste():
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 8, max_tokens=6)
    b = add(scheduler, "b", 7, max_tokens=4)
    add(scheduler, "c", 1, max_tokens=1)
    records = run(scheduler)
    preemption = next(record for record in records if record.preempted)
    reason = Reason("kv_blocks", "num_blocks", 5, 1, 0, rule="last_admitted", requests=("a",))
    assert preemption.preempt_reasons == {"b": reason}
    assert str(reason) == "a needs 1 more KV block, 0 free; last admitted"
    assert said(preemption) == {
        "b": "preempted in this step: a needs 1 more KV block, 0 free; last admitted",
        "c": "nobody is admitted in a step that preempts b",
    }
    resume = next(record for record in records if record.resumed)
    assert b.num_preemptions == 1
    assert resume.chunk("b").num_recomputed_tokens == b.num_kv_lost == 7
    assert [event.kind for event in preemption.events] == ["preempt"]


@pytest.mark.parametrize("limits", [{}, {"max_num_partial_prefills": 2}, {"max_long_partial_prefills": 1}], ids=str)
def test_a_resumed_request_takes_a_seat_like_any_other(limits):
    """Its seat goes to a more urgent arrival. There are blocks for both."""
    fields = {"policy": "priority", "max_num_seqs": 2, "num_blocks": 13, "scheduler_reserve_full_isl": False}
    scheduler = make_scheduler(**fields, max_num_batched_tokens=12, **limits)
    add(scheduler, "first", 8, max_tokens=30)
    add(scheduler, "victim", 36, max_tokens=8, priority=1)
    while not (record := step(scheduler)).preempted:
        assert scheduler.step < 50
    assert record.preempted == ("victim",)
    add(scheduler, "urgent", 4, max_tokens=3)
    records = run(scheduler)
    assert records[0].admitted == ("urgent",) and all(len(record.running) <= 2 for record in records)
    assert records[0].not_scheduled["victim"].kind == "seats" and records[0].free_blocks > 0
    assert next(record.resumed for record in records if record.resumed) == ("victim",)


def test_a_resumed_request_begins_a_new_block_table_and_old_records_keep_theirs():
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 8, max_tokens=4)
    add(scheduler, "b", 7, max_tokens=4)
    before = step(scheduler)
    tables = before.block_tables
    assert tables == {"a": [1, 2], "b": [3, 4]}
    records = run(scheduler)
    resume = next(record for record in records if record.resumed)
    assert resume.block_tables["b"] == list(resume.chunk("b").new_block_ids) == [4, 2]
    assert before.block_tables == tables


def test_records_share_the_queues_while_these_do_not_change():
    """A step of pure decodes copies neither the running nor the waiting list."""
    scheduler = make_scheduler(max_num_seqs=2)
    for index in range(5):
        add(scheduler, f"r{index}", 3, max_tokens=9)
    step(scheduler)
    first, second = step(scheduler), step(scheduler)
    assert first.running is second.running and first.waiting is second.waiting


def test_stop_tokens_and_the_callers_reasons_end_a_request():
    scheduler = make_scheduler()
    for request_id, sampling in (
        ("stop_token", SamplingParams(stop_token_ids=[99])),
        ("eos", SamplingParams()),
        ("ignores_eos", SamplingParams(ignore_eos=True)),
        ("length", SamplingParams(max_tokens=1)),
        ("stop_before_length", SamplingParams(max_tokens=1, stop_token_ids=[99])),
        ("stop_string", SamplingParams()),
        ("error", SamplingParams()),
    ):
        scheduler.add_request(Request(request_id, tokens(3), sampling, eos_token_ids={2}))
    batch = scheduler.schedule()
    record = scheduler.update(
        batch,
        [99, 2, 2, 5, 99, 6, 7],
        finish={"stop_string": "stop", "error": "error"},
    ).to_record(timings={"forward": 0.5})
    assert record.finish_reasons == {
        "stop_token": "stop",
        "eos": "stop",
        "length": "length",
        "stop_before_length": "stop",
        "stop_string": "stop",
        "error": "error",
    }
    assert record.finished == tuple(record.finish_reasons)
    assert [chunk.sampled for chunk in record.chunks] == [99, 2, 2, 5, 99, 6, None]
    assert record.timings == {"forward": 0.5}
    assert list(scheduler.requests) == ["ignores_eos"]
    assert batch.chunks[-1].request.output_token_ids == []


def test_max_model_len_ends_a_request():
    scheduler = make_scheduler(max_model_len=6)
    request = add(scheduler, "a", 4, max_tokens=10)
    assert run(scheduler)[-1].finish_reasons == {"a": "length"}
    assert request.num_tokens == 6


def test_blocks_of_a_finished_request_are_free_in_the_next_step_only():
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 16, max_tokens=1)
    add(scheduler, "b", 16, max_tokens=1)
    first, second = step(scheduler), step(scheduler)
    assert (first.free_blocks, first.free_blocks_end) == (0, 4)
    assert sizes(first) == {"a": 16} and sizes(second) == {"b": 16}


def test_abort_anywhere():
    scheduler = make_scheduler(max_num_seqs=1)
    a, b = add(scheduler, "a", 9), add(scheduler, "b", 9)
    step(scheduler)
    assert scheduler.abort_request("b") and scheduler.abort_request("a")
    assert not scheduler.abort_request("a") and not scheduler.abort_request("nobody")
    assert (a.finish_reason, b.finish_reason) == ("abort", "abort")
    assert not scheduler.has_unfinished_requests() and scheduler.num_free_blocks == 64
    record = step(scheduler)
    assert record.aborted == ("b", "a") and record.finished == ()


def test_abort_while_the_step_is_under_way_drops_its_token():
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 9), add(scheduler, "b", 9)
    batch = scheduler.schedule()
    scheduler.abort_request("a")
    record = scheduler.update(batch, [5, 6]).to_record()
    assert [chunk.sampled for chunk in record.chunks] == [None, 6]
    assert (a.output_token_ids, b.output_token_ids) == ([], [6])
    assert record.block_tables["a"] == [1, 2, 3]
    assert step(scheduler).aborted == ("a",)


def test_fail_ends_the_requests_of_the_batch_and_only_those():
    scheduler = make_scheduler(max_num_batched_tokens=10, enable_prefix_caching=True)
    add(scheduler, "a", 8, max_tokens=3)
    step(scheduler)
    add(scheduler, "b", 9, max_tokens=3)
    add(scheduler, "c", 9, max_tokens=3)
    batch = scheduler.schedule()
    record = scheduler.fail(batch).to_record()
    assert record.finish_reasons == {"a": "error", "b": "error"}
    assert all(chunk.sampled is None for chunk in record.chunks)
    assert record.free_blocks_end == 64
    assert list(scheduler.requests) == ["c"]
    assert run(scheduler)[-1].finish_reasons == {"c": "length"}
    add(scheduler, "again", tokens(8, "a") + tokens(2), max_tokens=1)
    assert step(scheduler).chunk("again").num_cached_tokens == 0, "a failed request's blocks are not to be trusted"


def test_blocks_that_a_failed_step_cached_for_an_aborted_request_are_evicted():
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, "a", 8, max_tokens=3)
    batch = scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.fail(batch)
    add(scheduler, "again", tokens(8, "a") + tokens(2), max_tokens=1)
    assert step(scheduler).chunk("again").num_cached_tokens == 0, "the forward pass never wrote those keys and values"


def test_one_step_is_in_flight_at_a_time():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    batch = scheduler.schedule()
    with pytest.raises(RuntimeError, match=r"step 0 is not complete: call update\(\) or fail\(\) before schedule\(\)"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="step 0 is not complete"):
        scheduler.peek_next_batch()
    scheduler.update(batch, sample(batch))
    for again in (scheduler.fail, lambda batch: scheduler.update(batch, [1])):
        with pytest.raises(ValueError, match="batch of step 0 is not in flight"):
            again(batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampled": []}, "sampled has 0 entries, the batch has 1 chunks"),
        ({"sampled": [None]}, "the chunk of request 'a' samples and needs a token, got None"),
        ({"sampled": [[7, 8]]}, "the chunk of request 'a' has 0 drafts and gives 1 token, got 2"),
        ({"sampled": [[]]}, "the chunk of request 'a' has 0 drafts and gives 1 token, got 0"),
        ({"sampled": [1], "finish": {"b": "stop"}}, r"finish names \['b'\], which are not in the batch"),
    ],
)
def test_update_refuses_what_does_not_fit_and_changes_nothing(arguments, message):
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    batch = scheduler.schedule()
    with pytest.raises(ValueError, match=message):
        scheduler.update(batch, **arguments).to_record()
    assert request.num_output_tokens == 0
    assert scheduler.update(batch, [1]).to_record().chunks[0].sampled == 1


def test_requests_that_cannot_be_queued():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        add(scheduler, "a", 3)
    with pytest.raises(ValueError, match="request 'b' has an empty prompt"):
        add(scheduler, "b", [])
    assert list(scheduler.requests) == ["a"] and scheduler.num_waiting == 1


def test_peek_changes_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=10, num_blocks=9, enable_prefix_caching=True)
    add(scheduler, "a", tokens(12), max_tokens=9)
    add(scheduler, "b", tokens(12), max_tokens=9)
    seen = []
    while scheduler.has_unfinished_requests():
        pool = scheduler.kv_cache.block_pool
        before = (pool.free_queue, pool.cached_blocks, pool._blocks_of, [r.block_table[:] for r in scheduler.running])
        peeked = scheduler.peek_next_batch()
        after = (pool.free_queue, pool.cached_blocks, pool._blocks_of, [r.block_table[:] for r in scheduler.running])
        assert before == after and peeked == scheduler.peek_next_batch()
        record = step(scheduler)
        assert peeked == (any(not chunk.is_decode for chunk in record.chunks), record.num_tokens)
        seen.append(peeked)
    assert (True, 10) in seen and (False, 2) in seen


def test_peek_does_not_count_tokens_that_the_prefix_cache_has():
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, "first", tokens(12), max_tokens=1)
    run(scheduler)
    add(scheduler, "again", tokens(12) + tokens(3, "more"), max_tokens=1)
    assert scheduler.peek_next_batch() == (True, 3)
    assert sizes(step(scheduler)) == {"again": 3}


def test_peek_of_an_idle_scheduler():
    assert make_scheduler().peek_next_batch() == (False, 0)


def test_reconfigure_keeps_progress_and_changes_the_rules():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "late", 12, priority=5)
    add(scheduler, "low", 3, priority=9)
    add(scheduler, "high", 3, priority=1)
    assert sizes(step(scheduler)) == {"late": 4}
    scheduler.reconfigure(scheduler.config.replace(policy="priority", max_num_batched_tokens=11))
    assert sizes(step(scheduler)) == {"late": 8, "high": 3}
    with pytest.raises(ValueError, match="num_blocks cannot change from 65 to 66 while the KV cache is in use"):
        scheduler.reconfigure(scheduler.config.replace(num_blocks=66))


def test_priority_decides_who_is_admitted():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    add(scheduler, "low", 3, priority=5, max_tokens=1)
    add(scheduler, "first", 3, priority=1, max_tokens=1, arrival_time=1.0)
    add(scheduler, "second", 3, priority=1, max_tokens=1, arrival_time=2.0)
    assert [record.running for record in run(scheduler)] == [("first",), ("second",), ("low",)]


def test_a_request_describes_itself():
    sampling = SamplingParams(max_tokens=5, temperature=0.5)
    request = Request("a", [1, 2, 3], sampling, priority=2, arrival_time=0.25, arrival_step=7)
    info = request.info("text")
    assert (info.request_id, info.prompt_token_ids, info.prompt, info.max_tokens) == ("a", (1, 2, 3), "text", 5)
    assert (info.priority, info.arrival_time, info.arrival_step) == (2, 0.25, 7)
    assert info.sampling == {"max_tokens": 5, "temperature": 0.5}
    assert repr(request) == "Request('a', waiting, 3 prompt + 0 output tokens, num_kv_computed=0)"


def test_what_a_second_preemption_interrupts_counts_as_computed_before():
    """A request that is preempted while it recomputes has lost all that it ever had, not only what it had again."""
    num_again = 0
    for seed in range(40):
        rng = random.Random(seed)
        fields = {"num_blocks": rng.randint(8, 12), "max_num_batched_tokens": rng.randint(4, 8)}
        scheduler = make_scheduler(**fields, scheduler_reserve_full_isl=False, enable_prefix_caching=False)
        for name in "abcde":
            add(scheduler, name, rng.randint(2, 12), max_tokens=rng.randint(4, 14))
        computed, lost = dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 0)
        for record in run(scheduler):
            for name in record.preempted:
                num_again += 0 < computed[name] < lost[name]
                lost[name], computed[name] = max(lost[name], computed[name]), 0
            for chunk in record.chunks:
                end = chunk.start + chunk.num_tokens
                assert chunk.num_recomputed_tokens == max(0, min(end, lost[chunk.request_id]) - chunk.start)
                computed[chunk.request_id] = end
    assert num_again > 5
