"""Contexts of trials far from the start: random keys and values, in the plain model's caches and in a pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.models.layer_cache import LayerKV
from workbench.models.paged_cache import PagedKVCache
from workbench.models.state_cache import LayerState

BLOCK_SIZE = 64
_KEY_SCALE, _VALUE_SCALE = 2.0, 2.0
"""Large keys: behind a long context, few keys get most of the attention, so that its scale shows."""

Rows = tuple[np.ndarray, np.ndarray]


class _Shared(KVCache):
    """A cache whose context is an array that other layers have too; it keeps its own rows alone."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        super().__init__()
        self.offset = keys.shape[2]
        self._context = keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The context, and the rows so far."""
        if self.keys is not None:
            keys, values = mx.concatenate([self.keys, keys], axis=2), mx.concatenate([self.values, values], axis=2)
        self.offset += keys.shape[2] - (0 if self.keys is None else self.keys.shape[2])
        self.keys, self.values = keys, values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The result of the last `update_and_fetch`, for layers that share it."""
        keys, values = (mx.concatenate([a, b], axis=2) for a, b in zip(self._context, (self.keys, self.values)))
        return keys, values


@dataclass
class Case:
    """Tokens behind a context, and the plain model's logits of them.

    Attributes:
        context: Length of the context: 0 for a run without one.
        token_ids: int32 [num_tokens].
        expected: float32 [num_tokens, vocab_size].
    """

    context: int
    token_ids: np.ndarray
    expected: np.ndarray

    @property
    def place(self) -> str:
        """The positions of the case, for a message."""
        first, last = self.context, self.context + len(self.token_ids) - 1
        return f"at positions {first} to {last}"


@functools.lru_cache(maxsize=4)
def _context_rows(num_kv_heads: int, k_dim: int, v_dim: int, length: int, seed: int) -> Rows:
    """Random keys and values, float32 [length, num_kv_heads, dim] each."""

    def draw(which: int, dim: int, scale: float) -> np.ndarray:
        numbers = np.random.default_rng([seed, which]).standard_normal((length, num_kv_heads, dim), dtype=np.float32)
        return numbers * np.float32(scale)

    return draw(1, k_dim, _KEY_SCALE), draw(2, v_dim, _VALUE_SCALE)


def _rows_of(layer: LayerKV, length: int, seed: int) -> Rows:
    """Those of a context; one of another length begins with the same ones."""
    size = 1 << (length - 1).bit_length()
    keys, values = _context_rows(layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim, size, seed)
    return keys[:length], values[:length]


def behind(
    entry: Any,
    specs: Iterator[LayerKV | LayerState],
    context: int,
    seed: int,
    shared: dict[LayerKV, tuple[mx.array, mx.array]],
) -> Any:
    """A fresh cache of the plain model as a context leaves it; recurrent layers begin without one."""
    if isinstance(entry, CacheList):
        return CacheList(*(behind(one, specs, context, seed, shared) for one in entry.caches))
    spec = next(specs)
    if isinstance(entry, ArraysCache) or isinstance(spec, LayerState):
        return entry
    if spec not in shared:
        first = max(0, context - entry.max_size) if isinstance(entry, RotatingKVCache) else 0
        keys, values = (mx.array(rows[first:]).swapaxes(0, 1)[None] for rows in _rows_of(spec, context, seed))
        shared[spec] = keys.astype(spec.dtype), values.astype(spec.dtype)
    if not isinstance(entry, RotatingKVCache | ChunkedKVCache):
        return _Shared(*shared[spec])
    entry.update_and_fetch(*shared[spec])
    entry.offset = context
    return entry


class Pool:
    """Blocks of cases in a pool: whole blocks of contexts are shared by all layers, later ones belong to a layer.

    Args:
        caches: The caches, each of which is a KV cache group of the pool.
        cases: The sequences.
        seed: Seed of the contexts.
    """

    def __init__(self, caches: Sequence[LayerKV | LayerState], cases: Sequence[Case], seed: int) -> None:
        self._caches, self._cases, self._seed = caches, cases, seed
        self._shared = max(case.context for case in cases) // BLOCK_SIZE
        self._own = [-(-(c.context + len(c.token_ids)) // BLOCK_SIZE) - c.context // BLOCK_SIZE for c in cases]
        self.num_blocks = 1 + self._shared + len(caches) * sum(self._own)

    def _table(self, cache: int, index: int) -> list[int]:
        """The block table of a case in a cache."""
        first = 1 + self._shared + cache * sum(self._own) + sum(self._own[:index])
        shared = self._cases[index].context // BLOCK_SIZE
        return [*range(1, 1 + shared), *range(first, first + self._own[index])]

    def fill(self, kv_cache: PagedKVCache) -> None:
        """Write the contexts."""
        longest = max(case.context for case in self._cases)
        by_array: dict[int, tuple[mx.array, np.ndarray]] = {}
        layers = iter(kv_cache.layers)
        for cache, spec in enumerate(self._caches):
            if isinstance(spec, LayerState):
                continue
            layer = next(layers)
            if not longest:
                continue
            keys, values = _rows_of(spec, longest, self._seed)
            written = [(layer.k_cache, keys), (layer.v_cache, values)]
            if spec.latent:
                written = [(layer.k_cache, np.concatenate([keys, values], axis=-1))]
            for array, rows in written:
                if id(array) not in by_array:
                    memory = np.zeros((self.num_blocks, BLOCK_SIZE, *rows.shape[1:]), np.float32)
                    whole = rows[: self._shared * BLOCK_SIZE]
                    memory[1 : 1 + self._shared] = whole.reshape(self._shared, BLOCK_SIZE, *rows.shape[1:])
                    by_array[id(array)] = array, memory
                memory = by_array[id(array)][1]
                for index, case in enumerate(self._cases):
                    rest = rows[case.context // BLOCK_SIZE * BLOCK_SIZE : case.context]
                    memory[self._table(cache, index)[case.context // BLOCK_SIZE], : len(rest)] = rest
        for array, memory in by_array.values():
            array[...] = mx.array(memory).astype(array.dtype)
        mx.eval(kv_cache.arrays)

    def step(self, first: int, counts: Sequence[int]) -> tuple[list[AttentionMetadata], np.ndarray, np.ndarray]:
        """Rows of each case from one on: the batch as each cache sees it, positions and tokens."""
        starts = [first % len(case.token_ids) for case in self._cases]
        tokens = [case.token_ids[start:][:count] for case, start, count in zip(self._cases, starts, counts)]
        ranges = [
            np.arange(case.context + start, case.context + start + count, dtype=np.int32)
            for case, start, count in zip(self._cases, starts, counts)
        ]
        metadata = [self._metadata(cache, spec, ranges) for cache, spec in enumerate(self._caches)]
        return metadata, np.concatenate(ranges), np.concatenate(tokens)

    def _metadata(self, cache: int, spec: LayerKV | LayerState, ranges: Sequence[np.ndarray]) -> AttentionMetadata:
        tables = [self._table(cache, index) for index in range(len(ranges))]
        block_table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(block_table, tables):
            row[: len(table)] = table
        slots = [
            row[of // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + of % BLOCK_SIZE
            for row, of in zip(block_table, ranges)
        ]
        counts = np.array([len(of) for of in ranges], np.int32)
        lengths = np.array([of[-1] + 1 for of in ranges], np.int32)
        metadata = AttentionMetadata(
            cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            seqused_k=lengths,
            block_table=block_table,
            slot_mapping=np.concatenate(slots),
            block_size=BLOCK_SIZE,
        )
        return replace(metadata, seqused_k=counts) if isinstance(spec, LayerState) else metadata
