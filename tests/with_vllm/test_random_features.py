"""Asynchronous steps, speculation and KV cache groups against vLLM's own scheduler, on random workloads."""

import importlib.util
import os
import random

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from feature_workloads import KINDS, random_workload
from vllm_features import NAMES, as_vllm, read
from vllm_oracle import run_vllm

from workbench import simulate

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_FEATURE_WORKLOADS", "300"))
"""Random workloads of each kind."""


def assert_equal(workload, steps) -> None:
    try:
        trace = simulate(workload, as_vllm=True, max_steps=400)
    except RuntimeError:  # an assertion ends vLLM, too; before it the two are the same
        trace = simulate(workload, max_steps=400)
    asynchronous = bool(workload["config"].get("async_scheduling"))
    for record, before, expected in zip(trace, [None, *trace], steps):
        found = as_vllm(record, before, asynchronous)
        assert {key: found[key] for key in expected if key != "sampling"} == {
            key: value for key, value in expected.items() if key != "sampling"
        }, f"step {record.step} of {workload}"


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_gives_the_recordings(name):
    recording = read(name)
    steps, end = run_vllm(recording["workload"])
    assert end == recording["end"]["end"] and len(steps) == len(recording["steps"])
    for step, expected in zip(steps, recording["steps"]):
        assert {key: step[key] for key in expected if key != "taken_back"} == {
            key: value for key, value in expected.items() if key != "taken_back"
        }


@pytest.mark.parametrize("salts", [("",), ("", "", "a", "b")], ids=["", "salted"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_workloads_equal_vllm(kind, salts):
    num_compared = 0
    for index in range(NUM_WORKLOADS):
        workload = random_workload(kind, random.Random(f"with vllm:{kind}:{index}"))
        draw = random.Random(f"salts:{kind}:{index}")
        for request in workload["requests"]:
            request["cache_salt"] = draw.choice(salts)
        steps, end = run_vllm(workload, 400)
        if end == "assertion":  # docs/limits.md: vLLM stops, and the output in flight is lost
            steps = steps[:-2]
        assert_equal(workload, steps)
        num_compared += len(steps)
    assert num_compared > 5 * NUM_WORKLOADS
