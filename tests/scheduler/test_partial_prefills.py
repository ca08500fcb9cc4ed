"""Concurrent partial prefills: who progresses, who is passed over and for how long, and that no token is left lying."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import CheckedKVCache, add, make_scheduler, random_workload, run, sample, sizes, step, tokens
from tiers import examples
from trace_checks import said

from workbench import EngineConfig, simulate
from workbench.scheduler.partial_prefills import OVERTAKING_SHARE
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.simulate import simulate_requests
from workbench.simulation.workload import made_up_token
from workbench.trace import StepRecord, Trace

BUDGET = 256


def starving(**limits: int) -> Trace:
    """Four long prompts and a short one behind them: an eighth of 4 x 100,000 tokens and a budget of 2048."""
    config = {"max_num_batched_tokens": BUDGET, "block_size": 64, "num_blocks": 1000, "enable_prefix_caching": False}
    requests = [{"id": f"L{i}", "prompt": {"len": 12_500}, "max_tokens": 4} for i in range(4)]
    requests += [{"id": "short", "prompt": {"len": 5}, "max_tokens": 4}]
    return simulate({"config": config | {"long_prefill_token_threshold": 64} | limits, "requests": requests})


def first_token_steps(trace: Trace) -> dict[str, int]:
    return {request_id: request.token_steps[0] for request_id, request in trace.metrics().requests.items()}


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills must be from 1 to 512 .*, got 0"),
        ({"max_num_partial_prefills": 513}, "max_num_partial_prefills must be from 1 to 512 .*at least one.*, got 513"),
        ({"max_num_partial_prefills": 4, "max_num_scheduled_tokens": 3}, "max_num_partial_prefills .* 1 to 3 .*got 4"),
        ({"max_num_partial_prefills": 2.0}, "max_num_partial_prefills must be an integer from 1 to 512"),
        ({"max_long_partial_prefills": 0}, "max_long_partial_prefills must be from 1"),
        (
            {"max_num_partial_prefills": 2, "max_long_partial_prefills": 3},
            "max_long_partial_prefills must be from 1 to 2 .max_num_partial_prefills.*, got 3",
        ),
        (
            {"max_num_partial_prefills": 2, "enable_chunked_prefill": False},
            "max_num_partial_prefills=2 does not work with enable_chunked_prefill=False.*at most 1",
        ),
        (
            {"long_prefill_token_threshold": 9, "enable_chunked_prefill": False},
            "long_prefill_token_threshold=9 does not work with enable_chunked_prefill=False",
        ),
        ({"max_model_len": 513, "enable_chunked_prefill": False}, "max_model_len=513 is over the token budget of 512"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill must be True or False, got 1"),
        (
            {"max_model_len": 100, "long_prefill_token_threshold": 101, "max_num_partial_prefills": 2},
            "long_prefill_token_threshold must be from 0 to 100, got 101",
        ),
    ],
)
def test_invalid_combinations_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_valid_combinations():
    EngineConfig(max_num_partial_prefills=1, enable_chunked_prefill=False)
    EngineConfig(max_long_partial_prefills=3)
    config = EngineConfig(max_num_partial_prefills=512, max_long_partial_prefills=512)
    assert EngineConfig.from_dict(config.to_dict()) == config


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_into_a_step():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    add(scheduler, "a", 50)
    add(scheduler, "b", 20)
    first, second = step(scheduler), step(scheduler)
    assert sizes(first) == {"a": 50} and sizes(second) == {"a": 1, "b": 20}
    assert said(first) == {"b": "20 tokens in one step, 14 of the token budget left"}


# -- the starving case ------------------------------------------------------------------------------------------------


def test_starving_case_without_limits():
    assert set(first_token_steps(starving()).values()) == {195}


def test_starving_case_with_one_long_prompt_at_a_time():
    trace = starving(max_num_partial_prefills=2, max_long_partial_prefills=1)
    steps = first_token_steps(trace)
    assert steps.pop("short") == 0
    assert list(steps.values()) == pytest.approx([49, 98, 147, 196], abs=2)
    until_last = trace[: max(steps.values())]
    assert all(record.num_tokens == BUDGET for record in until_last), "budget was left lying"


def test_starving_case_with_two_long_prompts_at_a_time():
    steps = first_token_steps(starving(max_num_partial_prefills=4, max_long_partial_prefills=2))
    assert steps.pop("short") <= 1
    assert list(steps.values()) == pytest.approx([98, 98, 196, 196], abs=2)


def test_records_carry_the_reasons():
    trace = starving(max_num_partial_prefills=2, max_long_partial_prefills=1)
    assert said(trace[0]) == dict.fromkeys(
        ("L1", "L2", "L3"), "long prompt: max_long_partial_prefills (1) in progress, L0"
    )
    assert trace[0].chunks[0].limited_by == "token_budget"  # all that the short one left
    shared = starving(max_num_partial_prefills=4, max_long_partial_prefills=2)[0]
    assert [chunk.limited_by for chunk in shared.chunks] == ["partial_prefill_slot"] * 2 + ["complete"]
    assert {chunk.request_id: chunk.num_tokens for chunk in shared.chunks} == {"L0": 126, "L1": 125, "short": 5}


# -- shares and slots -------------------------------------------------------------------------------------------------


def test_the_budget_is_shared_out_evenly():
    scheduler = make_scheduler(max_num_partial_prefills=4, num_blocks=400)
    for name in "abcdef":
        add(scheduler, name, 200)
    record = step(scheduler)
    assert sizes(record) == dict.fromkeys("abcd", 16)
    assert record.not_scheduled["e"].kind == "token_budget"


def test_what_a_short_prompt_leaves_goes_to_the_others_in_the_same_step():
    scheduler = make_scheduler(max_num_partial_prefills=4, num_blocks=400)
    for name, length in (("a", 200), ("b", 3), ("c", 200), ("d", 7)):
        add(scheduler, name, length)
    assert sizes(step(scheduler)) == {"a": 27, "b": 3, "c": 27, "d": 7}


def test_a_prompt_that_fits_whole_is_admitted_beyond_the_slots_and_another_is_not():
    scheduler = make_scheduler(max_num_partial_prefills=2, max_long_partial_prefills=1, num_blocks=400)
    add(scheduler, "long", 200)
    for name, length in (("a", 10), ("b", 10), ("medium", 40), ("c", 2)):
        add(scheduler, name, length)
    record = step(scheduler)
    assert sizes(record) == {"long": 32, "a": 10, "b": 10, "medium": 12}
    assert record.chunk("medium").limited_by == "token_budget"


def test_slots_are_counted_by_prompts_that_stay_unfinished():
    scheduler = make_scheduler(max_num_partial_prefills=2, num_blocks=400, max_num_batched_tokens=40)
    for name in ("a", "b"):
        add(scheduler, name, 30)
    assert sizes(step(scheduler)) == {"a": 20, "b": 20}
    add(scheduler, "c", 30)
    assert sizes(step(scheduler)) == {"a": 10, "b": 10, "c": 20}


def test_a_prompt_in_progress_goes_on_although_decodes_fill_the_budget():
    config = make_scheduler(max_num_batched_tokens=4, max_num_partial_prefills=2).config
    scheduler = Scheduler(config, clock=lambda: 0.0)  # the laws know nothing of requests that begin half done
    add(scheduler, "p", 30, max_tokens=1)
    assert sizes(step(scheduler)) == {"p": 4}
    for index in range(5):
        request = add(scheduler, f"d{index}", 1, max_tokens=40)
        scheduler.queues.admit(request)
        scheduler.kv_cache.allocate_slots(request, 1)
        request.num_kv_computed, request.is_prefill = 1, False
        request.token_ids.append(5)
    while "p" in scheduler.requests:
        record = step(scheduler)
        assert sizes(record)["p"] == 1 and record.num_tokens == 4


def test_long_means_uncached():
    prompt = tokens(120, "shared")
    scheduler = make_scheduler(
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=50,
        num_blocks=400,
        enable_prefix_caching=True,
    )
    add(scheduler, "first", prompt, max_tokens=1)
    run(scheduler)
    add(scheduler, "long", 300)
    add(scheduler, "mostly cached", [*prompt, 9])
    add(scheduler, "uncached", tokens(121, "other"))
    record = step(scheduler)
    assert record.chunk("mostly cached").num_cached_tokens == 120
    assert set(record.not_scheduled) == {"uncached"}


def test_long_means_over_the_threshold():
    """The budget is larger: without the threshold no prompt here would be long."""
    fields = {"max_num_batched_tokens": 256, "num_blocks": 400, "long_prefill_token_threshold": 50}
    scheduler = make_scheduler(max_num_partial_prefills=4, max_long_partial_prefills=1, **fields)
    for name, length in (("long", 500), ("equal", 50), ("over", 51)):
        add(scheduler, name, length)
    record = step(scheduler)
    assert set(record.not_scheduled) == {"over"} and record.not_scheduled["over"].rule == "long_prompt"
    assert set(sizes(record)) == {"long", "equal"}


def test_a_long_prompt_is_short_near_its_end():
    scheduler = make_scheduler(
        max_num_partial_prefills=2, max_long_partial_prefills=1, long_prefill_token_threshold=50, num_blocks=400
    )
    add(scheduler, "a", 160)
    add(scheduler, "b", 160)
    assert sizes(step(scheduler)) == {"a": 64}
    assert sizes(step(scheduler)) == {"a": 64}
    assert sizes(step(scheduler)) == {"a": 32, "b": 32}


def test_the_limit_on_long_prompts_alone_leaves_the_order_to_the_queue():
    scheduler = make_scheduler(max_long_partial_prefills=1, long_prefill_token_threshold=20, num_blocks=400)
    for name, length in (("a", 90), ("b", 90), ("c", 10)):
        add(scheduler, name, length)
    assert sizes(step(scheduler)) == {"a": 64}
    assert sizes(step(scheduler)) == {"a": 26, "b": 38}  # a is through: the slot is free in the same step


# -- overtaking -------------------------------------------------------------------------------------------------------


def flood(num_steps: int) -> tuple[list[StepRecord], int]:
    """Two long prompts and, in every step, as many short ones as half the budget takes."""
    scheduler = make_scheduler(
        max_num_batched_tokens=100,
        max_num_seqs=200,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=50,
        num_blocks=4000,
    )
    records = []
    add(scheduler, "A", 2000, max_tokens=1)
    add(scheduler, "B", 2000, max_tokens=1)
    for index in range(num_steps):
        for number in range(5):
            add(scheduler, f"s{index}.{number}", 10, max_tokens=1)
        records.append(step(scheduler))
    return records, scheduler.num_waiting


def test_a_flood_of_short_prompts_puts_a_long_one_off_by_a_bounded_amount():
    records, _ = flood(100)
    through = next(
        i for i, record in enumerate(records) if any(c.request_id == "A" and c.sampled for c in record.chunks)
    )
    overtakers = sum(
        chunk.num_tokens for record in records[: through + 1] for chunk in record.chunks if chunk.request_id[0] == "s"
    )
    allowed = OVERTAKING_SHARE * 4000  # B's place: A's tokens and its own
    assert allowed - 10 <= overtakers <= allowed + 100  # and what A's last step leaves behind the admitted B
    admitted = next(i for i, record in enumerate(records) if "B" in record.admitted)
    assert through <= admitted <= through + 1, "B lost its place"


def test_without_the_bound_the_flood_goes_on(monkeypatch):
    """The control of the test above: the bound, and nothing else, is what holds."""
    monkeypatch.setattr("workbench.scheduler.partial_prefills.OVERTAKING_SHARE", 10.0)
    records, _ = flood(38)
    overtakers = sum(c.num_tokens for record in records for c in record.chunks if c.request_id[0] == "s")
    assert overtakers > 2 * OVERTAKING_SHARE * 4000


def test_records_say_that_nobody_may_overtake_any_more():
    records, _ = flood(12)
    last = records[-1]
    held = [reason for reason in last.not_scheduled.values() if reason.rule == "overtaken"]
    assert len(held) > 5 and "s11.0" in last.waiting and last.num_tokens == 100


def test_overtakers_of_one_step_are_counted_one_by_one():
    """B may be put off by 7% of 1440 tokens, which are 100: three prompts of 30 get past it, the fourth does not."""
    scheduler = make_scheduler(
        max_num_batched_tokens=100,
        max_num_seqs=50,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=50,
        num_blocks=400,
    )
    for name, length in (("A", 1000), ("B", 440), ("a", 30), ("b", 30), ("c", 30), ("d", 30)):
        add(scheduler, name, length, max_tokens=1)
    records = [step(scheduler) for _ in range(3)]
    assert [sizes(record) for record in records] == [
        {"A": 50, "a": 30, "b": 20},
        {"A": 60, "b": 10, "c": 30},
        {"A": 100},
    ]


# -- properties -------------------------------------------------------------------------------------------------------


def test_limits_so_wide_that_they_never_count_change_nothing_but_the_order():
    """N beyond any number of prompts and no long limit: tokens per step add up to the same as without limits."""
    rng = random.Random(7)
    for _ in range(40):
        config, arrivals = random_workload(rng)
        off = config.replace(long_prefill_token_threshold=0, policy="fcfs", max_model_len=None)
        one = off.replace(max_num_partial_prefills=1)
        traces = [
            simulate_requests(c, arrivals, lambda r: made_up_token(f"{r.request_id}:{r.num_tokens}"), max_steps=900)
            for c in (off, one)
        ]
        assert [trace.end for trace in traces] == ["done", "done"]
        texts = [
            {r: [c.sampled for s in t for c in s.chunks if c.request_id == r and c.sampled] for r in t.requests}
            for t in traces
        ]
        assert texts[0] == texts[1], "tokens depend on the schedule"


@st.composite
def limited_schedulers(draw) -> Scheduler:
    num = draw(st.sampled_from([None, 1, 2, 3, 5]))
    long = draw(st.sampled_from([1, 2] if num is None else [None, 1, 2]))  # without limits vLLM's cap leaves budget
    return make_scheduler(
        max_num_batched_tokens=draw(st.sampled_from([5, 8, 17, 40])),
        max_num_seqs=draw(st.integers(2, 10)),
        num_blocks=draw(st.sampled_from([40, 200])),
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_num_partial_prefills=num,
        max_long_partial_prefills=min(long, num) if long and num else long,
        long_prefill_token_threshold=draw(st.sampled_from([0, 4, 20])),
    )


def check_step(scheduler: Scheduler, record: StepRecord, in_progress: set[str], num_tokens: dict[str, int]) -> None:
    """Every prompt that held KV progressed, and budget is left only where nobody could have used it.

    Args:
        in_progress: Requests with part of their prompt computed before the step.
        num_tokens: Known tokens of each scheduled request when the step was scheduled.
    """
    config = scheduler.config
    if record.preempted:
        return
    partial = [chunk for chunk in record.chunks if chunk.is_partial_prefill]
    if config.max_num_partial_prefills is not None:
        stalled = in_progress - {chunk.request_id for chunk in record.chunks}
        assert not stalled, f"{stalled} hold KV blocks and stand still"
        assert len(partial) <= config.max_num_partial_prefills
    if config.max_long_partial_prefills is not None:
        threshold = config.long_prefill_token_threshold or config.token_budget
        long = [chunk for chunk in partial if num_tokens[chunk.request_id] - chunk.start > threshold]
        assert len(long) <= config.max_long_partial_prefills
    if record.num_tokens < config.token_budget:
        assert not partial or not record.free_blocks, f"{partial} could have used the rest of the budget"
        allowed = ("kv_blocks", "behind", "seats")
        assert all(reason.kind in allowed for reason in record.not_scheduled.values()), record.not_scheduled


@settings(max_examples=examples(150), deadline=None)
@given(
    scheduler=limited_schedulers(),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=14),
    every=st.integers(0, 3),
)
def test_work_conserving_and_nobody_stalls(scheduler, lengths, every):
    kv_cache = CheckedKVCache(scheduler.config.block_size)
    todo = list(enumerate(lengths))
    for _ in range(1500):
        for _ in range(every or len(todo)):
            if todo:
                index, (prompt, max_tokens, priority) = todo.pop()
                add(scheduler, f"r{index}", prompt, max_tokens, priority=priority)
        if not scheduler.has_unfinished_requests():
            break
        in_progress = {request.request_id for request in scheduler.running if request.is_prefill}
        expected = scheduler.peek_next_batch()
        batch = scheduler.schedule()
        assert expected == (batch.has_prefill, batch.num_tokens)
        kv_cache.forward(batch)
        num_tokens = {chunk.request.request_id: chunk.request.num_tokens for chunk in batch.chunks}
        check_step(scheduler, scheduler.update(batch, sample(batch)).to_record(), in_progress, num_tokens)
    assert not scheduler.has_unfinished_requests() and not todo, "a request starves"
