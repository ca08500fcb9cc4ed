"""CPU time of checking the laws after every step, beside that of the same steps without it.

A step is ``schedule()`` and ``update()``; no model runs. Small random workloads, as a search for faults takes them,
with the construction of the scheduler; and steps of 64 requests. The arms alternate.

    python benchmarks/bench_laws.py
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import save, summarise

from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.checked import CheckedScheduler
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.workload import made_up_token

TARGET_MICROSECONDS = 80
"""Maximum microseconds that the laws may add to a step of a small workload, over all scenes of such."""


@dataclass(frozen=True)
class Scene:
    """Workloads to measure: numbers of requests, blocks and workloads, and fields of the configuration."""

    name: str
    num_requests: tuple[int, int] = (3, 8)
    num_blocks: tuple[int, int] = (16, 64)
    num_workloads: int = 40
    longest: int = 30
    fields: dict[str, Any] = field(default_factory=dict)


WINDOW = {"kv_cache_groups": [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 8}]}
SCENES = (
    Scene("small, synchronous"),
    Scene("small, asynchronous", fields={"async_scheduling": True}),
    Scene("small, drafts", fields={"num_speculative_tokens": 2}),
    Scene("small, two groups", num_blocks=(32, 96), fields=WINDOW),
    Scene("64 requests", (64, 64), (900, 900), 1, 200, {"max_num_batched_tokens": 1024, "max_num_seqs": 64}),
)


def workload(scene: Scene, seed: str) -> tuple[EngineConfig, list[tuple[list[int], int]]]:
    """A configuration, and for each request its prompt and ``max_tokens``; half of the prompts share a prefix."""
    rng = random.Random(seed)
    config = EngineConfig(
        **{
            "max_num_batched_tokens": rng.choice([8, 16, 32]),
            "max_num_seqs": rng.randint(2, 6),
            "block_size": 4,
            "num_blocks": rng.randint(*scene.num_blocks),
            "policy": rng.choice(["fcfs", "priority"]),
            **scene.fields,
        }
    )
    prompts = []
    for index in range(rng.randint(*scene.num_requests)):
        name = rng.choice(["shared", f"{seed}:{index}"])
        prompt = [made_up_token(f"{name}:{place}") for place in range(rng.randint(1, scene.longest))]
        prompts.append((prompt, rng.randint(4, 16)))
    return config, prompts


def run(kind: type[Scheduler], config: EngineConfig, prompts: list[tuple[list[int], int]]) -> int:
    """Serve the requests; the number of steps."""
    scheduler = kind(config, clock=lambda: 0.0)
    for index, (prompt, max_tokens) in enumerate(prompts):
        scheduler.add_request(Request(f"r{index}", prompt, SamplingParams(max_tokens=max_tokens), priority=index % 3))
    in_flight: deque[ScheduledBatch] = deque()
    depth, num_drafts = 1 + config.async_scheduling, config.num_speculative_tokens
    while scheduler.has_unfinished_requests() or any(batch.chunks for batch in in_flight):
        in_flight.append(scheduler.schedule())
        if len(in_flight) == depth:
            batch = in_flight.popleft()
            scheduler.update(batch, [7 + scheduler.step if chunk.samples else None for chunk in batch.chunks])
            if num_drafts:
                scheduler.set_drafts({chunk.request_id: (5,) * num_drafts for chunk in batch.chunks if chunk.samples})
    return scheduler.step


def measure(scene: Scene, repeats: int) -> dict[str, Any]:
    """Microseconds of CPU time per step with the laws and without, and per construction."""
    workloads = [workload(scene, f"{scene.name}:{index}") for index in range(scene.num_workloads)]
    arms: dict[str, type[Scheduler]] = {"without": Scheduler, "with": CheckedScheduler}
    times: dict[str, list[float]] = {name: [] for name in arms}
    made: dict[str, list[float]] = {name: [] for name in arms}
    num_steps = 0
    for _ in range(repeats + 1):
        for name, kind in arms.items():
            begin = time.process_time()
            num_steps = sum([run(kind, *each) for each in workloads])
            times[name].append((time.process_time() - begin) / num_steps * 1e6)
            begin = time.process_time()
            for config, _ in workloads:
                kind(config)
            made[name].append((time.process_time() - begin) / len(workloads) * 1e6)
    result: dict[str, Any] = {"num_steps": num_steps}
    for name in arms:  # the first repeat warms up
        result[f"us_per_step_{name}"] = summarise(times[name][1:])
        result[f"us_per_construction_{name}"] = summarise(made[name][1:])
    laws = [checked - plain for checked, plain in zip(times["with"][1:], times["without"][1:])]
    result["us_per_step_of_the_laws"] = summarise(laws)
    shown = [f"{key} {value['median']:.1f}" for key, value in result.items() if key != "num_steps"]
    print(f"{scene.name:20} {', '.join(shown)}")
    return result


def main() -> None:
    """Measure every scene and save the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    results = {scene.name: measure(scene, arguments.repeats) for scene in SCENES}
    small = [result for name, result in results.items() if name.startswith("small")]
    added = sum(result["us_per_step_of_the_laws"]["median"] for result in small) / len(small)
    print(f"the laws add {added:.1f} microseconds to a step of a small workload, the target is {TARGET_MICROSECONDS}")
    if not arguments.no_save:
        save("laws", {"scenes": results, "us_added_to_a_small_step": added, "target_us": TARGET_MICROSECONDS})


if __name__ == "__main__":
    main()
