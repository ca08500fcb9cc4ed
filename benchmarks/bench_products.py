"""Products with packed weights: the share of a core's multiply-adds, beside OpenBLAS with the weights as float32.

A core with AVX2 does 2 x 8 multiply-adds of float32 a cycle. Its clock is measured with a chain of multiplications of
three cycles each. Times are CPU times of one thread, the best of a few.

A single row has little to compute, so its products are measured in bytes of weights per second, with inputs of float32
and of 8 bits, as a share of a plain read: the sum of the same memory as integers, in turns. Matrices take turns, too,
so that none is in a cache. "best" compares the shortest times, "median" the median ones.

    python benchmarks/bench_products.py                      # about a minute
    python benchmarks/bench_products.py --only weights_read
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numba
import numpy as np
from _common import RESULTS, machine, save

from workbench.kernels.cpu.attention.simd import LANES
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
READ = ("Q4_0", "Q4_1", "Q8_0")
READ_AT_LEAST = 96 << 20
"""Bytes of the matrices that take turns: more than a processor's caches."""


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


def weights_read(type_name: str, repeats: int) -> dict[str, dict[str, float]]:
    """Bytes of weights per second of products with a single row, as shares of a plain read."""
    rows = [random_rows(type_name, 4096, 4096, 0)]
    first = matrix.from_ggml(type_name, rows)
    matrices = [first, *(matrix.from_ggml(type_name, rows) for _ in range(READ_AT_LEAST // first.nbytes))]
    words = [each.data.view(np.uint64) for each in matrices]
    x = np.random.default_rng(0).standard_normal((1, 4096)).astype(np.float32)
    times: dict[str, list[float]] = {"plain read": [], "float32": [], "int8": []}
    for repeat in range(repeats + 1):
        for arm in sorted(times, reverse=repeat % 2 == 1):
            if arm != "plain read":
                for each in matrices:
                    each.use(arm)
            started = time.process_time()
            for each, its_words in zip(matrices, words):
                its_words.sum() if arm == "plain read" else each.multiply(x)
            times[arm].append(time.process_time() - started)
    size = sum(each.nbytes for each in matrices) / 1e9
    best = {arm: size / min(values[1:]) for arm, values in times.items()}
    median = {arm: size / statistics.median(values[1:]) for arm, values in times.items()}
    found = {
        arm: {
            "best_gb_per_s": round(best[arm], 2),
            "median_gb_per_s": round(median[arm], 2),
            "best_share": round(best[arm] / best["plain read"], 3),
            "median_share": round(median[arm] / median["plain read"], 3),
        }
        for arm in times
    }
    print(f"{type_name}, a row:", found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["weights_read"], help="measure this alone, and keep the other results")
    parser.add_argument("--repeats", type=int, default=15, help="repeats of a single row's products (default 15)")
    options = parser.parse_args()
    read = {
        "machine": machine(),
        "repeats": options.repeats,
        "types": {type_name: weights_read(type_name, options.repeats) for type_name in READ},
    }
    if options.only:
        saved = json.loads((RESULTS / "products.json").read_text())
        (RESULTS / "products.json").write_text(json.dumps(saved | {"weights_read": read}, indent=2) + "\n")
        return
    chain(1, np.uint64(3))
    clock = 3 * 50_000_000 / seconds(lambda: chain(50_000_000, np.uint64(3)))
    peak = 2 * 2 * LANES * clock
    results = {"clock_ghz": clock / 1e9, "peak_gflops": peak / 1e9, "share_of_peak": {}, "weights_read": read}
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
