"""Sampling: its share of a decode step of SmolLM2, and CPU time per row, against ranking the whole vocabulary.

Both arms run in this process, one after the other in every repeat: the sampler as it ships, and the one that sorts
every row in float64, which decides doubtful rows today and was the only one in version 0.1.

    python benchmarks/bench_sampling.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import save, summarise

import workbench  # noqa: F401  (before MLX: it installs the BLAS)

import mlx.core as mx  # isort: skip
import numpy as np

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine import distribution, sampler

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "chat": {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.8, "top_p": 0.95, "logprobs": 5},
}
ROWS = {name: fields for name, fields in SETTINGS.items() if name in ("temperature", "top_p", "top_k", "min_p")}
OUTPUT, PROMPT = 24, 12


def by_sorting(adjusted: np.ndarray, params: SamplingParams, uniform: float) -> int:
    """The token that the whole ranking draws: version 0.1's way."""
    logprobs = distribution.log_softmax(adjusted.astype(np.float64) / params.temperature)
    kept = distribution.filter_by_sorting(logprobs, params.top_k, params.top_p, params.min_p)
    return distribution.draw(kept, uniform)


def share(engine: Engine, count: int, fields: dict[str, Any]) -> tuple[float, list[Any]]:
    """The sampler's share of the decode steps of ``count`` requests, and their tokens."""
    rng = random.Random(count)
    names = [
        engine.add_request(
            [rng.randrange(100, 40_000) for _ in range(PROMPT)],
            SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=index, **fields),
        )
        for index in range(count)
    ]
    sampling = whole = 0.0
    while (record := engine.step()) is not None:
        if all(chunk.arm == "decode" for chunk in record.chunks) and len(record.chunks) == count:
            sampling += record.timings["sample"]
            whole += record.duration
    return sampling / whole, [engine.outputs[name].token_ids for name in names]


def rows() -> dict[str, dict[str, float]]:
    """Microseconds of CPU time per row: as it ships, and by sorting."""
    found: dict[str, dict[str, float]] = {}
    rng = np.random.default_rng(0)
    for size in (49_152, 152_000):
        logits = (rng.normal(size=size) * 3).astype(np.float32)
        logits[:20] += 6
        for name, fields in ROWS.items():
            params = SamplingParams(**fields)
            arms = {"ships": distribution.draw_token, "by sorting": by_sorting}
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            for _ in range(9):
                for arm, draw in arms.items():
                    started = time.process_time()
                    draw(logits, params, 0.3)
                    times[arm].append(1e6 * (time.process_time() - started))
            found[f"{name}, {size}"] = {arm: statistics.median(values) for arm, values in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, Any] = {"rows, us": rows()}
    for name, times in results["rows, us"].items():
        print(f"{name:24s} {times['ships']:8.0f} us a row, by sorting {times['by sorting']:8.0f}", flush=True)
    engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=256, num_blocks=256, record_top_tokens=0))
    shipped = sampler.draw_token
    share(engine, 1, SETTINGS["chat"])  # compiles
    for count in (1, 4, 16):
        for name, fields in SETTINGS.items():
            shares: dict[str, list[float]] = {"ships": [], "by sorting": []}
            for _ in range(options.repeats):
                tokens = []
                for arm, draw in (("ships", shipped), ("by sorting", by_sorting)):
                    sampler.draw_token = draw
                    found, its = share(engine, count, fields)
                    shares[arm].append(found)
                    tokens.append(its)
                assert tokens[0] == tokens[1], "the arms draw different tokens"
            sampler.draw_token = shipped
            results[f"{name}, {count} requests"] = {arm: summarise(values) for arm, values in shares.items()}
            ships, old = (statistics.median(values) for values in shares.values())
            print(f"{name:12s} {count:2d} requests: {ships:6.1%} of a decode step, by sorting {old:6.1%}", flush=True)
    mx.clear_cache()
    save("sampling", results)


if __name__ == "__main__":
    main()
