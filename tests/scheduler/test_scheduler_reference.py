"""The scheduler against a second, plain implementation of the same rules, on random workloads under pressure."""

import random

import pytest
from scheduler_helpers import random_workload
from scheduler_reference import ReferenceScheduler
from vllm_traces import DATA, NAMES, as_vllm, read_trace

from workbench.config import EngineConfig
from workbench.scheduler import kv_cache_manager
from workbench.scheduler.cache_groups import CacheGroups
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.arrivals import Arrival
from workbench.simulation.simulate import simulate_requests
from workbench.simulation.workload import made_up_token, read_workload


def check_against_reference(config: EngineConfig, arrivals: list[Arrival]) -> dict[str, int]:
    reference = ReferenceScheduler(config, arrivals)
    trace = simulate_requests(
        config, arrivals, lambda r: made_up_token(f"{r.request_id}:{r.num_tokens}"), max_steps=600
    )
    seen = {"preempted": 0, "hits": 0}
    for record in trace:
        assert as_vllm(record) == reference.step(), f"step {record.step} of {config}"
        seen["preempted"] += len(record.preempted)
        seen["hits"] += sum(chunk.num_cached_tokens for chunk in record.chunks)
    assert trace.end == "done" and not reference.has_unfinished()
    return seen


@pytest.fixture(params=["one table", "groups"])
def manager(request, monkeypatch):
    """The KV cache manager of one group, and that of several on one group."""
    if request.param == "groups":
        monkeypatch.setattr(kv_cache_manager, "is_plain", lambda config: False)
    kind = type(Scheduler(EngineConfig()).kv_cache)
    assert kind is (kv_cache_manager.KVCacheManager if request.param == "one table" else CacheGroups)


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("block", range(4))
def test_random_workloads_equal_the_reference(block, manager):
    rng = random.Random(block)
    totals = {"preempted": 0, "hits": 0}
    for _ in range(75):
        seen = check_against_reference(*random_workload(rng))
        totals = {name: totals[name] + seen[name] for name in totals}
    assert totals["preempted"] > 100 and totals["hits"] > 100, "the workloads do not reach what they are for"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("c")])
def test_the_reference_equals_vllm(name):
    config, arrivals = read_workload(DATA / "workloads" / f"{name}.json")
    expected, _ = read_trace(name)
    reference = ReferenceScheduler(config, arrivals)
    assert [reference.step() for _ in expected] == expected
