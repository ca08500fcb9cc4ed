"""Paged varlen attention as one function."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.selection import get_backend
from workbench.kernels.attention.validate import int32_array, validate_metadata, validate_tensors


def paged_varlen_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    *,
    cu_seqlens_q: mx.array | np.ndarray | Sequence[int],
    seqused_k: mx.array | np.ndarray | Sequence[int],
    block_table: mx.array | np.ndarray | Sequence[Sequence[int]],
    softmax_scale: float,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: mx.array | np.ndarray | None = None,
    chunk_size: int = 0,
    value_dim: int = 0,
    backend: str = "auto",
) -> mx.array:
    """Causal attention of a packed batch over a paged KV cache that is already filled.

    The rows of sequence i are ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]``. They are the last tokens of its context
    of ``seqused_k[i]`` positions, so prompt chunks, whole prompts and decodes (one row) mix freely. The argument
    names are those of vLLM's unified attention.

    Args:
        q: Queries, [T, num_heads, head_dim]; float32, float16 or bfloat16.
        k_cache: Cached keys, [num_blocks, block_size, num_kv_heads, head_dim]; position p of sequence i lies in block
            ``block_table[i, p // block_size]`` at offset ``p % block_size``. Of the types of q, or int8 rows with
            their scale (`workbench.kernels.attention.stored`).
        v_cache: Cached values, like ``k_cache``.
        cu_seqlens_q: int32 [num_seqs + 1], cumulative query lengths from 0 to T; a sequence may have no rows.
        seqused_k: int32 [num_seqs], KV length of each sequence, this step's tokens included.
        block_table: int32 [num_seqs, max_blocks]; entries past a sequence's last block are never read.
        softmax_scale: Factor on q · k.
        window_size: (left, right) as in flash-attn. A row at position p sees [p - left, p], or [0, p] when left is -1.
            Attention is causal, so right is 0 or -1 and both mean the same.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 turns it off.
        sinks: Attention sinks, [num_heads]: a score per head that takes part in the softmax but has no value.
        chunk_size: Chunked attention: a row at position p sees [p - p % chunk_size, p]; 0 turns it off.
        value_dim: Latent attention: a value is the first value_dim elements of its key, and ``v_cache`` is ``k_cache``;
            0 if values are stored by themselves.
        backend: One of `workbench.kernels.attention.BACKEND_NAMES`.

    Returns:
        [T, num_heads, head_dim] in q's dtype; of latents, [T, num_heads, value_dim].

    Raises:
        ValueError: Malformed arguments; the message names the sequence and the value. Nothing is computed.
        RuntimeError: The backend is not available on this machine.
    """
    validate_tensors(q, k_cache, v_cache, sinks)
    options = AttentionOptions(
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=None if sinks is None else mx.array(sinks),
        chunk_size=chunk_size,
        value_dim=value_dim,
    )
    metadata = AttentionMetadata(
        cu_seqlens_q=int32_array("cu_seqlens_q", cu_seqlens_q, 1),
        seqused_k=int32_array("seqused_k", seqused_k, 1),
        block_table=int32_array("block_table", block_table, 2),
        slot_mapping=None,
        block_size=k_cache.shape[1],
    )
    validate_metadata(
        metadata.cu_seqlens_q,
        metadata.seqused_k,
        metadata.block_table,
        num_tokens=q.shape[0],
        num_blocks=k_cache.shape[0],
        block_size=metadata.block_size,
    )
    return get_backend(backend).attend(q, k_cache, v_cache, metadata, options)
