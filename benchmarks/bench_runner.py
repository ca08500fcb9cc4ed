"""CPU time of a forward pass and of the work around it, on SmolLM2 with the CPU backend.

- packing 256 decodes, from scratch and after a step of the same requests;
- the preflight;
- forward passes in one compiled function and layer by layer, interleaved; those of 1 to 8 rows are a decode and the
  drafts behind it, whose logits are needed too.

    python benchmarks/bench_runner.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _common import save, summarise

BLOCK_SIZE = 16
SCENES = {
    "1 decode at 128": (1, 128, 0),
    **{f"1 decode of {rows} rows at 128": (1, 128, 0, rows) for rows in (2, 3, 4, 5, 6, 8)},
    "16 decodes at 128": (16, 128, 0),
    "32 decodes at 128": (32, 128, 0),
    "128 prompt tokens": (0, 0, 128),
    "512 prompt tokens": (0, 0, 512),
    "15 decodes at 300 and 241 prompt tokens": (15, 300, 241),
}
"""Number of decodes, their context, the tokens of a prompt chunk in the same batch, and rows of a decode if not one."""


def segments(num_decodes: int, context: int, num_prompt_tokens: int, rows: int = 1) -> list:
    """The sequences of a scene, on separate blocks."""
    from workbench.engine.packed_batch import Segment

    made, block = [], 1
    for index in range(num_decodes + (num_prompt_tokens > 0)):
        start, count = (context, rows) if index < num_decodes else (0, num_prompt_tokens)
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        tokens = [100 + (7919 * (index + i)) % 40000 for i in range(count)]
        made.append(Segment(list(range(block, block + num_blocks)), start, count, tokens, rows, f"r{index}"))
        block += num_blocks
    return made


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """CPU seconds of each repeat."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return times


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats

    import workbench  # noqa: F401  (before MLX: it installs the BLAS)
    from workbench.config import EngineConfig
    from workbench.engine.model_runner import ModelRunner
    from workbench.engine.packed_batch import pack
    from workbench.models import load_model
    from workbench.models.preflight import preflight

    results: dict = {}
    decodes = segments(256, 512, 0)
    first = pack(decodes, BLOCK_SIZE)
    results["pack 256 decodes at 512, us"] = {
        "from scratch": summarise([1e6 * t for t in timed(lambda: pack(decodes, BLOCK_SIZE), 200)]),
        "after a step": summarise([1e6 * t for t in timed(lambda: pack(decodes, BLOCK_SIZE, previous=first), 200)]),
    }
    runner = ModelRunner(load_model("smollm2"), EngineConfig(attention_backend="cpu", num_blocks=1024))
    checks = timed(lambda: preflight(runner.model, runner.backend), repeats)
    results["preflight, s"] = summarise(checks)

    compiled = runner.path
    for name, scene in SCENES.items():
        packed = pack(segments(*scene), BLOCK_SIZE, num_blocks=1024)
        runner.forward(packed)
        times: dict[str, list[float]] = {"compiled step, ms": [], "layer by layer, ms": []}
        for _ in range(repeats):
            for arm, path in zip(times, (compiled, runner.watched_path), strict=True):
                runner.path = path
                times[arm] += timed(lambda packed=packed: runner.forward(packed), 1)
        row = {arm: summarise([1e3 * t for t in values]) for arm, values in times.items()}
        medians = [summary["median"] for summary in row.values()]
        results[name] = {**row, "ratio": medians[0] / medians[1]}
        print(f"{name}: {medians[0]:.1f} ms, {medians[1]:.1f} layer by layer, ratio {medians[0] / medians[1]:.2f}")
    for name in ("pack 256 decodes at 512, us", "preflight, s"):
        print(name, results[name])
    save("runner", results)


if __name__ == "__main__":
    main()
