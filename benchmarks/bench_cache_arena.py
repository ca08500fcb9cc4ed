"""The cache arena: hits of every eviction policy as a share of Belady's, over pool sizes.

Generated sessions: agents that come back with everything said so far, readers of shared documents, one-time visitors.
Beside them Mooncake's conversation trace, if a copy is given (github.com/kvcache-ai/Mooncake, FAST25-release/traces).

    python benchmarks/bench_cache_arena.py [--mooncake conversation_trace.jsonl] [--requests 2000]
    python benchmarks/bench_cache_arena.py --ahead         # only the runs in which a policy is ahead of Belady's
    python benchmarks/bench_cache_arena.py --depths        # only the hits by depth in the prompt
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import RESULTS, save

from workbench import EngineConfig, simulate
from workbench.analysis.hit_rates import hit_rates
from workbench.config import EVICTIONS
from workbench.scheduler.fairness import Victim, VirtualTokenCounter, WeightedFairQueueing
from workbench.simulation.arrivals import Arrival, made_up_prompt, read_mooncake, timed_arrival
from workbench.simulation.at_scale import simulate_at_scale
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import simulate_requests
from workbench.trace.readings.fairness import jain_index, service

MODEL = CostModel(fixed=0.008, per_row=2e-5, per_sequence=5e-5)


def sessions(count: int, seed: int = 0) -> Iterator[Arrival]:
    """Requests of agents, readers and visitors, in blocks of 64 tokens, 4 a second on average."""
    rng = random.Random(seed)
    agents: list[list[int]] = []
    now, fresh = 0.0, 1000
    for index in range(count):
        now += rng.expovariate(4)
        kind = rng.random()
        if kind < 0.5 and agents and rng.random() < 0.9:  # an agent's next turn: all of it so far, and more
            blocks = agents[min(int(rng.expovariate(0.15)), len(agents) - 1)]
            more = rng.randint(1, 8)
            blocks += range(fresh, fresh + more)
            fresh += more
            agents.remove(blocks)
            if len(blocks) < 120:
                agents.insert(0, blocks)
        elif kind < 0.5:
            blocks = [*range(rng.randrange(4) * 10, rng.randrange(4) * 10 + 10), fresh]
            fresh += 1
            agents.insert(0, blocks)
        elif kind < 0.8:  # a reader of one of 60 documents, by popularity
            document = min(59, int(rng.paretovariate(0.9)) - 1)
            blocks = [*range(100 + 12 * document, 112 + 12 * document), fresh]
            fresh += 1
        else:  # a visitor
            length = rng.randint(5, 40)
            blocks = list(range(fresh, fresh + length))
            fresh += length
        yield timed_arrival(f"r{index}", made_up_prompt(index, 64 * len(blocks) + 20, blocks, 64), 16, now)


def league(name: str, make: Any, block_size: int, pools: list[int]) -> list[dict[str, Any]]:
    """A row for each pool size and policy."""
    rows: list[dict[str, Any]] = []
    for pool in pools:
        config = EngineConfig(
            block_size=block_size, num_blocks=pool, max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=200_000
        )
        found: dict[str, dict[str, Any]] = {}
        for word in EVICTIONS:
            started = time.process_time()
            summary = simulate_at_scale(config.replace(eviction=word), make(), MODEL)
            found[word] = {
                "workload": name,
                "pool": pool,
                "eviction": word,
                "hit_tokens": summary.num_cached_tokens,
                "ttft_mean": summary.ttft.distribution().mean,
                "recomputed_tokens": summary.num_recomputed_tokens,
                "cpu_seconds": time.process_time() - started,
            }
        for word, row in found.items():
            row["share_of_belady"] = row["hit_tokens"] / max(1, found["belady"]["hit_tokens"])
            print(
                f"{name:10s} {pool:6d} {word:10s} {row['share_of_belady']:6.1%} of Belady's hits, "
                f"TTFT mean {row['ttft_mean']:.3f} s, {row['cpu_seconds']:.1f} s",
                flush=True,
            )
        rows += found.values()
    return rows


def ahead(seeds: int = 20) -> dict[str, Any]:
    """Every run of 150 generated requests, many at a time, in which a policy finds more than Belady's."""
    cases, runs = [], 0
    for seed, pool in product(range(seeds), (250, 400)):
        config = EngineConfig(block_size=64, num_blocks=pool, max_num_batched_tokens=8192, max_num_seqs=64)
        found = {
            word: simulate_at_scale(config.replace(eviction=word), sessions(150, seed), MODEL).num_cached_tokens
            for word in EVICTIONS
        }
        runs += 1
        for word, tokens in found.items():
            if tokens > found["belady"]:
                cases.append({"seed": seed, "pool": pool, "eviction": word, "hits": tokens, "belady": found["belady"]})
                print(cases[-1], flush=True)
    print(f"{len(cases)} cases in {runs} workloads")
    return {"workloads": runs, "cases": cases}


def depths(count: int) -> list[dict[str, Any]]:
    """For each policy the hits in ranges of depths, in a pool that is short."""
    config = EngineConfig(
        block_size=64, num_blocks=800, max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=200_000
    )
    rows = []
    for word in EVICTIONS:
        trace = simulate_requests(config.replace(eviction=word), sessions(count), lambda _: 3, cost_model=MODEL)
        found = hit_rates([trace])
        rates = {str(start): rate.rate for start, rate in found.by_depth.items()}
        tokens = {str(start): rate.looked_up for start, rate in found.by_depth.items()}
        rows.append({"eviction": word, "all": found.total.rate, "by_depth": rates, "tokens": tokens})
        print(word, found, sep="\n", flush=True)
    return rows


def tiers(name: str, make: Any, config: EngineConfig, sizes: list[int]) -> list[dict[str, Any]]:
    """A second tier behind a pool: without one, then sizes in blocks behind links as fast as a bus and as a disk."""
    rows = []
    for size, bandwidth in [(0, 0.0), *((size, bandwidth) for size in sizes for bandwidth in (25e9, 2e9))]:
        tier = {"num_blocks": size, "kv_bytes_per_token": 131072, "bandwidth": bandwidth, "latency": 0.001}
        summary = simulate_at_scale(config.replace(second_tier=tier if size else None), make(), MODEL)
        ttft = summary.ttft.distribution()
        row = {"workload": name, "pool": config.num_blocks, "tier": size, "bandwidth": bandwidth}
        row |= {"hit_tokens": summary.num_cached_tokens, "loaded_tokens": summary.num_loaded_tokens}
        rows.append(row | {"ttft_mean": ttft.mean, "ttft_p99": ttft.p99})
        print(rows[-1], flush=True)
    return rows


def crowd(seed: int) -> dict[str, Any]:
    """Three tenants with as many requests: one sends all at once, the others steadily; the pool is small."""
    rng, requests = random.Random(seed), []
    for tenant, gap in (("a", 0.0), ("b", 0.15), ("c", 0.15)):
        for index in range(60):
            prompt, tokens = {"len": rng.randint(50, 800)}, rng.randint(20, 200)
            request = {"id": f"{tenant}{index}", "cache_salt": tenant, "prompt": prompt, "max_tokens": tokens}
            requests.append(request | {"arrival_time": index * gap})
    config = {"num_blocks": 300, "block_size": 16, "max_num_batched_tokens": 1024, "max_num_seqs": 16}
    return {"config": config, "requests": requests, "cost_model": MODEL.to_dict()}


def orders(seeds: int = 3) -> list[dict[str, Any]]:
    """Victims of preemptions by the tokens recomputed, and orders of tenants by Jain's index after 5 seconds."""
    policies: dict[str, Any] = {"vllm": lambda: None, "virtual_token_counter": VirtualTokenCounter}
    policies |= {"weighted_fair_queueing": WeightedFairQueueing}
    policies |= {f"victim: {rule}": partial(Victim, rule) for rule in Victim.RULES}
    rows = []
    for name, make in policies.items():
        traces = [simulate(crowd(seed), policy=make()) for seed in range(seeds)]
        found = [trace.metrics().summary for trace in traces]
        served = [service(trace, lambda info: info.request_id[0], until=5.0) for trace in traces]
        rows.append(
            {
                "policy": name,
                "preemptions": sum(one.num_preemptions for one in found),
                "recomputed_tokens": sum(
                    chunk.num_recomputed_tokens for trace in traces for step in trace for chunk in step.chunks
                ),
                "ttft_mean": fmean(one.ttft.mean or 0.0 for one in found),
                "duration": fmean(one.duration for one in found),
                "jain_index": fmean(jain_index(one.values()) for one in served),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    pools = [1000, 2000, 3000, 4500, 6500, 9000, 13000]
    parser.add_argument("--mooncake-pools", type=int, nargs="+", default=pools, metavar="BLOCKS")
    parser.add_argument("--ahead", action="store_true", help="measure only this, and keep the other results")
    parser.add_argument("--depths", action="store_true", help="measure only this, and keep the other results")
    options = parser.parse_args()
    if options.ahead or options.depths:
        kept = json.loads((RESULTS / "cache_arena.json").read_text())
        for name in ("benchmark", "machine"):
            kept.pop(name, None)
        save("cache_arena", kept | ({"ahead": ahead()} if options.ahead else {"depths": depths(options.requests)}))
        return
    rows = league("sessions", lambda: sessions(options.requests), 64, [400, 800, 1200, 1800, 2500])
    if options.mooncake:
        rows += league(
            "mooncake", lambda: islice(read_mooncake(options.mooncake), options.requests), 512, options.mooncake_pools
        )
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_model_len": 200_000}
    config = EngineConfig(block_size=64, num_blocks=800, **limits)
    behind = tiers("sessions", lambda: sessions(options.requests), config, [5000])
    if options.mooncake:
        config = EngineConfig(block_size=512, num_blocks=3000, **limits)
        behind += tiers(
            "mooncake", lambda: islice(read_mooncake(options.mooncake), options.requests), config, [9000, 100_000]
        )
    found = {"requests": options.requests, "rows": rows, "orders": orders(), "tiers": behind, "ahead": ahead()}
    found["depths"] = depths(options.requests)
    save("cache_arena", found)


if __name__ == "__main__":
    main()
