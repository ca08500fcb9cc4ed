"""A priority preemption that takes back a chunk of the same step: what stays in the prefix cache."""

import pytest
from taken_back_cases import FILLED_BY_A_STEP_IN_FLIGHT, prompt

from workbench import simulate


# The hits are those of vLLM 0.33.0 (tests/with_vllm/test_chunks_taken_back.py drives it).
@pytest.mark.parametrize("config, requests, hits", FILLED_BY_A_STEP_IN_FLIGHT)
def test_a_block_that_an_earlier_step_computes_stays_findable(config, requests, hits):
    """Its last token became known while this step was scheduled, so it was published with the chunk that was taken
    back, whose tokens are behind it."""
    common = {"enable_prefix_caching": True, "policy": "priority", "async_scheduling": True}
    trace = simulate({"config": {**common, **config}, "requests": requests}, as_vllm=True)
    steps = [step for step in trace if step.unscheduled_block_ids]
    assert steps and not any(step.withdrawn_block_ids for step in steps)
    found = {c.request_id: c.num_cached_tokens for step in trace for c in step.chunks if c.request_id in step.resumed}
    assert found == hits


@pytest.mark.parametrize("length, cap, num_blocks, withdrawn, found", [(14, 8, 13, [3], 8), (11, 5, 12, [1, 3], 4)])
def test_a_block_of_the_chunk_itself_is_withdrawn(length, cap, num_blocks, withdrawn, found):
    """VLLM keeps it, and a request that resumes reads KV that nobody computed; a chunk may begin within a block."""
    config = {"enable_prefix_caching": True, "policy": "priority", "long_prefill_token_threshold": cap}
    config |= {"block_size": 2, "num_blocks": num_blocks, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    requests = [
        {"id": "r0", "arrival_time": 4, "prompt": prompt(length, "u0"), "max_tokens": 2},
        {"id": "r2", "max_tokens": 8, "arrival_time": 4, "prompt": prompt(2, "u2")},
        {"id": "r4", "prompt": prompt(3, "u4"), "max_tokens": 8},
        {"id": "r5", "max_tokens": 6, "prompt": prompt(1, "u5"), "arrival_step": 1},
    ]
    trace = simulate({"config": config, "requests": requests}, as_vllm=True)
    steps = [step for step in trace if step.withdrawn_block_ids]
    assert all(step.preempted == ("r0",) for step in steps)
    assert [len(step.withdrawn_block_ids) for step in steps] == withdrawn
    hits = [c.num_cached_tokens for each in trace for c in each.chunks if c.request_id in each.resumed]
    assert hits == [0, 0, found]  # vLLM 0.33.0 finds 14 tokens of the first prompt
