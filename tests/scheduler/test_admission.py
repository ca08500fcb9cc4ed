"""Accepted workloads run to their end, and no schedule exists for refused ones: random workloads around the limits."""

import os
import random
import re
from collections.abc import Iterator

import pytest
from limit_workloads import limit_workload
from tiers import examples

from workbench import EngineConfig, simulate
from workbench.scheduler.admission import check_servable, fewest_blocks
from workbench.simulation.simulate import next_token
from workbench.simulation.workload import read_workload

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_LIMIT_WORKLOADS", examples(300)))
"""Random workloads around the limits; WORKBENCH_LIMIT_SEED is the first seed."""
FIRST_SEED = int(os.environ.get("WORKBENCH_LIMIT_SEED", "0"))
MAX_STEPS = 3000
"""More steps than any of the workloads takes that ends."""


def workloads() -> Iterator[dict]:
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_WORKLOADS):
        yield limit_workload(random.Random(f"limits:{seed}"))


def schedule_exists(config: EngineConfig, num_prompt_tokens: int, num_output_tokens: int) -> bool:
    """By search: every chunk size in every step, and beginning again at any time, for a request that is alone.

    A state of the search is the number of known and of computed tokens. The blocks that a request needs are sets of
    (group, place): those that the rows of a chunk read and write.
    """
    budget = config.token_budget
    if config.num_speculative_tokens and config.speculation.method == "draft_model":
        budget = min(budget, config.max_num_batched_tokens - 1)
    longest = num_prompt_tokens + num_output_tokens
    if config.max_model_len is not None:
        longest = max(num_prompt_tokens + 1, min(longest, config.max_model_len))
    if not config.enable_chunked_prefill and num_prompt_tokens > budget:
        return False  # a prompt that fits into a step is split all the same if its blocks do not
    seen, todo = set(), [(num_prompt_tokens, 0)]
    while todo:
        known, computed = state = todo.pop()
        if known == longest:
            return True
        if state in seen:
            continue
        seen.add(state)
        todo.append((known, 0))
        for end in range(computed + 1, min(known, computed + budget) + 1):
            if len(places(config, computed, end)) < config.num_blocks:
                todo.append((known + (end == known), end))
    return False


def places(config: EngineConfig, start: int, end: int) -> set[tuple[int, int]]:
    found = set()
    for index, group in enumerate(config.cache_groups):
        size = group.block_size
        if group.kind == "mamba":
            found |= {(index, token // size) for token in (start - 1, end - 1) if token >= 0}
        else:
            first = max(0, start + 1 - group.sliding_window) if group.kind == "sliding_window" else 0
            found |= {(index, token // size) for token in range(first, end)}
    return found


def is_refused(config: EngineConfig, num_prompt_tokens: int, num_output_tokens: int) -> bool:
    try:
        check_servable(config, num_prompt_tokens, num_output_tokens)
    except ValueError:
        return True
    return False


def test_what_is_accepted_runs_to_its_end_and_what_is_refused_has_no_schedule():
    num_refused = 0
    for workload in workloads():
        config, arrivals = read_workload(workload)
        servable = True
        for arrival in arrivals:
            tokens = arrival.to_request()
            while tokens.num_output_tokens < arrival.sampling.max_tokens:
                tokens.token_ids.append(next_token(tokens))
                if tokens.token_ids[-1] in tokens.stop_token_ids:
                    break
            exists = schedule_exists(config, tokens.num_prompt_tokens, tokens.num_output_tokens)
            refused = is_refused(config, tokens.num_prompt_tokens, tokens.num_output_tokens)
            assert refused is not exists, (workload, arrival.request_id)
            servable &= exists or arrival.abort_step is not None
        if servable:
            trace = simulate(workload, max_steps=MAX_STEPS)
            assert trace.end == "done", workload
            ended = [request_id for step in trace for request_id in (*step.finished, *step.aborted)]
            assert sorted(ended) == sorted(trace.requests), workload
        else:
            num_refused += 1
            with pytest.raises(ValueError, match=r"is too small for request 'r\d'.*raise"):
                simulate(workload, max_steps=MAX_STEPS)
    assert 0.05 * NUM_WORKLOADS < num_refused < 0.5 * NUM_WORKLOADS


def test_what_vllm_finishes_is_the_same():
    """The rows of docs/limits.md change runs that wait forever; an abort may free a run that waited."""
    num_stuck = num_aborted = 0
    for workload in workloads():
        try:
            theirs = simulate(workload, as_vllm=True, max_steps=400)
        except RuntimeError as problem:
            assert "assert num_new_tokens == 1 + self.num_spec_tokens" in str(problem)
            num_stuck += 1
            continue
        if theirs.end != "done":
            num_stuck += 1
            continue
        ours = simulate(workload, max_steps=MAX_STEPS)  # nothing that vLLM finishes is refused
        if list(ours) != list(theirs):
            assert any("abort_step" in request for request in workload["requests"]), workload
            num_aborted += 1
    assert num_stuck > 0.1 * NUM_WORKLOADS and num_aborted < 0.02 * NUM_WORKLOADS


def test_a_state_within_reach_of_a_step_without_the_row_for_drafts_is_waited_for():
    """vLLM waits forever only for a state that needs that row too."""
    workload = limit_workload(random.Random("limits:9119"))
    assert workload["config"]["block_size"] == workload["config"]["max_num_batched_tokens"]
    assert list(simulate(workload)) == list(simulate(workload, as_vllm=True, max_steps=400))


def test_the_number_of_blocks_in_the_message_is_enough_and_one_less_is_not():
    rng = random.Random(5)
    num_checked = 0
    for workload in workloads():
        config, arrivals = read_workload(workload)
        arrival = rng.choice(arrivals)
        num_prompt, max_tokens = len(arrival.prompt_token_ids), arrival.sampling.max_tokens
        try:
            check_servable(config, num_prompt, max_tokens)
        except ValueError as problem:
            if (number := re.search(r"raise num_blocks to (\d+)", str(problem))) is None:
                continue
            enough = int(number[1])
            assert schedule_exists(config.replace(num_blocks=enough), num_prompt, max_tokens)
            assert enough == 2 or not schedule_exists(config.replace(num_blocks=enough - 1), num_prompt, max_tokens)
            num_checked += 1
    assert num_checked > 0.03 * NUM_WORKLOADS


@pytest.mark.parametrize(
    ("kind", "num_tokens", "blocks"),
    [
        ({"kind": "full_attention"}, 33, 9),
        ({"kind": "sliding_window", "sliding_window": 5}, 33, 2),
        ({"kind": "sliding_window", "sliding_window": 6}, 33, 3),
        ({"kind": "mamba"}, 33, 2),
        ({"kind": "mamba"}, 16, 1),  # one chunk, whose state is written and none is read
    ],
)
def test_the_fewest_blocks_of_a_group(kind, num_tokens, blocks):
    config = EngineConfig(block_size=4, max_num_batched_tokens=16, kv_cache_groups=[kind])
    assert fewest_blocks(config, num_tokens) == blocks


@pytest.mark.parametrize("window", range(2, 11))
def test_a_window_that_needs_one_block_more_than_there_are_is_refused(window):
    group = {"kind": "sliding_window", "sliding_window": window}
    config = EngineConfig(block_size=4, max_num_batched_tokens=16, kv_cache_groups=[group])
    fewest = fewest_blocks(config, 40)
    assert not is_refused(config.replace(num_blocks=fewest + 1), 40, 1)
    assert is_refused(config.replace(num_blocks=fewest), 40, 1)


def test_a_prompt_of_one_token_is_one_token():
    with pytest.raises(ValueError, match="for this request: 1 prompt token and max_tokens=99 need 25 blocks"):
        check_servable(EngineConfig(num_blocks=3, block_size=4), 1, 99)
