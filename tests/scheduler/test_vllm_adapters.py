"""Requests that wait for a slot of their adapter, against recordings of vLLM 0.33.0: every field of every step."""

from collections import Counter

import pytest
from feature_workloads import KINDS
from vllm_features import count_waits, differences, read_runs

from workbench import EngineConfig, simulate
from workbench.scheduler import kv_cache_manager
from workbench.scheduler.obstacles import AdapterSeats
from workbench.trace.readings.narrate import narrate

RUNS = read_runs("vllm-adapters")
ADAPTER_KINDS = [kind for kind in KINDS if kind.endswith("adapter")]


@pytest.mark.parametrize("kind", ADAPTER_KINDS)
def test_every_field_equals_vllm(kind):
    seen = Counter()
    runs = [run for run in RUNS if run["kind"] == kind]
    assert len(runs) >= 15
    for run in runs:
        found, trace = differences(run)
        assert not found, f"{found} of {run['workload']}"
        adapters = {request_id: info.adapter for request_id, info in trace.requests.items()}
        for record in trace:
            running = {adapters[request_id] for request_id in record.running} - {""}
            assert len(running) <= run["workload"]["config"]["max_loras"]
            waits = count_waits(record, "adapter", seen)
            assert all(adapters[request_id] not in running for request_id in waits)
        assert [broken for broken in trace.check() if not broken.exception] == []
    assert all(seen[what] for what in ("waits", "overtaken", "preempted", "hits"))
    assert bool(seen["drafts"]) is ("spec" in kind)


def test_the_comparison_finds_adapters_without_a_limit(monkeypatch):
    monkeypatch.setattr(AdapterSeats, "obstacle", lambda self, request: None)
    assert sum(bool(differences(run)[0]) for run in RUNS) > len(RUNS) // 4


def test_the_comparison_finds_a_prefix_that_is_shared_by_adapters(monkeypatch):
    whole = kv_cache_manager.extend_block_hashes
    monkeypatch.setattr(kv_cache_manager, "extend_block_hashes", lambda *given: whole(*given[:-1]))
    assert sum(bool(differences(run)[0]) for run in RUNS) >= 5


def test_the_reason_names_the_limit_and_those_whose_adapters_run():
    requests = [{"id": name, "prompt": {"len": 4}, "adapter": name, "max_tokens": 4} for name in ("a", "b", "c")]
    requests.append({"id": "plain", "prompt": {"len": 4}, "max_tokens": 4})
    trace = simulate({"config": {"max_loras": 2}, "requests": requests})
    reason = trace[0].not_scheduled["c"]
    assert (reason.kind, reason.limit, reason.value, reason.requests) == ("adapter", "max_loras", 2, ("a", "b"))
    assert str(reason) == "max_loras reached (2), and its adapter is not one of those of a, b"
    assert trace[0].admitted == ("a", "b", "plain")
    said = "c waits: max_loras reached (2), and its adapter is not one of those of a and b"
    assert said in narrate(trace[0]) and str(reason) in repr(trace[:2].why())


def test_without_a_limit_every_adapter_runs():
    requests = [{"id": name, "prompt": {"len": 4}, "adapter": name, "max_tokens": 4} for name in "abcd"]
    trace = simulate({"config": {}, "requests": requests})
    assert EngineConfig().max_loras == 0 and trace[0].admitted == ("a", "b", "c", "d")


@pytest.mark.parametrize(("field", "value"), [("max_loras", -1), ("max_loras", 2.5), ("max_lora_rank", 0)])
def test_a_limit_outside_its_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        EngineConfig(**{field: value})
