"""Reads and computations of the tiled attention kernel, counted by msl; on a GPU also its speed.

    python benchmarks/bench_kernel.py             # counts, on any machine with clang; times on a GPU

The loads and multiplications of the compiled kernel are counted, so the numbers describe the kernel and not the
machine. There are two minima for K and V. *Per tile*: every position that a row of a tile may see, once for the
tile. *Once*: every position of every sequence that any row may see, once for the whole launch. A GPU comes closer to
the second minimum than the counts suggest if its caches serve several tiles of a sequence at the same time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from _common import save, summarise

import workbench  # noqa: F401  installs a BLAS before MLX is imported

import mlx.core as mx  # isort: skip

from workbench import msl
from workbench.kernels.attention.metal.launch import PagedVarlenKernels
from workbench.kernels.attention.metal.tile_shape import TileShape
from workbench.kernels.attention.probe import Probe, ProbeBatch, probe_batch
from workbench.kernels.attention.selection import get_backend, why_unavailable
from workbench.kernels.attention.work_list import first_visible

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
GEMMA_4 = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 512}
EXPANDED = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 192, "value_dim": 128}
LATENTS = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True}
LLAMA3_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256, 512)
DECODES = tuple((1, int(kv)) for kv in np.linspace(300, 1500, 24))

COUNTED = (
    Probe("24 decodes, contexts 300 to 1,500", DECODES, **SMOLLM2),
    Probe("1 decode, context 8,192", ((1, 8192),), **SMOLLM2),
    Probe("prompt chunk of 512 rows at 0", ((512, 512),), **SMOLLM2),
    Probe("prompt chunk of 512 rows at 1,536", ((512, 2048),), **SMOLLM2),
    Probe("24 decodes and 2 chunks of 256 rows at 768", (*DECODES, (256, 1024), (256, 1024)), **SMOLLM2),
    Probe("the same, window of 256", (*DECODES, (256, 1024), (256, 1024)), left=255, **SMOLLM2),
    Probe("8 decodes, context 1,000, 4 heads per KV head of 128", ((1, 1000),) * 8, **LLAMA3_8B),
    Probe("8 decodes, context 1,000, heads of 512", ((1, 1000),) * 8, **GEMMA_4),
    Probe("chunk of 128 rows at 384, heads of 512", ((128, 512),), **GEMMA_4),
    Probe("8 decodes, context 1,000, keys of 192 and values of 128", ((1, 1000),) * 8, **EXPANDED),
    Probe("8 decodes, context 1,000, latents of 512 + 64", ((1, 1000),) * 8, **LATENTS),
    Probe("chunk of 64 rows at 448, latents of 512 + 64", ((64, 512),), **LATENTS),
    Probe(
        "24 decodes and 2 chunks of 256 rows at 768, chunked attention of 256",
        (*DECODES, (256, 1024), (256, 1024)),
        chunk_size=256,
        **SMOLLM2,
    ),
)
DECODE_TIMED = Probe("64 decodes, context 4,096", ((1, 4096),) * 64, **LLAMA3_8B)
PREFILL_TIMED = Probe("chunk of 2,048 rows at 2,048", ((2048, 4096),), **LLAMA3_8B)


def count(probe: Probe) -> dict[str, Any]:
    """Bytes, multiplications and barriers of one launch of the tiled kernel."""
    kernels = PagedVarlenKernels(msl.metal_kernel, statistics=True)
    batch = probe_batch(probe)
    kernels.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.options)
    sizes = probe.num_heads, probe.num_kv_heads, probe.head_dim, 2
    plan = kernels.plan(batch.metadata, *sizes, batch.options.reach, value_dim=probe.size_of_values)
    statistics = kernels.kernel("paged_varlen_split" if plan.num_partial_rows else "paged_varlen").last_statistics
    stored = probe.head_dim + (0 if probe.latent else probe.size_of_values)
    position_bytes = probe.num_kv_heads * stored * 2
    kv_read = sum(statistics.buffers[name].bytes_read for name in ("k_cache", "v_cache"))
    others = [name for name in statistics.buffers if name not in ("k_cache", "v_cache")]
    per_tile = int((plan.items[:, 4] - plan.items[:, 3]).sum()) * position_bytes
    first_rows = [kv - rows for rows, kv in probe.sequences]
    reach = batch.options.reach
    seen = sum(kv - int(first_visible(first, reach)) for first, (_, kv) in zip(first_rows, probe.sequences))
    needed_flops = 2 * probe.num_heads * (probe.head_dim + probe.size_of_values) * visible_pairs(probe)
    return {
        "work_items": len(plan.items),
        "threadgroups": statistics.threadgroups,
        "splits_at_most": int(plan.items[:, 6].max()),
        "kv_bytes_read": kv_read,
        "kv_over_minimum_per_tile": kv_read / per_tile,
        "kv_over_minimum_once": kv_read / (seen * position_bytes),
        "other_bytes_read": sum(statistics.buffers[name].bytes_read for name in others),
        "bytes_written": sum(traffic.bytes_written for traffic in statistics.buffers.values()),
        "matrix_flops": statistics.matrix_multiplications * 1024,
        "matrix_flops_over_needed": statistics.matrix_multiplications * 1024 / needed_flops,
        "barriers_per_threadgroup": statistics.threadgroup_barriers / statistics.threadgroups,
        "threadgroup_memory": statistics.threadgroup_memory,
        "output_registers_per_lane": probe.size_of_values // 4,
    }


def visible_pairs(probe: Probe) -> int:
    """Number of (row, position) pairs that the mask allows."""
    pairs = 0
    for rows, kv in probe.sequences:
        positions = np.arange(kv - rows, kv)
        reach = -probe.chunk_size if probe.chunk_size else probe.left
        pairs += int((positions + 1 - first_visible(positions, reach)).sum())
    return pairs


def threadgroup_memory() -> dict[str, int]:
    """Bytes of threadgroup memory of every variant."""
    return {
        f"head_dim {head_dim}{f' and {value_dim}' if value_dim else ''}, {itemsize} bytes": TileShape.choose(
            head_dim, itemsize, value_dim
        ).threadgroup_bytes
        for head_dim, value_dim in (*((dim, 0) for dim in HEAD_DIMS), (192, 128), (576, 512))
        for itemsize in (2, 4)
    }


def measure(function: Any, repeats: int = 20) -> dict[str, float]:
    """Seconds per call."""
    for _ in range(3):
        mx.eval(function())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        mx.eval(function())
        seconds.append(time.perf_counter() - started)
    return summarise(seconds)


def time_on_gpu(name: str) -> dict[str, Any]:
    """Decode bandwidth and prefill FLOP/s of a GPU backend, with copy, matmul and MLX's attention for comparison."""
    backend = get_backend(name)
    decode, prefill = probe_batch(DECODE_TIMED), probe_batch(PREFILL_TIMED)
    source = mx.zeros((256, 2**20), mx.float16)
    matrix = mx.ones((4096, 4096), mx.float16)
    heads_first = attention_inputs(prefill)
    seconds = {
        "decode": measure(lambda: run(backend, decode)),
        "prefill": measure(lambda: run(backend, prefill)),
        "copy of 512 MiB": measure(lambda: source + 1),
        "matmul of 4096": measure(lambda: matrix @ matrix),
        "mx attention, same prefill": measure(
            lambda: mx.fast.scaled_dot_product_attention(
                *heads_first, scale=prefill.options.softmax_scale, mask="causal"
            )
        ),
    }
    median = {what: timing["median"] for what, timing in seconds.items()}
    kv_bytes = sum(kv for _, kv in DECODE_TIMED.sequences) * 2 * DECODE_TIMED.num_kv_heads * DECODE_TIMED.head_dim * 2
    flops = 4 * PREFILL_TIMED.num_heads * PREFILL_TIMED.head_dim * visible_pairs(PREFILL_TIMED)
    return {
        "backend": name,
        "device": mx.device_info(),
        "seconds": seconds,
        "decode_bytes_per_s": kv_bytes / median["decode"],
        "copy_bytes_per_s": 2 * source.nbytes / median["copy of 512 MiB"],
        "prefill_flop_per_s": flops / median["prefill"],
        "matmul_flop_per_s": 2 * 4096**3 / median["matmul of 4096"],
        "mx_attention_flop_per_s": flops / median["mx attention, same prefill"],
    }


def run(backend: Any, batch: ProbeBatch) -> mx.array:
    return backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.options)


def attention_inputs(batch: ProbeBatch) -> list[mx.array]:
    """q, k and v of a batch with one sequence, contiguous and heads first, as MLX's attention expects them."""
    kv_len = int(batch.metadata.seqused_k[0])
    blocks = mx.array(batch.metadata.block_table[0])
    k, v = (cache[blocks].flatten(0, 1)[:kv_len] for cache in (batch.k_cache, batch.v_cache))
    arrays = [mx.contiguous(x.swapaxes(0, 1)[None]) for x in (batch.q, k, v)]
    mx.eval(arrays)
    return arrays


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results: dict[str, Any] = {"counted": {}, "threadgroup_memory": threadgroup_memory(), "timed": []}
    no_compiler = msl.why_unavailable()
    if no_compiler:
        print(f"not counted: {no_compiler}")
    for probe in COUNTED if not no_compiler else ():
        counts = count(probe)
        results["counted"][probe.name] = counts
        print(probe.name)
        for what, number in counts.items():
            print(f"    {what:28} {number:,.3f}" if isinstance(number, float) else f"    {what:28} {number:,}")
    for name in ("metal", "cuda"):
        if reason := why_unavailable(name):
            print(f"{name} not timed: {reason}")
        else:
            results["timed"].append(time_on_gpu(name))
            print(results["timed"][-1])
    save("kernel", results)


if __name__ == "__main__":
    main()
