"""Attention of decodes after long contexts, by the type of the KV cache, against a plain read of the same memory.

One layer of SmolLM2-135M (9 query heads, 3 KV heads, head_dim 64, blocks of 16 tokens in random order), one thread, CPU
time. Layers take turns, so that none is read from a cache of the processor. The plain read sums the same arrays.
"Blocks in a cache" is the same work on 16 blocks again and again: the arithmetic without the memory. "Blocks in order"
is the same work on blocks one after another. Results of other vectors than AVX2's are saved beside AVX2's.

    python benchmarks/bench_long_decodes.py [--repeats N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import workbench  # isort: skip (installs the BLAS before MLX is imported)
import mlx.core as mx
import numpy as np
from _common import save, summarise

from workbench.kernels.attention import AttentionMetadata, AttentionOptions, get_backend
from workbench.kernels.attention.cpu_backend import shared_memory
from workbench.kernels.attention.stored import to_stored
from workbench.kernels.cpu.attention.simd import LANES

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16, "int8_per_token_head": mx.int8}
CASES = [(context, requests) for context in (2048, 7500) for requests in (1, 4, 16)]
READ_AT_LEAST = 64 << 20
"""Bytes of all layers together: far more than a processor's caches."""


def cpu_ms(work: Callable[[], Any]) -> float:
    """CPU milliseconds of a call."""
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def bench_case(context: int, requests: int, repeats: int) -> dict[str, Any]:
    """Measure all types, interleaved; the first round is discarded."""
    rng = np.random.default_rng(0)
    blocks_each = -(-context // BLOCK_SIZE)
    table = (rng.permutation(blocks_each * requests) + 1).astype(np.int32).reshape(requests, blocks_each)
    near = (np.arange(blocks_each * requests) % 16 + 1).astype(np.int32).reshape(requests, blocks_each)
    starts, lens = np.arange(requests + 1, dtype=np.int32), np.full(requests, context, np.int32)
    tables = {"far": table, "near": near, "ordered": np.sort(table, axis=None).reshape(table.shape)}
    batches = {arm: AttentionMetadata(starts, lens, blocks, None, BLOCK_SIZE) for arm, blocks in tables.items()}
    shape = (blocks_each * requests + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    queries = mx.array(rng.standard_normal((requests, NUM_HEADS, HEAD_DIM), dtype=np.float32))
    numbers = [mx.array(rng.standard_normal(shape, dtype=np.float32)) for _ in range(2)]
    backend, options = get_backend("cpu"), AttentionOptions(HEAD_DIM**-0.5)
    layers: dict[str, list[list[mx.array]]] = {}
    for name, dtype in DTYPES.items():
        first = [to_stored(x, dtype) for x in numbers]
        count = -(-READ_AT_LEAST // (2 * first[0].nbytes))
        layers[name] = [[x + 0 for x in first] for _ in range(count)]
        mx.eval(layers[name])
    times: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in (*tables, "plain")} for name in DTYPES}
    for _ in range(repeats + 1):
        for name, caches in layers.items():
            for arm, batch in batches.items():
                run = [lambda kv=kv, batch=batch: backend.attend(queries, *kv, batch, options) for kv in caches]
                times[name][arm].append(cpu_ms(lambda run=run: [one() for one in run]) / len(caches))
            words = [shared_memory(x).reshape(-1).view(np.uint64) for kv in caches for x in kv]
            times[name]["plain"].append(cpu_ms(lambda words=words: [x.sum() for x in words]) / len(caches))
    results = {}
    for name, arms in times.items():
        size = sum(x.nbytes for x in layers[name][0]) / 1e6
        summaries = {arm: summarise(values[1:]) for arm, values in arms.items()}
        gb_per_s = {arm: round(size / summary["median"], 2) for arm, summary in summaries.items()}
        results[name] = {
            "mb": round(size, 2),
            "cpu_ms": {
                "attention": summaries["far"],
                "blocks_in_a_cache": summaries["near"],
                "blocks_in_order": summaries["ordered"],
            },
            "plain_read_cpu_ms": summaries["plain"],
            "gb_per_s": gb_per_s["far"],
            "share_of_plain_read": round(gb_per_s["far"] / gb_per_s["plain"], 2),
            "share_in_order": round(gb_per_s["ordered"] / gb_per_s["plain"], 2),
            "share_without_memory": round(gb_per_s["near"] / gb_per_s["plain"], 2),
            "times_float32": round(summarise(times["float32"]["far"][1:])["median"] / summaries["far"]["median"], 2),
        }
        print(f"{requests} x {context} {name}: {results[name]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    save(
        "long_decodes" if LANES == 8 else f"long_decodes_{LANES}_lanes",
        {
            "what": "one layer, 9 query heads, 3 KV heads, head_dim 64, block size 16, one thread",
            "blas": workbench.backend_info(),
            "lanes": LANES,
            "cases": {f"{requests} x {context}": bench_case(context, requests, repeats) for context, requests in CASES},
        },
    )


if __name__ == "__main__":
    main()
