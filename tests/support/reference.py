"""A naive paged attention in float64: one row, one head at a time, no tiles and no tricks."""

from __future__ import annotations

import numpy as np


def reference_attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    *,
    cu_seqlens_q,
    seqused_k,
    block_table,
    softmax_scale: float,
    left: int = -1,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    chunk_size: int = 0,
) -> np.ndarray:
    """float64 [T, num_heads, value_dim], straight from the definition; values in ``v_cache`` may have another size."""
    q, k_cache, v_cache = (np.asarray(x, dtype=np.float64) for x in (q, k_cache, v_cache))
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_heads = q.shape[1]
    out = np.zeros((*q.shape[:2], v_cache.shape[-1]))
    for seq, kv_len in enumerate(seqused_k):
        rows = range(cu_seqlens_q[seq], cu_seqlens_q[seq + 1])
        for row in rows:
            position = kv_len - (cu_seqlens_q[seq + 1] - row)
            first = max(0, position - left) if left >= 0 else 0
            if chunk_size:
                first = position // chunk_size * chunk_size
            visible = np.arange(first, position + 1)
            blocks = np.asarray(block_table[seq])[visible // block_size]
            keys, values = k_cache[blocks, visible % block_size], v_cache[blocks, visible % block_size]
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                scores = keys[:, kv_head] @ q[row, head] * softmax_scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if sinks is not None:
                    scores = np.append(scores, np.float64(sinks[head]))
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[row, head] = weights[: len(visible)] @ values[:, kv_head]
    return out
