"""RecordingScheduler in vLLM itself under asynchronous steps, drafts, prefix caching and preemptions."""

import importlib.util
import os
import random
from collections import Counter
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from feature_workloads import random_workload
from vllm_features import as_vllm
from vllm_oracle import run_vllm

from workbench.analysis.fork import recorded_config
from workbench.simulation.workload import read_workload
from workbench.trace import Trace
from workbench.trace.recorders.vllm import RecordingScheduler

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_RECORDED_WORKLOADS", "20"))
"""Random workloads of each kind."""

NOT_COMPARED = {"step", "processed", "sampling"}


def seen_by_a_recorder(steps, asynchronous):
    """The steps without those in which nothing arrives, ends or is scheduled; what they end belongs to the one before.

    A recorder leaves them out, because an engine that waits for something schedules again and again. It keeps the
    first one of an asynchronous engine, which takes in the output of the step before it.
    """
    seen, was_busy = [], False
    for step in steps:
        is_needed = asynchronous and was_busy
        was_busy = bool(step["scheduled"])
        if was_busy or is_needed or step["preempted"] or step["aborted"] or step["arrived"]:
            seen.append(step)
        elif seen:
            seen[-1]["finished"] += step["finished"]
            seen[-1]["free_blocks_end"] = step["free_blocks_end"]
    return seen


def tables(record):
    return record.block_tables_by_group, record.num_kv_computed, record.finished


@pytest.mark.parametrize("kind", ["async", "spec", "async_spec"])
def test_a_recording_is_what_the_scheduler_did(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "1")
    seen = Counter()
    for index in range(NUM_WORKLOADS):
        workload = random_workload(kind, random.Random(f"recorded:{kind}:{index}"))
        folder = tmp_path / f"{index}"
        monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(folder))
        steps, end = run_vllm(workload, 400, RecordingScheduler)
        (path,) = Path(folder).iterdir()
        trace = Trace.load(path)
        if end == "assertion":  # docs/limits.md: vLLM stops, and the output in flight is lost
            steps = steps[:-2]
        asynchronous = workload["config"]["async_scheduling"]
        # A fork and the reasons of misses depend on the proposer: EAGLE hashes blocks in another way.
        recorded, given = recorded_config(trace), read_workload(workload)[0]
        assert recorded.speculation.method == given.speculation.method
        if given.enable_prefix_caching:  # without it vLLM computes no hashes
            assert recorded.speculation == given.speculation
        seen_steps = seen_by_a_recorder(steps, asynchronous)
        assert end != "done" or len(trace) == len(seen_steps)
        for record, expected in zip(trace, seen_steps):
            found = as_vllm(record, None, asynchronous)
            for key in expected.keys() - NOT_COMPARED:
                assert found[key] == expected[key], f"{key} of step {expected['step']} of workload {index}"
            seen["drafts"] += len(expected["drafts"])
            seen["preempted"] += len(expected["preempted"])
            seen["hits"] += sum(expected["hits"].values())
        if end == "done" and given.policy == "fcfs":  # priorities also look at arrival times, which no clock gives here
            seen["forked"] += 1
            forked = trace.fork()
            assert [tables(record) for record in forked] == [tables(record) for record in trace], f"workload {index}"
        for place in range(len(trace)):
            for moment in ("scheduled", "end"):
                assert trace.pool_state(place, moment).consistent
    assert seen["forked"] and seen["preempted"] and seen["hits"] and (kind == "async" or seen["drafts"])
