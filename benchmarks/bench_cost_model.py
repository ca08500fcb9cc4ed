"""A cost model fitted to SmolLM2 on this machine: its error on held-out steps, and on another run as a whole.

One run is recorded and fitted; a second run with other prompts is then simulated from its arrivals alone, and the
simulated duration is compared with the measured one. Both are done for wall-clock time, which on a busy machine
mostly measures other programs, and for the CPU time of each step, which the model describes.

    python benchmarks/bench_cost_model.py
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from _common import save

from workbench import Engine, EngineConfig, SamplingParams, Trace
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import simulate_requests

CONFIG = EngineConfig(max_num_batched_tokens=128, max_num_seqs=12, num_blocks=512, enable_prefix_caching=False)
NUM_REQUESTS = 20


def record(seed: int) -> tuple[Trace, list[float]]:
    """Requests of 8 to 400 prompt tokens and 10 to 40 output tokens, one every third step.

    Returns:
        The trace, and the CPU seconds of every step.
    """
    rng = random.Random(seed)
    engine = Engine("smollm2", CONFIG)
    todo = [
        ([rng.randrange(100, 40_000) for _ in range(rng.choice([8, 40, 120, 400]))], rng.randint(10, 40))
        for _ in range(NUM_REQUESTS)
    ]
    cpu_seconds = []
    while True:
        if todo and len(engine.trace) % 3 == 0:
            prompt, max_tokens = todo.pop()
            engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        before = time.process_time()
        if engine.step() is None:
            break
        cpu_seconds.append(time.process_time() - before)
    engine.close()
    return engine.trace, cpu_seconds


def with_durations(trace: Trace, durations: list[float]) -> Trace:
    """The trace with different step durations."""
    copy = Trace(trace.meta)
    for info in trace.requests.values():
        copy.add_request(info)
    for step, duration in zip(trace, durations, strict=True):
        copy.append(msgspec.structs.replace(step, end=step.time + duration, timings={"forward": duration}, kernel=None))
    return copy


def simulated_seconds(trace: Trace, model: CostModel) -> float:
    """Duration of a simulation of the same arrivals with the model."""
    arrivals = [
        Arrival(
            info.request_id,
            info.prompt_token_ids,
            SamplingParams(max_tokens=info.max_tokens, ignore_eos=True),
            arrival_step=info.arrival_step,
        )
        for info in trace.requests.values()
    ]
    return simulate_requests(CONFIG, arrivals, lambda request: 0, cost_model=model).metrics().summary.duration


def measure(fitted: Trace, other: Trace) -> dict[str, Any]:
    """Fit one trace, and report the error on its held-out steps and on the other trace as a whole."""
    model, report = CostModel.fit(fitted)
    measured = sum(step.duration for step in other)
    simulated = simulated_seconds(other, model)
    print(model)
    print(report)
    print(f"another run: measured {measured:.2f} s, simulated {simulated:.2f} s, ratio {simulated / measured:.3f}")
    return {
        "cost_model": model.to_dict(),
        "held_out": dataclasses.asdict(report),
        "another_run": {"measured_s": measured, "simulated_s": simulated, "ratio": simulated / measured},
    }


def main() -> None:
    (fitted, fitted_cpu), (other, other_cpu) = record(0), record(1)
    results = {
        "wall_clock": measure(fitted, other),
        "cpu_time": measure(with_durations(fitted, fitted_cpu), with_durations(other, other_cpu)),
    }
    save("cost_model", {"config": CONFIG.to_dict(), **results})


if __name__ == "__main__":
    main()
