"""Products with packed weights: the share of a core's multiply-adds, beside OpenBLAS with the weights as float32.

A core with AVX2 does 2 x 8 multiply-adds of float32 a cycle. Its clock is measured with a chain of multiplications of
three cycles each. Times are CPU times of one thread, the best of a few.

    python benchmarks/bench_products.py       # about half a minute
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numba
import numpy as np
from _common import save

from workbench.cpu.attention.simd import LANES
from workbench.models.packed import matrix

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from stored_rows import random_rows

SHAPES = {
    "Q4_0": (4096, 2048),
    "Q4_1": (3072, 576),
    "Q5_0": (4096, 640),
    "Q6_K": (640, 2048),
    "Q8_0": (4096, 640),
}
ROWS = (4, 16, 512)


@numba.njit
def chain(count: int, number: np.uint64) -> np.uint64:
    """Squares, each of the one before: three cycles each."""
    for _ in range(count):
        number = number * number
    return number


def seconds(run: Callable[[], object], repeats: int = 1) -> float:
    """The shortest CPU time of a call."""
    times = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(repeats):
            run()
        times.append((time.process_time() - start) / repeats)
    return min(times)


def main() -> None:
    chain(1, np.uint64(3))
    clock = 3 * 50_000_000 / seconds(lambda: chain(50_000_000, np.uint64(3)))
    peak = 2 * 2 * LANES * clock
    results = {"clock_ghz": clock / 1e9, "peak_gflops": peak / 1e9, "share_of_peak": {}}
    for type_name, (num_outputs, num_columns) in SHAPES.items():
        packed = matrix.from_ggml(type_name, [random_rows(type_name, num_outputs, num_columns, 0)])
        weights = packed.rows(np.arange(num_outputs)).T
        for num_rows in ROWS:
            x = np.random.default_rng(0).standard_normal((num_rows, num_columns)).astype(np.float32)
            work = 2 * num_rows * num_outputs * num_columns
            repeats = 1 + int(1e9) // work
            shares = {
                "packed": work / seconds(partial(packed.multiply, x), repeats) / peak,
                "OpenBLAS": work / seconds(partial(np.matmul, x, weights), repeats) / peak,
            }
            packed.use("int8")
            shares["packed, int8"] = work / seconds(partial(packed.multiply, x), repeats) / peak
            packed.use("float32")
            results["share_of_peak"][f"{type_name}, {num_rows} rows"] = shares
            print(
                f"{type_name}, {num_rows} rows:", {name: f"{share:.0%}" for name, share in shares.items()}, flush=True
            )
    save("products", results)


if __name__ == "__main__":
    main()
