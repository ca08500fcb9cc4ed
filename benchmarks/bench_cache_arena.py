"""The cache arena: hits of every eviction policy as a share of Belady's, over pool sizes.

Generated sessions: agents that come back with everything said so far, readers of shared documents, one-time visitors.
Beside them Mooncake's conversation trace, if a copy is given (github.com/kvcache-ai/Mooncake, FAST25-release/traces).

    python benchmarks/bench_cache_arena.py [--mooncake conversation_trace.jsonl] [--requests 3000]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import save

from workbench import EngineConfig
from workbench.config import EVICTIONS
from workbench.costs.cost_model import CostModel
from workbench.simulation.arrivals import Arrival, made_up_prompt, read_mooncake, timed_arrival
from workbench.simulation.at_scale import simulate_at_scale

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    rows = league("sessions", lambda: sessions(options.requests), 64, [800, 1200, 1800, 2500])
    if options.mooncake:
        rows += league("mooncake", lambda: islice(read_mooncake(options.mooncake), options.requests), 512, [3000])
    save("cache_arena", {"requests": options.requests, "rows": rows})


if __name__ == "__main__":
    main()
