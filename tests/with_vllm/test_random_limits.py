"""``as_vllm=True`` against vLLM's own scheduler around the limits where requests wait forever, or the engine dies."""

import importlib.util
import os
import random

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from limit_workloads import limit_workload
from vllm_features import as_vllm
from vllm_oracle import run_vllm

from workbench import simulate

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_FEATURE_WORKLOADS", "300"))
OURS = ("enable_chunked_prefill", "max_num_partial_prefills")


def vllm_workload(seed: int) -> dict | None:
    """A workload around the limits that vLLM can run; None if vLLM does not have it."""
    workload = limit_workload(random.Random(f"limits:{seed}"))
    config = workload["config"]
    if any(name in config for name in OURS) or config["max_num_batched_tokens"] < config["max_num_seqs"]:
        return None
    if config["policy"] == "priority" and config["enable_prefix_caching"]:
        return None  # docs/limits.md: vLLM keeps hashes of a chunk that it takes back in the same step
    if any(request["prompt"]["len"] >= config["max_model_len"] for request in workload["requests"]):
        return None
    if config.get("kv_cache_groups") == [{"kind": "mamba"}] and not config["enable_prefix_caching"]:
        return None  # vLLM's block sizes have no common multiple then
    speculative = config.pop("speculative", {})
    if speculative:
        config["spec_method"] = speculative["method"]
        config["disable_lookahead_block_hashes"] = speculative.get("disable_lookahead_block_hashes", False)
    return workload


def test_waits_and_deaths_equal_vllm():
    ends = dict.fromkeys(("done", "stuck", "max_steps", "assertion"), 0)
    for seed in range(NUM_WORKLOADS):
        if (workload := vllm_workload(seed)) is None:
            continue
        steps, end = run_vllm(workload, 200)
        ends[end] += 1
        if end == "assertion":
            with pytest.raises(RuntimeError, match=r"assert num_new_tokens == 1 \+ self.num_spec_tokens"):
                simulate(workload, as_vllm=True, max_steps=200)
            continue
        trace = simulate(workload, as_vllm=True, max_steps=200)
        assert trace.end == end, workload
        asynchronous = bool(workload["config"].get("async_scheduling"))
        for record, before, expected in zip(trace, [None, *trace], steps):
            found = as_vllm(record, before, asynchronous)
            expected.pop("sampling")
            assert {key: found[key] for key in expected} == expected, f"step {record.step} of {workload}"
    assert ends["stuck"] > 0.05 * NUM_WORKLOADS and ends["done"] > 0.2 * NUM_WORKLOADS, ends
    print(ends)
