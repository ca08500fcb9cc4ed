"""Asynchronous steps, speculation and KV cache groups on random workloads."""

import os
import random

import pytest
from feature_workloads import KINDS, random_workload
from law_runs import checked_workload
from recorded_traces import assert_pool_fits

from workbench import Trace
from workbench.config import EngineConfig
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.simulation.simulate import simulate
from workbench.simulation.workload import made_up_token

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_FEATURE_WORKLOADS", "12"))
"""Random workloads of each kind."""


def workloads(kind, count=NUM_WORKLOADS, seed="properties"):
    return [random_workload(kind, random.Random(f"{seed}:{kind}:{index}")) for index in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_hold(kind):
    """After every step of the scheduler, and in the trace."""
    num_steps = 0
    for workload in workloads(kind):
        trace, broken = checked_workload(workload, max_steps=500)
        assert not broken and trace.check() == []
        assert trace.end != "done" or trace[-1].free_blocks_end == workload["config"]["num_blocks"] - 1
        num_steps += len(trace)
    assert num_steps > 5 * NUM_WORKLOADS


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
