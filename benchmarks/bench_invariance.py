"""Rows of logits that are equal to the last bit whatever the batch, and the price of it: SmolLM2 on a CPU.

Prompts are random. Each way is compared with the request alone and its prompt whole. Weights in float32 are
multiplied by the BLAS, which sums in another order for other numbers of rows. The price is the CPU time of a step of
decodes with ``batch_invariant=True`` over one without it, interleaved, with packed weights.

    python benchmarks/bench_invariance.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from _common import save

from workbench import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import Segment, pack
from workbench.models.load import load_model

SIZE, NUM_BLOCKS = 16, 600
ARMS: dict[str, tuple[dict[str, Any], bool]] = {
    "packed weights": ({}, False),
    "packed weights, batch_invariant": ({}, True),
    "packed weights, int8 activations": ({"activations": "int8"}, False),
    "float32 weights": ({"weights": "float32"}, False),
}
"""Options of the model, and ``batch_invariant``."""

CONTEXTS, COUNTS, STEPS = (64, 512), (1, 4, 16), 3
Request = tuple[list[int], list[int]]


def make_runner(options: dict[str, Any], invariant: bool) -> ModelRunner:
    """A runner, and its pool."""
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": SIZE, "max_num_batched_tokens": 4096, "max_model_len": 1024}
    return ModelRunner(load_model("smollm2", **options), EngineConfig(**sizes, batch_invariant=invariant))


class Differences:
    """The largest difference of a row of logits in each way of computing it.

    Args:
        runner: Computes.
        vocab_size: Tokens are below it.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner, self._vocab_size = runner, vocab_size
        self._rng = np.random.default_rng(0)
        self.found: dict[str, list[float]] = {}

    def _tokens(self, length: int) -> list[int]:
        return self._rng.integers(0, self._vocab_size, length).tolist()

    def _logits(self, *parts: tuple[Request, int, int]) -> np.ndarray:
        segments = [
            Segment(table, start, stop - start, tokens[start:stop], 1, str(index))
            for index, ((tokens, table), start, stop) in enumerate(parts)
        ]
        return np.array(self._runner.forward(pack(segments, SIZE))[0].values)

    def _note(self, way: str, made: np.ndarray, expected: np.ndarray) -> None:
        self.found.setdefault(way, []).append(float(np.abs(made - expected).max()))

    def measure(self) -> None:
        """Compute one prompt and its first decode in every way."""
        free, logits = iter(range(1, NUM_BLOCKS)), self._logits

        def table(length: int) -> list[int]:
            return [next(free) for _ in range(-(-length // SIZE))]

        length = int(self._rng.integers(40, 120))
        tokens, first = self._tokens(length + 1), table(length + 1)
        request, prompt, decode = (tokens, first), (0, length), (length, length + 1)
        whole, alone = logits((request, *prompt))[0], logits((request, *decode))[0]

        cut = int(self._rng.integers(SIZE + 1, length - 1))
        again = (tokens, table(length))
        logits((again, 0, cut))
        self._note("prompt in two chunks", logits((again, cut, length))[0], whole)
        hit = cut // SIZE
        shared = (tokens, first[:hit] + table(length - hit * SIZE))
        self._note("prompt after a prefix hit", logits((shared, hit * SIZE, length))[0], whole)
        single = (tokens, table(length))
        logits((single, 0, length - 1))
        self._note("last token of the prompt by itself", logits((single, length - 1, length))[0], whole)

        other = (self._tokens(60), table(60))
        beside = (tokens, table(length))
        self._note("prompt beside a prompt", logits((other, 0, 60), (beside, *prompt))[1], whole)
        self._note("decode beside a prompt", logits((request, *decode), (other, 0, 60))[0], alone)
        others = [(self._tokens(12), table(12)) for _ in range(max(COUNTS) - 1)]
        for one in others:
            logits((one, 0, 11))
        for count in (1, 3, 7, 15):
            batch = [(request, *decode), *((one, 11, 12) for one in others[:count])]
            self._note(f"decode with {count} others", logits(*batch)[0], alone)


def equal_rows(options: dict[str, Any], invariant: bool, repeats: int) -> dict[str, Any]:
    """For each way the rows that are equal to the last bit, and the largest difference of a logit."""
    runner = make_runner(options, invariant)
    differences = Differences(runner, 49_152)
    for _ in range(repeats):
        differences.measure()
    path = runner.path.name
    runner.close()
    ways = {
        way: {"equal": sum(not error for error in errors), "of": len(errors), "largest_difference": max(errors)}
        for way, errors in differences.found.items()
    }
    for way, row in ways.items():
        print(f"  {way}: {row['equal']} of {row['of']}, differences up to {row['largest_difference']:.1e}", flush=True)
    return {"path": path, "ways": ways}


def price(repeats: int) -> dict[str, dict[str, float]]:
    """CPU time of steps of decodes with ``batch_invariant`` over those without, by context and number of requests."""
    runners = {invariant: make_runner({}, invariant) for invariant in (False, True)}
    found: dict[str, dict[str, float]] = {}
    for context in CONTEXTS:
        blocks = -(-(context + 1) // SIZE)
        for count in COUNTS:
            tables = [list(range(1 + index * blocks, 1 + (index + 1) * blocks)) for index in range(count)]
            packed = pack([Segment(table, context, 1, [7], 1) for table in tables], SIZE)
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(1 + repeats):  # the first warms up
                for invariant, runner in runners.items():
                    start = time.process_time()
                    for _ in range(STEPS):
                        runner.forward(packed)
                    times[invariant].append((time.process_time() - start) / STEPS)
            plain, kept = (statistics.median(times[invariant][1:]) for invariant in (False, True))
            found[f"{count} after {context}"] = {"ms": 1000 * plain, "invariant_ms": 1000 * kept, "ratio": kept / plain}
            print(f"  {count} decodes after {context}: {1000 * plain:.1f} ms, ratio {kept / plain:.2f}", flush=True)
    for runner in runners.values():
        runner.close()
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="prompts of each arm (default 2)")
    repeats = parser.parse_args().repeats
    arms = {}
    for name, (options, invariant) in ARMS.items():
        print(name, flush=True)
        arms[name] = equal_rows(options, invariant, repeats)
    print("price of batch_invariant", flush=True)
    save("invariance", {"model": "smollm2", "arms": arms, "price": price(2 * repeats + 1)})


if __name__ == "__main__":
    main()
