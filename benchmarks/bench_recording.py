"""The cost of the record: CPU time of creating and storing StepRecords, as a share of SmolLM2's steps.

The record cannot be switched off, so each of its parts is timed: the batch's record, the description of
the kernel launch, and the append to the trace. The share is computed per repeat over all steps of a run of 16 requests,
prompt chunks and decodes alike, and over its pure decode steps (the shortest ones, hence the largest share).

    python benchmarks/bench_recording.py
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path


def run(engine, spent: list[float], repeat: int) -> dict[str, float]:
    from workbench import SamplingParams

    generator = random.Random(repeat)
    for _ in range(16):
        prompt = [generator.randrange(100, 40000) for _ in range(generator.randrange(16, 200))]
        engine.add_request(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    take, steps = engine._stepper.take, []
    while True:
        spent[0] = 0.0
        # Run on the engine's thread, so that its CPU time is measured.
        start, record, end = engine._thread.call(lambda: (time.thread_time(), take(), time.thread_time()))
        if record is None:
            break
        steps.append((end - start, spent[0], record.num_prefill_tokens == 0))
    decodes = [step for step in steps if step[2]]
    return {
        "share_of_all_steps": sum(s[1] for s in steps) / sum(s[0] for s in steps),
        "share_of_decode_steps": sum(s[1] for s in decodes) / sum(s[0] for s in decodes),
        "record_us_per_step": 1e6 * sum(s[1] for s in steps) / len(steps),
    }


def timed(function, spent: list[float]):
    """Wrap a function so that its CPU time is added to ``spent[0]``."""

    def wrapper(*args, **kwargs):
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.thread_time() - start

    return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    from workbench import Engine, EngineConfig
    from workbench.models.served_model import ServedModel
    from workbench.scheduler.batch import ScheduledBatch

    sys.path.insert(0, str(Path(__file__).parent))
    from _common import save, summarise

    spent = [0.0]
    engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=256, num_blocks=512))
    ScheduledBatch.to_record = timed(ScheduledBatch.to_record, spent)
    ServedModel.launch = timed(ServedModel.launch, spent)
    engine.trace.append = timed(engine.trace.append, spent)
    run(engine, spent, -1)  # warm
    runs = [run(engine, spent, repeat) for repeat in range(options.repeats)]
    results = {name: summarise([result[name] for result in runs]) for name in runs[0]}
    for name, result in results.items():
        print(f"{name:24s} median {result['median']:.4f}  min {result['min']:.4f}  max {result['max']:.4f}")
    save("recording", {"workload": "SmolLM2, 16 requests of 16 to 200 prompt tokens, 24 output tokens", **results})


if __name__ == "__main__":
    main()
