"""Block-diagonal dense attention: what paged varlen attention replaces, kept to be looked at and compared with.

All sequences' contexts are laid side by side and every packed row is scored against all of them; a mask then
removes the other sequences and the future. The mask has T x total_kv entries, which is why nobody serves like
this: beyond MAX_TOKENS rows it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from workbench.attention.backend import WHOLE, AttentionBackend
from workbench.attention.gather import gather_positions, scaled_dot_product_attention, visible_range

if TYPE_CHECKING:
    from workbench.attention.metadata import AttentionMetadata

MAX_TOKENS = 4096
"""Packed rows per batch at most."""


class DenseBackend(AttentionBackend):
    """One attention call over the whole batch under a block-diagonal causal mask."""

    name = "dense"

    def tile_shape(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
        """All rows of a sequence at once, against all of its context."""
        return WHOLE, WHOLE

    def attend(
        self,
        q: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        metadata: AttentionMetadata,
        *,
        softmax_scale: float,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """See `AttentionBackend.attend`.

        Raises:
            ValueError: The batch has more than MAX_TOKENS rows.
        """
        if metadata.num_tokens > MAX_TOKENS:
            raise ValueError(
                f"the dense backend takes at most {MAX_TOKENS} packed tokens and the batch has "
                f"{metadata.num_tokens}: its mask grows with the square; use backend 'gather' or 'cpu', or a smaller "
                "max_num_batched_tokens"
            )
        if metadata.num_tokens == 0:
            return mx.zeros_like(q)
        left = window_size[0]
        sequences = np.flatnonzero(metadata.query_lens)
        spans = [visible_range(metadata, seq, left) for seq in sequences]
        k, v = (
            mx.concatenate(
                [gather_positions(cache, metadata, seq, *span) for seq, span in zip(sequences, spans)]
            ).astype(q.dtype)
            for cache in (k_cache, v_cache)
        )
        mask = mx.array(block_diagonal_mask(metadata, left))
        # A masked weight is 0, and 0 * NaN would carry a sequence's NaN into all others: such values are left out
        # of the product and put back into the rows that see them.
        finite = mx.isfinite(v)
        out = scaled_dot_product_attention(
            q.swapaxes(0, 1)[None],
            k.swapaxes(0, 1)[None],
            mx.where(finite, v, 0).swapaxes(0, 1)[None],
            softmax_scale,
            mask,
            softcap,
            None if sinks is None else mx.array(sinks).astype(q.dtype),
        )[0].swapaxes(0, 1)
        seen = mask.astype(mx.float32) @ (~finite).flatten(1).astype(mx.float32)
        seen = mx.repeat(seen.reshape(len(seen), *v.shape[1:]), q.shape[1] // v.shape[1], axis=1)
        return mx.where(seen > 0, mx.array(mx.nan, q.dtype), out)


def block_diagonal_mask(metadata: AttentionMetadata, left: int = -1) -> np.ndarray:
    """Bool [T, columns], True where a packed row may attend.

    The columns are, sequence after sequence, the KV positions that some row of the sequence may see: all of its
    context, or what its window reaches.
    """
    sequences = np.flatnonzero(metadata.query_lens)
    spans = np.array([visible_range(metadata, seq, left) for seq in sequences], dtype=np.int64)
    column_seq = np.repeat(sequences, spans[:, 1] - spans[:, 0])
    column_position = np.concatenate([np.arange(*span) for span in spans])
    row_seq = np.repeat(np.arange(metadata.num_seqs), metadata.query_lens)
    row_position = np.arange(metadata.num_tokens) + (metadata.seqused_k - metadata.cu_seqlens_q[1:])[row_seq]
    mask = (row_seq[:, None] == column_seq) & (column_position <= row_position[:, None])
    if left >= 0:
        mask &= column_position >= row_position[:, None] - left
    return mask
