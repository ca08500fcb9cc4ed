"""One group of full attention: the manager for several groups decides as the manager for one does."""

import random

import pytest
from scheduler_helpers import random_workload

from workbench.config import EngineConfig
from workbench.scheduler import kv_cache_manager
from workbench.scheduler.cache_groups import CacheGroups
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.simulation.simulate import simulate_requests
from workbench.simulation.workload import made_up_token


def run(config, arrivals):
    trace = simulate_requests(
        config, arrivals, lambda r: made_up_token(f"{r.request_id}:{r.num_tokens}"), max_steps=300
    )
    tables = [[record.block_table(index) for index in range(len(record.chunks))] for record in trace]
    return list(trace), tables, trace.end


@pytest.mark.parametrize("block", range(4))
def test_both_managers_give_the_same_records(block, monkeypatch):
    seen = {"hits": 0, "preempted": 0, "evicted": 0}
    for seed in range(40 * block, 40 * block + 40):
        config, arrivals = random_workload(random.Random(f"managers {seed}"))
        config = config.replace(eviction=["lru", "lfu"][seed % 2])
        one = run(config, arrivals)
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache_manager, "is_plain", lambda config: False)
            assert run(config, arrivals) == one, seed
        for record in one[0]:
            seen["hits"] += sum(chunk.num_cached_tokens for chunk in record.chunks)
            seen["preempted"] += len(record.preempted)
            seen["evicted"] += len(record.pool.evicted)
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, KVCacheManager),
        ({"kv_cache_groups": [{"kind": "full_attention"}]}, KVCacheManager),
        ({"max_num_partial_prefills": 2}, KVCacheManager),
        ({"async_scheduling": True}, CacheGroups),
        ({"num_speculative_tokens": 2}, CacheGroups),
        ({"kv_cache_groups": [{"kind": "mamba"}]}, CacheGroups),
        ({"kv_cache_groups": [{"kind": "full_attention"}, {"kind": "full_attention"}]}, CacheGroups),
    ],
)
def test_the_configuration_chooses_the_manager(changes, kind):
    manager = KVCacheManager(EngineConfig(**changes))
    assert type(manager) is kind is type(manager.copy())
