"""A recording of vLLM has the block tables of all KV cache groups, and its misses are those of a simulation."""

import importlib.util
import os
import random
from collections import Counter

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from feature_workloads import random_workload
from vllm_oracle import run_vllm

from workbench import Trace, simulate
from workbench.trace.recorders import vllm as integration

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_RECORDED_WORKLOADS", "12"))
"""Random workloads of each kind."""


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(tmp_path / "traces"))
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "1")


def recorded(workload, folder):
    """The steps of vLLM, and the recording of them."""
    os.environ["WORKBENCH_TRACE_DIR"] = str(folder)
    steps, end = run_vllm(workload, 400, integration.RecordingScheduler)
    (path,) = folder.iterdir()
    return steps, end, Trace.load(path)


@pytest.mark.parametrize("kind", ["window_only", "hybrid_window_prefix", "hybrid_mamba", "spec_hybrid"])
def test_tables_of_all_groups_and_misses(kind, tmp_path):
    reasons = Counter()
    for index in range(NUM_WORKLOADS):
        workload = random_workload(kind, random.Random(f"recorded:{kind}:{index}"))
        steps, end, trace = recorded(workload, tmp_path / f"{kind}{index}")
        assert not trace.problems
        assert [group.kind for group in trace.kv_cache_groups] == [
            group["kind"] for group in workload["config"]["kv_cache_groups"]
        ]
        expected = [step for step in steps if step["scheduled"]]
        found = [record for record in trace if record.chunks]
        assert len(found) >= len(expected) - 2
        for record, step in zip(found, expected):
            tables = {rid: list(map(list, groups)) for rid, groups in record.block_tables_by_group.items()}
            assert tables == step["block_ids"], (workload, step["step"])
            assert record.free_blocks == step["free_blocks"]
        if workload["config"]["enable_prefix_caching"] and end == "done":
            simulated = simulate(workload, max_steps=400)
            for request_id in trace.requests:
                mine = [miss_of(miss) for miss in trace.why_missed(request_id)]
                theirs = [miss_of(miss) for miss in simulated.why_missed(request_id)]
                assert mine == theirs, (workload, request_id)
                reasons.update(miss[-1] for miss in mine)
    assert sum(reasons.values()) > NUM_WORKLOADS


def miss_of(miss):
    return miss.group, miss.block, miss.found, miss.tokens, miss.looked_up, miss.reason
