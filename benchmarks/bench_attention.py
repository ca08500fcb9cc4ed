"""Paged attention on a CPU: the cpu backend against the gather backend, and the compiled SwiGLU against MLX's.

One layer of SmolLM2-135M (9 query heads, 3 KV heads, head_dim 64, blocks of 16 tokens, float32), with
keys and values written and read. The arms are interleaved and measured in CPU time of the process.

    python benchmarks/bench_attention.py [--repeats N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import workbench  # isort: skip (installs the BLAS before MLX is imported)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from _common import save, summarise

from workbench.kernels.attention import AttentionMetadata, AttentionOptions, get_backend
from workbench.kernels.attention.cpu_ops import swiglu

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
DECODES = [(1, int(length)) for length in np.random.default_rng(0).integers(300, 1501, 24)]
BATCHES = {
    "24 decodes ctx 300-1500 + 2 x 256 rows ctx 768": DECODES + [(256, 768)] * 2,
    "24 decodes ctx 300-1500": DECODES,
    "2 x 256 rows ctx 768": [(256, 768)] * 2,
    "1 x 512 rows ctx 512": [(512, 512)],
    "1 x 512 rows ctx 4096": [(512, 4096)],
    "1 decode ctx 4096": [(1, 4096)],
    "16 decodes ctx 128": [(1, 128)] * 16,
}


def make_batch(sequences: list[tuple[int, int]]) -> tuple[list[mx.array], AttentionMetadata]:
    """q, k, v, caches with blocks in random order, and metadata for (query rows, context) pairs."""
    rng = np.random.default_rng(1)
    query_lens, seqused_k = np.array(sequences, np.int32).T
    num_blocks = -(-seqused_k // BLOCK_SIZE)
    blocks = rng.permutation(num_blocks.sum()) + 1
    table = np.zeros((len(sequences), num_blocks.max()), np.int32)
    table[np.arange(table.shape[1]) < num_blocks[:, None]] = blocks
    slots = []
    for seq, (rows, context) in enumerate(sequences):
        positions = np.arange(context - rows, context)
        slots.append(table[seq, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE)
    cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    metadata = AttentionMetadata(cu_seqlens_q, seqused_k, table, np.concatenate(slots), BLOCK_SIZE)
    cache_shape = (len(blocks) + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    rows = int(cu_seqlens_q[-1])
    shapes = [(rows, NUM_HEADS, HEAD_DIM), *[(rows, NUM_KV_HEADS, HEAD_DIM)] * 2, cache_shape, cache_shape]
    arrays = [mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]
    mx.eval(arrays)
    return arrays, metadata


def measure(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU milliseconds of each arm; the first round is discarded."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats + 1):
        for name, arm in arms.items():
            start = time.process_time()
            mx.eval(arm())
            times[name].append((time.process_time() - start) * 1e3)
    return {name: values[1:] for name, values in times.items()}


def gflop(sequences: list[tuple[int, int]]) -> float:
    """FLOP of a batch: twice the multiply-adds of the pairs that the mask allows."""
    pairs = sum(rows * context - rows * (rows - 1) // 2 for rows, context in sequences)
    return pairs * NUM_HEADS * HEAD_DIM * 4 / 1e9


def bench_batch(sequences: list[tuple[int, int]], repeats: int) -> dict[str, Any]:
    """Measure both backends on one batch."""
    arrays, metadata = make_batch(sequences)

    def run(backend: str) -> mx.array:
        return get_backend(backend).write_and_attend(*arrays, metadata, AttentionOptions(HEAD_DIM**-0.5))

    times = measure({backend: partial(run, backend) for backend in ("gather", "cpu")}, repeats)
    summaries = {backend: summarise(values) for backend, values in times.items()}
    medians = {backend: summary["median"] for backend, summary in summaries.items()}
    return {
        "rows": metadata.num_tokens,
        "useful_gflop": round(gflop(sequences), 4),
        "cpu_ms": summaries,
        "cpu_gflops": round(gflop(sequences) / medians["cpu"] * 1e3, 1),
        "gather_over_cpu": round(medians["gather"] / medians["cpu"], 2),
        "largest_difference": float(mx.abs(run("cpu") - run("gather")).max()),
    }


def bench_attention(repeats: int) -> dict[str, Any]:
    """Measure both backends on every batch."""
    results = {}
    for name, sequences in BATCHES.items():
        results[name] = bench_batch(sequences, repeats)
        gather, cpu = (results[name]["cpu_ms"][backend]["median"] for backend in ("gather", "cpu"))
        print(f"{name}: gather {gather:.2f} ms, cpu {cpu:.2f} ms, {gather / cpu:.1f}x")
    return results


def bench_swiglu(repeats: int) -> dict[str, Any]:
    """Measure SwiGLU on the rows of a prompt chunk and of a decode batch, and its error against float64."""
    results = {}
    for rows in (512, 16):
        rng = np.random.default_rng(rows)
        gate, up = (mx.array(rng.standard_normal((rows, 1536), dtype=np.float32) * 4) for _ in range(2))
        mx.eval(gate, up)
        arms = {"mlx": lambda gate=gate, up=up: nn.silu(gate) * up, "cpu": lambda gate=gate, up=up: swiglu(gate, up)}
        times = measure(arms, repeats)
        exact = np.array(gate, np.float64)
        exact = exact / (1 + np.exp(-exact)) * np.array(up)
        results[f"{rows} x 1536"] = {
            "cpu_ms": {name: summarise(values) for name, values in times.items()},
            "mlx_over_cpu": round(summarise(times["mlx"])["median"] / summarise(times["cpu"])["median"], 1),
            "largest_relative_error": {
                name: float(np.abs(np.array(arm()) / exact - 1).max()) for name, arm in arms.items()
            },
        }
        print(f"swiglu {rows} x 1536: {results[f'{rows} x 1536']['mlx_over_cpu']}x")
    return results


def bench_compilation() -> dict[str, float]:
    """CPU seconds until the kernel is ready: when compiled, and when loaded from the disk cache."""
    program = (
        "import time; import workbench; import mlx.core as mx, numpy as np\n"
        "from workbench.kernels.attention import paged_varlen_attention\n"
        "x = mx.zeros((1, 1, 32)); cache = mx.zeros((1, 8, 1, 32)); mx.eval(x, cache)\n"
        "start = time.process_time()\n"
        "paged_varlen_attention(x, cache, cache, cu_seqlens_q=[0, 1], seqused_k=[1], block_table=[[0]],\n"
        "                       softmax_scale=1.0, backend='cpu')\n"
        "print(time.process_time() - start)\n"
    )
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {"WORKBENCH_CACHE": folder}):
        seconds = [
            float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
            for _ in range(2)
        ]
    return {"first_run_cpu_s": round(seconds[0], 2), "later_runs_cpu_s": round(seconds[1], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    save(
        "attention",
        {
            "what": "one layer, 9 query heads, 3 KV heads, head_dim 64, block size 16, float32, one thread",
            "blas": workbench.backend_info(),
            "attention": bench_attention(repeats),
            "swiglu": bench_swiglu(repeats),
            "compilation": bench_compilation(),
        },
    )


if __name__ == "__main__":
    main()
