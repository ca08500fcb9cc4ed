"""The league of eviction policies of notebook 18, and the checker of its exercise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.apps.course.verdict import Verdict
from workbench.config import EngineConfig
from workbench.scheduler.eviction import Eviction
from workbench.simulation.arrivals import Arrival, made_up_prompt, timed_arrival
from workbench.simulation.at_scale import simulate_at_scale
from workbench.simulation.costs.cost_model import CostModel

BLOCK_SIZE = 16
COSTS = CostModel(fixed=0.008, per_row=2e-4, per_sequence=5e-5)


def arena_requests(count: int, seed: int = 0) -> Iterator[Arrival]:
    """Readers of 30 documents, some far more popular than others, and visitors who come once."""
    rng, now = random.Random(f"arena {seed}"), 0.0
    for index in range(count):
        now += rng.expovariate(20)
        if rng.random() < 0.6:
            document = min(29, int(rng.paretovariate(0.8)) - 1)
            blocks = [*range(100 * document, 100 * document + 8)]
        else:
            blocks = [10_000 + 20 * index + place for place in range(rng.randint(4, 16))]
        length = BLOCK_SIZE * len(blocks) + rng.randint(1, BLOCK_SIZE)
        yield timed_arrival(f"r{index}", made_up_prompt(index, length, blocks, BLOCK_SIZE), rng.randint(1, 12), now)


@dataclass(frozen=True)
class League:
    """The results of eviction policies.

    Attributes:
        hits: Prompt tokens found in the prefix cache, by policy.
        ttft: Mean time to first token in seconds, by policy.
        ceiling: The hits of Belady's rule, which knows the future.
    """

    hits: dict[str, int]
    ttft: dict[str, float]
    ceiling: int

    def __repr__(self) -> str:
        lines = [f"{'policy':>12}  hits of Belady's  mean TTFT"]
        for name in sorted(self.hits, key=self.hits.__getitem__, reverse=True):
            lines.append(f"{name:>12}  {self.hits[name] / self.ceiling:>16.1%}  {self.ttft[name] * 1000:>6.1f} ms")
        return "\n".join(lines)


def league(
    policies: Mapping[str, str | Eviction], *, num_blocks: int = 120, num_requests: int = 400, seed: int = 0
) -> League:
    """Run every policy on the same requests.

    Args:
        policies: A word of ``EngineConfig.eviction`` or an object, by the name to show.
        num_blocks: Size of the KV pool.
        num_requests: Number of requests.
        seed: Seed of the requests.
    """
    hits, ttft = {}, {}
    for name, eviction in {**policies, "belady": "belady"}.items():
        config = EngineConfig(
            block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_batched_tokens=512, max_num_seqs=4, eviction=eviction
        )
        summary = simulate_at_scale(config, arena_requests(num_requests, seed), COSTS)
        hits[name], ttft[name] = summary.num_cached_tokens, summary.ttft.distribution().mean or 0.0
    return League(hits, ttft, hits["belady"])


def check_eviction(answer: type[Eviction]) -> Verdict:
    """Notebook 18: ``answer`` is an eviction policy that finds more than LRU, with three seeds it has not seen."""
    for seed in (11, 12, 13):
        try:
            found = league({"lru": "lru", "yours": answer()}, seed=seed)
        except Exception as problem:
            return Verdict(False, f"it fails: {type(problem).__name__}: {problem}")
        share, lru = (found.hits[name] / found.ceiling for name in ("yours", "lru"))
        if share <= lru:
            return Verdict(False, f"with seed {seed} it finds {share:.1%} of Belady's hits, and LRU {lru:.1%}.")
    return Verdict(True, f"more than LRU with every seed; with the last {share:.1%} of Belady's hits, LRU {lru:.1%}.")
