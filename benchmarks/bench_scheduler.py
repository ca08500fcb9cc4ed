"""CPU time of the scheduler and its record, per scheduled request and step.

A step is ``schedule()``, ``update()`` with its StepRecord, and ``Trace.append()``; no model runs. The trace keeps every
record, as in an engine. The garbage collector is left on, and its time counts. Requests are set up
and prefilled outside the measurement.

    python benchmarks/bench_scheduler.py
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import save, summarise

from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.workload import made_up_token
from workbench.trace import Trace, TraceMeta

TARGET_MICROSECONDS = 3.0
"""Maximum microseconds per scheduled request in a step with 256 running decodes."""


@dataclass(frozen=True)
class Scene:
    """A steady state to measure: running decodes, and requests waiting behind them."""

    name: str
    num_decodes: int
    num_waiting: int = 0
    enable_prefix_caching: bool = True
    policy: str = "fcfs"


SCENES = (
    Scene("256 decodes", 256),
    Scene("256 decodes, no prefix caching", 256, enable_prefix_caching=False),
    Scene("256 decodes by priority, 1000 waiting", 256, num_waiting=1000, policy="priority"),
    Scene("16 decodes", 16),
)


def prepare(scene: Scene, num_steps: int) -> tuple[Scheduler, Trace]:
    """A scheduler whose running requests have all finished their prefill, and an empty trace."""
    config = EngineConfig(
        max_num_batched_tokens=16384,
        max_num_seqs=scene.num_decodes,
        num_blocks=scene.num_decodes * (64 + num_steps) // 16 + scene.num_decodes + 2,
        enable_prefix_caching=scene.enable_prefix_caching,
        policy=scene.policy,
    )
    scheduler = Scheduler(config)
    trace = Trace(TraceMeta(config=config.to_dict()))
    for index in range(scene.num_decodes + scene.num_waiting):
        prompt = [made_up_token(f"{index}:{position}") for position in range(32 + index % 16)]
        sampling = SamplingParams(max_tokens=num_steps + 10)
        request = Request(f"r{index}", prompt, sampling, arrival_time=float(index))
        scheduler.add_request(request)
        trace.add_request(request.info())
    batch = scheduler.schedule()
    trace.append(scheduler.update(batch, [7] * scene.num_decodes).to_record())
    return scheduler, trace


def measure(scene: Scene, num_steps: int) -> dict[str, float]:
    """Microseconds of CPU time per scheduled request: whole steps, and their two halves."""
    scheduler, trace = prepare(scene, num_steps)
    sampled = [7] * scene.num_decodes
    in_schedule = 0.0
    begin = time.process_time()
    for _ in range(num_steps):
        before = time.process_time()
        batch = scheduler.schedule()
        in_schedule += time.process_time() - before
        trace.append(scheduler.update(batch, sampled).to_record())
    total = time.process_time() - begin
    assert all(len(record.chunks) == scene.num_decodes for record in trace), "the scene is not steady"
    scale = 1e6 / (num_steps * scene.num_decodes)
    return {"total": total * scale, "schedule": in_schedule * scale, "update": (total - in_schedule) * scale}


def measure_peek(scene: Scene) -> float:
    """Microseconds of CPU time of one peek_next_batch()."""
    scheduler, _ = prepare(scene, 100)
    begin = time.process_time()
    for _ in range(20):
        scheduler.peek_next_batch()
    return (time.process_time() - begin) * 1e6 / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps per repeat (default 300)")
    parser.add_argument("--repeats", type=int, default=9, help="repeats per scene (default 9)")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for scene in SCENES:
        repeats = [measure(scene, options.steps) for _ in range(options.repeats)]
        parts = {part: summarise([repeat[part] for repeat in repeats]) for part in repeats[0]}
        peek = summarise([measure_peek(scene) for _ in range(3)])
        results[scene.name] = {"microseconds_per_scheduled_request": parts, "microseconds_per_peek": peek}
        median = {part: values["median"] for part, values in parts.items()}
        print(
            f"{scene.name:40} {median['total']:.2f} us per request and step "
            f"(schedule {median['schedule']:.2f}, update and record {median['update']:.2f}); "
            f"peek {peek['median'] / 1e3:.2f} ms"
        )
    first = results[SCENES[0].name]["microseconds_per_scheduled_request"]["total"]["median"]
    print(f"{first / TARGET_MICROSECONDS:.2f} of the target of {TARGET_MICROSECONDS} us at 256 decodes")
    save(
        "scheduler",
        {
            "what": "CPU time of schedule() + update() + Trace.append(), garbage collection included",
            "steps_per_repeat": options.steps,
            "target_microseconds": TARGET_MICROSECONDS,
            "ratio_to_target": round(first / TARGET_MICROSECONDS, 3),
            "scenes": results,
        },
    )


if __name__ == "__main__":
    main()
