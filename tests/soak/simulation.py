"""Hours of traffic through the scheduler, every setting mixed: no block may be lost, no request may end twice.

Run: `python tests/soak/simulation.py`. Writes tests/soak/results/simulation.json and prints it; the exit status is 1 if
a check fails. Needs neither a model nor MLX.

Each run is 20,000 requests of random shape within a simulated hour, with a pool of another shape and another policy.
All settings that may change while blocks are in use change every few hundred steps; requests are aborted in every
state, also during their step; forward passes fail. The scheduler's consistency is checked again and again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from law_runs import assert_laws

from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.policies import Deadline, DecodeFirst, ShortestRemainingFirst
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.arrivals import poisson
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import StepRecord

HOUR = 3600.0
POOLS: tuple[tuple[int, int, SchedulingPolicy | None], ...] = (
    (16, 128, None),
    (1, 1500, None),
    (64, 40, None),
    (8, 200, ShortestRemainingFirst()),
    (16, 130, DecodeFirst()),
    (4, 500, Deadline()),
)
"""Block size, blocks and policy of each run."""

COST = CostModel(fixed=0.01, per_sequence=0.001, per_prefill_token=0.0005, per_kv_token=2e-7)
STEPS_PER_CONFIG = 300
STEPS_PER_CHECK = 101
MAX_IDLE_STEPS = 10


def draw_config(rng: random.Random, block_size: int, num_blocks: int) -> EngineConfig:
    """A configuration with every setting drawn; the pool's shape, which may not change, is given."""
    budget = rng.choice((16, 64, 256, 512, 2048))
    chunked = rng.random() < 0.8
    longest = min(1024, block_size * (num_blocks - 1))
    if not chunked:
        budget = max(budget, longest)
    seqs = rng.choice((1, 8, 32, 128))
    limits: dict[str, Any] = {}
    if chunked and rng.random() < 0.5:
        limits["max_num_partial_prefills"] = rng.choice((None, 1, 2, 4))
        limits["max_long_partial_prefills"] = rng.choice((None, 1))
    return EngineConfig(
        max_num_batched_tokens=budget,
        max_num_scheduled_tokens=rng.choice((None, budget)) if not chunked else rng.choice((None, max(8, budget // 2))),
        max_num_seqs=seqs,
        max_num_active_seqs=rng.choice((None, max(1, seqs // 2))),
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=longest,
        enable_prefix_caching=rng.random() < 0.8,
        policy=rng.choice(("fcfs", "priority")),
        watermark=rng.choice((0.0, 0.0, 0.05, 0.3)),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        long_prefill_token_threshold=rng.choice((0, 8, 100)) if chunked else 0,
        long_prefill_token_threshold_adaptive=rng.random() < 0.5,
        enable_chunked_prefill=chunked,
        **limits,
    )


def draw_requests(rng: random.Random, count: int, longest: int) -> Iterator[Request]:
    """Requests of random shape, arriving within an hour; a third begin with one of eight shared prefixes."""
    times = poisson(count / HOUR, rng)
    for index in range(count):
        length = min(longest - 1, max(1, round(rng.lognormvariate(3.5, 1.2))))
        shared = rng.randrange(8) if rng.random() < 0.33 else 100 + index
        prompt = [shared] * (length * 2 // 3) + [1000 + index] * (length - length * 2 // 3)
        sampling = SamplingParams(max_tokens=max(1, round(rng.lognormvariate(3.5, 1.0))), ignore_eos=True)
        yield Request(f"r{index}", prompt, sampling, priority=rng.randint(-2, 2), arrival_time=next(times))


class Run:
    """One pool under an hour of traffic."""

    def __init__(self, seed: int, pool: tuple[int, int, SchedulingPolicy | None], num_requests: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.shape = pool[:2]
        config = draw_config(self.rng, *self.shape)
        self.scheduler = Scheduler(config, clock=lambda: self.now, policy=pool[2])
        self.requests = draw_requests(self.rng, num_requests, config.max_model_len or 0)
        self.upcoming = next(self.requests, None)
        self.ended: Counter[str] = Counter()
        self.arrived: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def to_end(self) -> None:
        """Step until every request has ended, then check the scheduler's consistency."""
        num_idle = 0
        while self.upcoming is not None or self.scheduler.has_unfinished_requests():
            if self.scheduler.step % STEPS_PER_CONFIG == 0:
                self.scheduler.reconfigure(draw_config(self.rng, *self.shape))
                self.counts["configurations"] += 1
            self._arrive()
            record = self._step()
            self._note(record)
            num_idle = 0 if record.chunks or record.aborted or record.preempted else num_idle + 1
            if num_idle == MAX_IDLE_STEPS:
                self.problems.append(f"stuck at step {record.step} under {self.scheduler.config!r}")
                return
            if record.step % STEPS_PER_CHECK == 0:
                self._check_books(f"step {record.step}")
        self.counts["requests"] = len(self.arrived)
        self._check_end()

    def _arrive(self) -> None:
        if self.upcoming is not None and not self.scheduler.has_unfinished_requests():
            self.now = max(self.now, self.upcoming.arrival_time)
        while self.upcoming is not None and self.upcoming.arrival_time <= self.now:
            self.upcoming.arrival_step = self.scheduler.step
            self.arrived[self.upcoming.request_id] = self.upcoming
            self.scheduler.add_request(self.upcoming)
            self.upcoming = next(self.requests, None)

    def _step(self) -> StepRecord:
        scheduler = self.scheduler
        if self.rng.random() < 0.004:
            self._abort_one()
        expected = scheduler.peek_next_batch() if self.rng.random() < 0.02 else None
        batch = scheduler.schedule()
        if expected is not None and expected != (batch.has_prefill, batch.num_tokens):
            self.problems.append(f"step {batch.step}: peek_next_batch() said {expected}, it was {batch.num_tokens}")
        if self.rng.random() < 0.002:
            self._abort_one()  # during its step
        self.now += COST.step_seconds(batch.chunks) if batch.chunks else 0.0
        if batch.chunks and self.rng.random() < 0.001:
            self.counts["failed_steps"] += 1
            return scheduler.fail(batch).to_record()
        tokens = [self.rng.randrange(100) if chunk.samples else None for chunk in batch.chunks]
        return scheduler.update(batch, tokens).to_record()

    def _abort_one(self) -> None:
        if self.scheduler.requests:
            request_id = self.rng.choice(list(self.scheduler.requests))
            self.scheduler.abort_request(request_id)
            self.ended[request_id] += 1
            self.counts["aborted"] += 1

    def _note(self, record: StepRecord) -> None:
        self.ended.update(record.finished)
        self.counts["steps"] += 1
        self.counts["tokens"] += record.num_tokens
        self.counts["preemptions"] += len(record.preempted)
        self.counts["cached_tokens"] += sum(chunk.num_cached_tokens for chunk in record.chunks)

    def _check_books(self, when: str) -> None:
        try:
            assert_laws(self.scheduler)
        except AssertionError as problem:
            self.problems.append(f"{when}: {problem}")
        self.counts["integrity_checks"] += 1

    def _check_end(self) -> None:
        self._check_books("at the end")
        pool = self.scheduler.kv_cache.block_pool
        if pool.num_free_blocks != pool.num_blocks - 1:
            self.problems.append(f"{pool.num_free_blocks} of {pool.num_blocks - 1} blocks are free")
        if held := [block for block in range(pool.num_blocks) if pool.ref_count(block)]:
            self.problems.append(f"blocks {held[:10]} are still referred to")
        if wrong := [name for name in self.arrived if self.ended[name] != 1]:
            self.problems.append(f"{len(wrong)} requests did not end exactly once: {wrong[:10]}")
        if unfinished := [name for name, request in self.arrived.items() if request.status != "finished"]:
            self.problems.append(f"{len(unfinished)} requests are not finished: {unfinished[:10]}")
        if extra := self.ended.keys() - self.arrived.keys():
            self.problems.append(f"{sorted(extra)[:10]} ended and never arrived")

    def report(self, seconds: float) -> dict[str, Any]:
        """The result, ready for JSON."""
        return {
            "block_size": self.shape[0],
            "num_blocks": self.shape[1],
            "policy": repr(self.scheduler.policy) if self.scheduler.policy else "vLLM's rules",
            "simulated_seconds": round(self.now, 1),
            "seconds": round(seconds, 1),
            **dict(sorted(self.counts.items())),
            "problems": self.problems[:100],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="requests of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "simulation.json")
    options = parser.parse_args()
    runs = []
    for index, pool in enumerate(POOLS):
        run, start = Run(options.seed + index, pool, options.requests), time.perf_counter()
        run.to_end()
        runs.append(run.report(time.perf_counter() - start))
        print(json.dumps(runs[-1]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    return 1 if any(run["problems"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
