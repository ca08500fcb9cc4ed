"""One layer of latent attention: random rows over a pool, its result by a backend, and by definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.mla import MultiLinear

from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.stored import STORED_DTYPES, from_stored, to_stored
from workbench.models.latents import LatentPatch
from workbench.models.layer_cache import LayerKV, LayerStep
from workbench.models.paged_layer import PagedLayerCache

NOT_A_BLOCK = 2**30


@dataclass(frozen=True)
class LatentCase:
    """A layer and a batch: sequences as (query rows, KV length) pairs."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    rank: int = 64
    rotary: int = 16
    key: int = 16
    value: int = 16
    block_size: int = 16
    stored: str = "float32"
    computed: str = "float32"
    bits: int = 0
    shared_blocks: int = 0
    seed: int = 0

    def __str__(self) -> str:
        """The name of the case in a test."""
        sizes = f"{self.num_heads}x{self.rank}+{self.rotary}to{self.key}and{self.value}"
        return f"{sizes}-{self.stored}-{self.computed}-bs{self.block_size}-seed{self.seed}"

    @property
    def layer(self) -> LayerKV:
        """The layer in the pool, with its expanded form."""
        made = LayerKV(self.num_heads, self.key + self.rotary, self.value, getattr(mx, self.computed))
        return LayerKV(1, self.rank, self.rotary, STORED_DTYPES[self.stored], latent=True, expanded=made)


class LatentLayer(nn.Module):
    """The part of an attention layer between queries and values, as mlx-lm's models write it."""

    def __init__(self, case: LatentCase) -> None:
        super().__init__()
        self.scale = 0.7 * (case.key + case.rotary) ** -0.5
        self.embed_q = MultiLinear(case.key, case.rank, case.num_heads)
        self.unembed_out = MultiLinear(case.rank, case.value, case.num_heads)

    def __call__(self, rows: list[mx.array], cache: Any) -> mx.array:
        """Values of the rows."""
        queries, rotary_queries, latents, rotary_keys = rows
        latents, rotary_keys = cache.update_and_fetch(latents, rotary_keys)
        scores = (rotary_queries * self.scale) @ rotary_keys.swapaxes(-1, -2)
        out = cache.attention(self.embed_q(queries), latents, latents, softmax_scale=self.scale, mask=scores)
        return self.unembed_out(out)


class LatentBatch:
    """The arrays of a case. The context before the batch's own rows is in the pool, all other slots hold NaN."""

    def __init__(self, case: LatentCase) -> None:
        self.case = case
        rng = np.random.default_rng([case.seed, len(case.sequences), case.rank])
        query_lens, kv_lens = np.array(case.sequences).T
        counts = -(-kv_lens // case.block_size)
        free = iter(rng.permutation(int(counts.sum()) + 3).tolist())
        table = np.full((len(kv_lens), int(counts.max()) + 1), NOT_A_BLOCK, np.int32)
        for seq, count in enumerate(counts):
            shared = min(case.shared_blocks, (kv_lens[seq] - query_lens[seq]) // case.block_size) if seq else 0
            table[seq, :shared] = table[0, :shared]
            table[seq, shared:count] = [next(free) for _ in range(count - shared)]
        positions = [np.arange(kv - q, kv) for q, kv in case.sequences]
        slots = [
            row[of // case.block_size].astype(np.int64) * case.block_size + of % case.block_size
            for row, of in zip(table, positions)
        ]
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        self._batch = starts, kv_lens.astype(np.int32), table, np.concatenate(slots), case.block_size
        self.positions = mx.array(np.concatenate(positions).astype(np.int32))

        computed, total = getattr(mx, case.computed), int(starts[-1])
        sizes = (case.num_heads, case.key), (case.num_heads, case.rotary), (1, case.rank), (1, case.rotary)
        self.rows = [
            mx.array(rng.standard_normal((total, heads, 1, dim), dtype=np.float32)).astype(computed)
            for heads, dim in sizes
        ]
        context = rng.standard_normal((int(counts.sum()) + 3, case.block_size, 1, case.rank + case.rotary))
        written = np.zeros(context.shape[:2], bool)
        for row, (q, kv) in zip(table, case.sequences):
            of = np.arange(kv - q)
            written[row[of // case.block_size], of % case.block_size] = True
        context = np.where(written[..., None, None], context, np.nan).astype(np.float32)
        self.pool = to_stored(mx.array(context).astype(computed), STORED_DTYPES[case.stored])
        self.model = LatentLayer(case)
        self.model.set_dtype(computed)
        if case.bits:
            nn.quantize(self.model, group_size=32, bits=case.bits)
        mx.eval(self.rows, self.pool, self.model.parameters())

    @property
    def metadata(self) -> AttentionMetadata:
        """The batch, without anything derived from it."""
        return AttentionMetadata(*self._batch)

    def run(self, backend: Any, *, expands_all: bool = False, expands: bool = True) -> mx.array:
        """Values by a backend, [T, num_heads, 1, value]; ``written`` is the pool afterwards."""
        pool = self.pool + 0
        spec = self.case.layer if expands else replace(self.case.layer, expanded=None)
        cache = PagedLayerCache(spec, (pool, pool), backend)
        cache.expands_all = expands_all
        patch = LatentPatch(self.model)
        try:
            cache.begin_step(LayerStep(self.positions, self.metadata))
            out = self.model(self.rows, cache)
            mx.eval(out, pool)
        finally:
            cache.end_step()
            patch.restore()
        self.cache, self.written = cache, pool
        return out

    def _matrix(self, module: nn.Module) -> np.ndarray:
        if not self.case.bits:
            return np.array(module.weight.astype(mx.float32)).astype(np.float64)
        whole = mx.dequantize(module.weight, module.scales, module.biases, 32, self.case.bits)
        return np.array(whole.astype(mx.float32)).astype(np.float64)

    def reference(self) -> np.ndarray:
        """The same by definition, in float64, of the numbers that the pool's elements stand for."""
        case, (starts, kv_lens, table, slots, size) = self.case, self._batch
        queries, rotary_queries, latents, rotary_keys = self.rows
        pool, new = self.pool + 0, mx.concatenate([latents, rotary_keys], axis=-1)[:, 0]
        pool[mx.array(slots // size), mx.array(slots % size)] = to_stored(new, pool.dtype)
        numbers = np.array(from_stored(pool).astype(mx.float32)).astype(np.float64)
        q, r = (np.array(one.astype(mx.float32)).astype(np.float64)[:, :, 0] for one in (queries, rotary_queries))
        up, down = self._matrix(self.model.embed_q), self._matrix(self.model.unembed_out)
        out = np.zeros((int(starts[-1]), case.num_heads, case.value))
        for seq, kv in enumerate(kv_lens.tolist()):
            of = np.arange(kv)
            context = numbers[table[seq, of // size], of % size, 0]
            keys = np.einsum("pr,hrn->hpn", context[:, : case.rank], up)
            values = np.einsum("pr,hvr->hpv", context[:, : case.rank], down)
            for row in range(starts[seq], starts[seq + 1]):
                end = kv - (starts[seq + 1] - row) + 1
                scores = np.einsum("hn,hpn->hp", q[row], keys[:, :end])
                scores = self.model.scale * (scores + r[row] @ context[:end, case.rank :].T)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[row] = np.einsum("hp,hpv->hv", weights / weights.sum(axis=1, keepdims=True), values[:, :end])
        return out


def error_of(result: mx.array, expected: np.ndarray) -> float:
    """Largest error relative to the largest element; inf for a number that is not finite."""
    found = np.array(result.astype(mx.float32)).astype(np.float64).reshape(expected.shape)
    return float(np.abs(found - expected).max() / np.abs(expected).max()) if np.isfinite(found).all() else np.inf
