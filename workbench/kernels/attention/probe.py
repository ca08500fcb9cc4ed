"""Small random batches and attention in float64, to compare a backend with."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.stored import from_stored, to_stored, value_dim_of
from workbench.kernels.attention.work_list import first_visible

ERROR_LIMIT = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 8e-3, "int8": 1e-3}
"""Largest error that rounding explains, relative to the largest element of the result, by dtype of the cache.

int8: queries and results are float16, and the codes with their scales count as exact."""

GATHER_ERROR_LIMIT = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "int8": 2e-3}
"""The same for gather, which leaves the arithmetic to MLX: it rounds to 16 bits more than once."""
TF32_ERROR = 5e-3
"""The same for gather in float32 on a GPU: MLX's products are in TF32 on an M5 with macOS 26, and on NVIDIA GPUs."""


def error_limit(backend_name: str, dtype: str, *, on_gpu: bool) -> float:
    """Largest error that rounding explains for a backend; the compiled kernels have one bound everywhere."""
    if backend_name != "gather":
        return ERROR_LIMIT[dtype]
    return TF32_ERROR if on_gpu and dtype == "float32" else GATHER_ERROR_LIMIT[dtype]


@dataclass(frozen=True)
class Probe:
    """The description of a batch to try a backend on.

    Attributes:
        name: Name of the case, for a table.
        sequences: (query rows, KV length) of each sequence.
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads.
        head_dim: Elements per head.
        block_size: Tokens per KV block.
        dtype: Element type of the caches, "float32", "float16", "bfloat16" or "int8".
        left: Left window as in flash-attn, -1 for none.
        softcap: Soft cap, 0 for none.
        sinks: Whether there are attention sinks.
        mean_logit: Mean of the scores.
        value_dim: Elements of a value per head, 0 for as many as a key has.
        latent: Whether a value is the first ``value_dim`` elements of its key.
        chunk_size: Positions of a chunk in chunked attention, 0 for none.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float16"
    left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    mean_logit: float = 0.0
    value_dim: int = 0
    latent: bool = False
    chunk_size: int = 0

    @property
    def size_of_values(self) -> int:
        """Elements of a value per head."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True, eq=False)
class ProbeBatch:
    """The arguments of ``attend`` for a probe."""

    q: mx.array
    k_cache: mx.array
    v_cache: mx.array
    metadata: AttentionMetadata
    options: AttentionOptions

    def run(self, backend: AttentionBackend) -> mx.array:
        """Run a backend on the batch; the result is evaluated."""
        out = backend.attend(self.q, self.k_cache, self.v_cache, self.metadata, self.options)
        mx.eval(out)
        return out


def probe_batch(probe: Probe, seed: int = 0) -> ProbeBatch:
    """Random queries, keys and values in permuted blocks; slots that belong to no position hold NaN."""
    generator = np.random.default_rng(seed)
    query_lens, kv_lens = np.array(probe.sequences).T
    held_blocks = -(-kv_lens // probe.block_size)
    num_blocks = int(held_blocks.sum()) + 1
    blocks = np.split(generator.permutation(num_blocks), np.cumsum(held_blocks))
    block_table = np.zeros((len(kv_lens), int(held_blocks.max())), dtype=np.int32)
    written = np.zeros((num_blocks, probe.block_size, 1, 1), dtype=bool)
    for seq, kv_len in enumerate(kv_lens):
        block_table[seq, : held_blocks[seq]] = blocks[seq]
        positions = np.arange(kv_len)
        written[blocks[seq][positions // probe.block_size], positions % probe.block_size] = True

    scale = probe.head_dim**-0.5
    common = (abs(probe.mean_logit) / scale / probe.head_dim) ** 0.5
    slots = (num_blocks, probe.block_size, probe.num_kv_heads)
    q = generator.standard_normal((int(query_lens.sum()), probe.num_heads, probe.head_dim)) + common
    k = generator.standard_normal((*slots, probe.head_dim)) + np.copysign(common, probe.mean_logit)
    v = generator.standard_normal((*slots, probe.size_of_values))
    stored = getattr(mx, probe.dtype)
    dtype = mx.float16 if stored == mx.int8 else stored
    metadata = AttentionMetadata(
        cu_seqlens_q=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seqused_k=kv_lens.astype(np.int32),
        block_table=block_table,
        slot_mapping=None,
        block_size=probe.block_size,
    )
    options = AttentionOptions(
        softmax_scale=scale,
        window_size=(probe.left, 0),
        softcap=probe.softcap,
        sinks=mx.array(generator.standard_normal(probe.num_heads).astype(np.float32)) if probe.sinks else None,
        chunk_size=probe.chunk_size,
        value_dim=probe.size_of_values if probe.latent else 0,
    )
    k, v = np.where(written, k, np.nan), np.where(written, v, np.nan)
    q_array, k_array, v_array = (mx.array(x.astype(np.float32)) for x in (q, k, v))
    k_cache = to_stored(k_array, stored)
    v_cache = k_cache if probe.latent else to_stored(v_array, stored)
    return ProbeBatch(q_array.astype(dtype), k_cache, v_cache, metadata, options)


def float64_attention(batch: ProbeBatch) -> np.ndarray:
    """Attention of a batch by its definition, in float64: [T, num_heads, value_dim]."""
    q, k_cache, v_cache = (to_float64(x) for x in (batch.q, from_stored(batch.k_cache), from_stored(batch.v_cache)))
    v_cache = v_cache[..., : value_dim_of(batch.v_cache, batch.options)]
    block_size, num_kv_heads = k_cache.shape[1:3]
    heads = np.arange(q.shape[1]) * num_kv_heads // q.shape[1]
    options = batch.options
    softcap, sinks = options.softcap, options.sinks
    out = np.zeros((*q.shape[:2], v_cache.shape[-1]))
    for seq, kv_len in enumerate(batch.metadata.seqused_k):
        start, stop = batch.metadata.cu_seqlens_q[seq : seq + 2]
        keys = np.arange(kv_len)
        slots = batch.metadata.block_table[seq, keys // block_size], keys % block_size
        rows = np.arange(kv_len - (stop - start), kv_len)[:, None]
        visible = (keys <= rows) & (keys >= first_visible(rows, options.reach))
        scores = np.einsum("rhd,khd->hrk", q[start:stop], k_cache[slots][:, heads]) * options.softmax_scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores = np.where(visible, scores, -np.inf)
        if sinks is not None:
            sink_scores = np.broadcast_to(to_float64(sinks)[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sink_scores], axis=2)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        out[start:stop] = np.einsum("hrk,khd->rhd", weights[:, :, :kv_len], v_cache[slots][:, heads])
    return out


def to_float64(array: mx.array) -> np.ndarray:
    """An MLX array of any float type as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def relative_error(result: mx.array, expected: np.ndarray) -> float:
    """Largest error relative to the largest element; NaN when the result is not finite.

    Example:
        >>> round(relative_error(mx.array([1.0, 2.02]), np.array([1.0, 2.0])), 4)
        0.01
    """
    return float(np.abs(to_float64(result) - expected).max() / np.abs(expected).max())
