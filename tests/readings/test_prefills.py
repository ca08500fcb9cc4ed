"""The prompts in progress that a record tells of equal those that the scheduler decided by."""

import random
from collections import Counter

import pytest
from feature_workloads import random_workload

from workbench import simulate
from workbench.scheduler import partial_prefills
from workbench.trace import Trace
from workbench.trace.readings.prefills import prefills


def made_up(seed: int) -> dict:
    """Prompts of which some share a beginning, in a pool that forces preemptions."""
    rng = random.Random(seed)
    budget = rng.choice([24, 48, 96])
    config = {
        "max_num_batched_tokens": budget,
        "max_num_scheduled_tokens": rng.choice([None, budget - 8]),
        "max_num_seqs": 6,
        "block_size": 4,
        "num_blocks": rng.choice([40, 70]),
        "max_num_partial_prefills": rng.choice([1, 2, 4]),
        "max_long_partial_prefills": 1,
        "long_prefill_token_threshold": rng.choice([0, 12, 40]),
    }
    common = [rng.randrange(100) for _ in range(40)]
    requests = []
    for index in range(14):
        prompt = common[: rng.choice([0, 17, 40])] + [rng.randrange(100) for _ in range(rng.randint(1, 70))]
        requests.append(
            {"id": f"r{index}", "prompt": prompt, "max_tokens": rng.randint(1, 25), "arrival_step": rng.randrange(12)}
        )
    return {"config": config, "requests": requests}


@pytest.mark.parametrize("seed", range(6))
def test_they_are_those_that_the_scheduler_counted(seed, monkeypatch):
    counted = set()

    class Watched(partial_prefills.PartialPrefills):
        def running_order(self, batch):
            order = super().running_order(batch)
            for request in self._in_progress:
                left = request.num_tokens - request.num_kv_computed
                counted.add((request.request_id, left, request in self._long))
            return order

        def admitted(self, plan, chunk):
            super().admitted(plan, chunk)
            counted.add((plan.request.request_id, plan.num_uncached, plan.request in self._long))

    monkeypatch.setattr(partial_prefills, "PartialPrefills", Watched)
    trace = simulate(made_up(seed))
    found = {(prefill.request_id, prefill.tokens_left, prefill.is_long) for step in prefills(trace) for prefill in step}
    assert {is_long for *_, is_long in found} == {True, False}
    assert found <= counted


def test_a_resumed_request_needs_its_output_again():
    workload = {
        "config": {"max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 9, "enable_prefix_caching": False},
        "requests": [{"id": name, "prompt": {"len": 12}, "max_tokens": 12} for name in "ab"],
    }
    trace = simulate(workload)
    (again,) = [
        prefill
        for step, found in zip(trace, prefills(trace), strict=True)
        for prefill in found
        if prefill.request_id in step.resumed
    ]
    before = next(step.step for step in trace if again.request_id in step.preempted)
    output = sum(
        len(chunk.accepted) for step in trace[:before] for chunk in step.chunks if chunk.request_id == again[0]
    )
    assert output > 0 and again.tokens_left == 12 + output


@pytest.mark.parametrize("kind", ["async", "async_spec", "spec_hybrid"])
def test_a_chunk_that_is_not_partial_computes_what_is_left(kind):
    """Also with outputs in flight, and where drafts fill up the rows of a short prompt."""
    seen = Counter()
    for index in range(25):
        trace = simulate(random_workload(kind, random.Random(f"prefills:{kind}:{index}")), as_vllm=True, max_steps=400)
        for step, found in zip(trace, prefills(trace), strict=True):
            chunks = {chunk.request_id: chunk for chunk in step.chunks}
            for request_id, left, num_tokens, _ in found:
                assert (num_tokens < left) == chunks[request_id].is_partial_prefill and num_tokens <= left
                seen["resumed"] += request_id in step.resumed
                seen["padded"] += bool(chunks[request_id].drafts)
    assert seen["resumed"] and bool(seen["padded"]) is ("spec" in kind)


def test_a_window_is_refused():
    trace = simulate({"config": {}, "requests": [{"id": "a", "prompt": {"len": 6}, "max_tokens": 4}]})
    window: Trace = trace[1:]
    with pytest.raises(ValueError, match="begins at step 1"):
        list(prefills(window))
