"""Every decision of the scheduler against recordings of vLLM 0.33.0's own: every field of every step."""

import json

import pytest
from vllm_traces import DATA, NAMES, as_vllm, read_trace

from workbench.simulation.simulate import simulate
from workbench.simulation.workload import read_workload


def test_there_are_recordings():
    assert len(NAMES) == 16


@pytest.mark.parametrize("name", NAMES)
def test_every_field_equals_vllm(name):
    compare(simulate(DATA / "workloads" / f"{name}.json", as_vllm=True), *read_trace(name))


@pytest.mark.parametrize("name", [name for name in NAMES if read_trace(name)[1]["end"] == "done"])
def test_what_vllm_finishes_is_the_same_without_as_vllm(name):
    compare(simulate(DATA / "workloads" / f"{name}.json"), *read_trace(name))


def compare(trace, expected, end):
    assert len(trace) == len(expected)
    for record, step in zip(trace, expected, strict=True):
        assert as_vllm(record) == step, f"step {record.step}"
        order = [chunk.request_id for chunk in record.chunks]
        assert list(step["scheduled"]) == list(step["block_ids"]) == order  # dict equality ignores order
    assert trace.end == end["end"]
    if trace.end == "done":
        outputs = {request_id: 0 for request_id in trace.requests}
        for record in trace:
            for chunk in record.chunks:
                outputs[chunk.request_id] += chunk.sampled is not None
        assert outputs == end["outputs"]


@pytest.mark.parametrize("name", NAMES)
def test_recordings_are_of_the_rules_that_are_implemented(name):
    meta = json.loads((DATA / "traces" / f"{name}.jsonl").open().readline())["meta"]
    config, _ = read_workload(DATA / "workloads" / f"{name}.json")
    assert meta["vllm"] == "0.33.0"
    assert meta["rejected_config"] == {}
    assert not meta["config"]["async_scheduling"]
    for field, value in config.to_dict().items():
        if field in meta["config"]:
            assert value == meta["config"][field], field


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("b2_mixed_thr16", {"long_prefill_token_threshold": 17}),
        ("d4_admission_full_isl", {"scheduler_reserve_full_isl": False}),
        ("d_preempt", {"num_blocks": 12}),
        ("d_preempt", {"watermark": 0.3}),
        ("e_shared_prefix", {"enable_prefix_caching": False}),
        ("f_max_num_seqs2", {"max_num_seqs": 3}),
    ],
)
def test_another_configuration_is_told_apart(name, change):
    """The comparison is able to fail: each of these settings shows in the recording."""
    expected, _ = read_trace(name)
    trace = simulate(DATA / "workloads" / f"{name}.json", config=change, as_vllm=True, max_steps=100)
    assert [as_vllm(record) for record in trace] != expected
