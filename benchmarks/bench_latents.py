"""Latent attention of one layer on a CPU: the absorbed form against the expanded one, by chunk and context.

The layer is like one of DeepSeek V2 Lite: 16 heads, latents of 512 + 64, keys of 128 + 64 and values of 128, blocks of
16 tokens, float32, from the queries to the values, with latents written to the pool. "Row by row" is the absorbed form
with the matrices of heads multiplied with one row at a time. Arms are interleaved and measured in CPU time of the
process. The counted ratio is that of multiplications, absorbed over expanded; the form that it chooses is "chosen".

    python benchmarks/bench_latents.py [--repeats N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import workbench  # isort: skip  # noqa: F401 (installs the BLAS before MLX is imported)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from _common import before_arm, save, summarise
from mlx_lm.models.mla import MultiLinear

from workbench.kernels.attention import AttentionMetadata, get_backend
from workbench.models.latents import LatentPatch, forms_of, saved_multiplications
from workbench.models.layer_cache import LayerKV, LayerStep
from workbench.models.paged_layer import PagedLayerCache

HEADS, RANK, ROTARY, KEY, VALUE, BLOCK_SIZE = 16, 512, 64, 128, 128, 16
SCALE = (KEY + ROTARY) ** -0.5
EXPANDED = LayerKV(HEADS, KEY + ROTARY, VALUE, mx.float32)
LATENTS = LayerKV(1, RANK, ROTARY, mx.float32, latent=True, expanded=EXPANDED)
CASES = (
    *((512, context) for context in (512, 2048, 4096)),
    *((rows, rows) for rows in (32, 128)),
    *((rows, 2048) for rows in (64, 128, 192, 256)),
)
"""Rows of a chunk, and positions of its context with these rows."""


class Layer(nn.Module):
    """The part of an attention layer that the two forms compute differently, as mlx-lm writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_q, self.unembed_out = MultiLinear(KEY, RANK, HEADS), MultiLinear(RANK, VALUE, HEADS)

    def __call__(self, rows: list[mx.array], cache: Any) -> mx.array:
        queries, rotary_queries, latents, rotary_keys = rows
        latents, rotary_keys = cache.update_and_fetch(latents, rotary_keys)
        scores = (rotary_queries * SCALE) @ rotary_keys.swapaxes(-1, -2)
        out = cache.attention(self.embed_q(queries), latents, latents, softmax_scale=SCALE, mask=scores)
        return self.unembed_out(out)


def bench_case(rows: int, context: int, repeats: int) -> dict[str, Any]:
    """Measure both forms on one chunk."""
    rng = np.random.default_rng(0)
    num_blocks = -(-context // BLOCK_SIZE)
    table = (rng.permutation(num_blocks) + 1).astype(np.int32)[None]
    positions = np.arange(context - rows, context)
    slots = table[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = np.array([0, rows], np.int32), np.array([context], np.int32), table, slots, BLOCK_SIZE

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    inputs = [draw(rows, HEADS, 1, KEY), draw(rows, HEADS, 1, ROTARY), draw(rows, 1, 1, RANK), draw(rows, 1, 1, ROTARY)]
    pool, row_by_row, layer = draw(num_blocks + 1, BLOCK_SIZE, 1, RANK + ROTARY), Layer(), Layer()
    layer.update(row_by_row.parameters())
    mx.eval(layer.parameters(), inputs, pool)
    LatentPatch(layer)

    def arm(layer: Layer, expanded: LayerKV | None) -> mx.array:
        spec = replace(LATENTS, expanded=expanded)
        cache = PagedLayerCache(spec, (pool, pool), get_backend("cpu"))
        cache.expands_all = True
        cache.begin_step(LayerStep(mx.array(positions.astype(np.int32)), AttentionMetadata(*batch)))
        out = layer(inputs, cache)
        mx.eval(out)
        cache.end_step()
        return out

    arms: dict[str, Callable[[], mx.array]] = {
        "row by row": partial(arm, row_by_row, None),
        "absorbed": partial(arm, layer, None),
        "expanded": partial(arm, layer, EXPANDED),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):  # the first one warms up
        for name, work in arms.items():
            started = time.process_time()
            work()
            if repeat:
                times[name].append((time.process_time() - started) * 1e3)
    outs, taken = {}, {}
    for name, work in arms.items():
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        outs[name] = work()
        taken[name] = mx.get_peak_memory() - held
    summaries = {name: summarise(values) for name, values in times.items()}
    row, absorbed, expanded = (summaries[name]["median"] for name in arms)
    saved = int(saved_multiplications(np.int64(rows), np.int64(context), LATENTS))
    chosen = forms_of(AttentionMetadata(*batch), LATENTS) is not None
    result = {
        "cpu_ms": summaries,
        "row_by_row_over_absorbed": round(row / absorbed, 2),
        "absorbed_over_expanded": round(absorbed / expanded, 2),
        "counted": round(multiplications(rows, context) / (multiplications(rows, context) - saved), 2),
        "chosen": "expanded" if chosen else "absorbed",
        "peak_bytes": taken,
        "keys_and_values_bytes": num_blocks * BLOCK_SIZE * EXPANDED.bytes_per_token,
        "largest_difference": float(mx.abs(outs["absorbed"] - outs["expanded"]).max()),
        "largest": float(mx.abs(outs["absorbed"]).max()),
    }
    ratio = result["absorbed_over_expanded"]
    print(
        f"{rows} rows of {context}: {row:.0f}, {absorbed:.0f}, {expanded:.0f} ms, {ratio}, {result['counted']}",
        flush=True,
    )
    return result


def multiplications(rows: int, context: int) -> int:
    """Multiplications per head of the absorbed form."""
    pairs = rows * (context - rows) + rows * (rows + 1) // 2
    return pairs * (2 * RANK + ROTARY) + rows * RANK * (KEY + VALUE)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    before_arm("latents")
    cases = {f"{rows} rows, context {context}": bench_case(rows, context, repeats) for rows, context in CASES}
    save("latents", {"what": (__doc__ or "").split("\n\n")[1].replace("\n", " "), "cases": cases})


if __name__ == "__main__":
    main()
