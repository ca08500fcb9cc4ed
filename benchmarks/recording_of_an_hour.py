"""Write a recording like an hour of a vLLM server: 22,000 steps and 1,100 requests, without token ids.

    generate(1100).save("hour.jsonl.gz")     # benchmarks/bench_recordings.py does so

Poisson arrivals with bursts; four system prompts and sessions of several turns, so that prefixes are shared; a roofline
with noise and some stalls gives the durations. The scheduler is that of a simulation, whose schedules equal those of
vLLM. The file has no hashes of blocks, like recordings of version 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from msgspec.structs import replace

from workbench.config import EngineConfig
from workbench.simulation.arrivals import Arrival, timed_arrival
from workbench.simulation.simulate import simulate_requests
from workbench.trace import Trace, TraceMeta

CONFIG = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
    "block_size": 16,
    "num_blocks": 1200,
    "max_model_len": 8192,
    "enable_prefix_caching": True,
}
RATE = 0.31
"""Requests per second."""


class NoisyRoofline:
    """Seconds of a step: reading the weights or computing the rows, whichever takes longer, with noise and stalls."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def step_seconds(self, chunks: Sequence[Any]) -> float:
        """Duration of a step."""
        rows = sum(chunk.num_tokens for chunk in chunks)
        read = sum(chunk.start + chunk.num_tokens for chunk in chunks)
        seconds = 0.02 + 2e-6 * read + max(0.09, 0.0011 * rows) + 0.0008 * len(chunks)
        stall = 3.0 if self._random.random() < 1 / 4000 else 0.0
        return seconds * math.exp(self._random.gauss(0.0, 0.06)) + stall


def arrivals(random: Random, count: int) -> Iterator[Arrival]:
    """Requests with shared system prompts, and sessions whose next turn repeats the turn before."""
    systems = [[random.randrange(3, 32000) for _ in range(256 + 128 * k)] for k in range(4)]
    turns: list[list[int]] = []
    now = 0.0
    for number in range(count):
        is_burst = number % 100 < 12
        now += random.expovariate(RATE * (20 if is_burst else 0.9))
        if turns and random.random() < 0.3:
            prompt = turns.pop(random.randrange(len(turns)))
        else:
            prompt = list(random.choice(systems))
        prompt = [*prompt, *(random.randrange(3, 32000) for _ in range(random.randrange(20, 400)))]
        max_tokens = min(1000, max(8, int(random.lognormvariate(5.2, 0.7))))
        yield timed_arrival(f"cmpl-{random.getrandbits(128):032x}-{number}", prompt, max_tokens, now)
        if len(prompt) < 3000:
            turns.append([*prompt, *(random.randrange(3, 32000) for _ in range(max_tokens))][-3500:])
            del turns[:-40]


def generate(count: int = 1100, seed: int = 0) -> Trace:
    """The recording."""
    random = Random(seed)
    config = EngineConfig(**CONFIG)
    requests = list(arrivals(random, count))
    run = simulate_requests(config, requests, lambda request: 0, cost_model=NoisyRoofline(random), max_steps=10**7)
    known = {**config.to_dict(), "token_ids_recorded": False}
    trace = Trace(TraceMeta(source="vllm 0.33.0", config=known, model={"name": "made-up"}, created=1.8e9))
    infos = iter(run.arrivals())
    info = next(infos, None)
    for index, record in enumerate(run):
        while info is not None and info[0] <= index:
            trace.add_request(replace(info[1], prompt_token_ids=(), sampling={}))
            info = next(infos, None)
        forward = record.timings.get("forward", 0.0)
        timings = {"schedule": 3e-4, "forward": forward - 5e-4, "update": 2e-4} if forward else {}
        trace.append(replace(record, timings=timings))
    trace.end = run.end
    return trace
