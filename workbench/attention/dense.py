"""Block-diagonal dense attention, the method that paged varlen attention replaces; kept for comparison.

The contexts of all sequences are laid side by side and every packed row is scored against all of them. A mask then
removes the other sequences and the future. It has T x total_kv entries, so a batch of more than MAX_TOKENS rows is
rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from workbench.attention.backend import AttentionBackend
from workbench.attention.gather import gather_positions, scaled_dot_product_attention, visible_range

if TYPE_CHECKING:
    from workbench.attention.metadata import AttentionMetadata
    from workbench.attention.options import AttentionOptions

MAX_TOKENS = 4096
"""Maximum number of packed rows in a batch."""


class DenseBackend(AttentionBackend):
    """One attention call over the whole batch under a block-diagonal causal mask."""

    name = "dense"

    def attend(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata, options: AttentionOptions
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
        left = options.left_window
        sequences = np.flatnonzero(metadata.query_lens).tolist()
        spans = [visible_range(metadata, seq, left) for seq in sequences]
        k, v = (
            mx.concatenate(
                [gather_positions(cache, metadata, seq, *span) for seq, span in zip(sequences, spans)]
            ).astype(q.dtype)
            for cache in (k_cache, v_cache)
        )
        mask = mx.array(block_diagonal_mask(metadata, left))
        # A masked weight is 0, and 0 * NaN would carry one sequence's NaN into all the others. So values that are not
        # finite are left out of the product and put back into the rows that see them.
        finite = mx.isfinite(v)
        out = scaled_dot_product_attention(
            q.swapaxes(0, 1)[None],
            k.swapaxes(0, 1)[None],
            mx.where(finite, v, 0).swapaxes(0, 1)[None],
            mask,
            options,
        )[0].swapaxes(0, 1)
        seen = mask.astype(mx.float32) @ (~finite).flatten(1).astype(mx.float32)
        seen = mx.repeat(seen.reshape(len(seen), *v.shape[1:]), q.shape[1] // v.shape[1], axis=1)
        return mx.where(seen > 0, mx.array(mx.nan, q.dtype), out)


def block_diagonal_mask(metadata: AttentionMetadata, left: int = -1) -> np.ndarray:
    """Bool [T, columns], True where a packed row may attend.

    The columns are, sequence by sequence, the KV positions that at least one row of the sequence may see: its whole
    context, or the part that its window reaches.
    """
    sequences = np.flatnonzero(metadata.query_lens).tolist()
    spans = np.array([visible_range(metadata, seq, left) for seq in sequences], dtype=np.int64)
    column_seq = np.repeat(sequences, spans[:, 1] - spans[:, 0])
    column_position = np.concatenate([np.arange(*span) for span in spans])
    row_seq = np.repeat(np.arange(metadata.num_seqs), metadata.query_lens)
    row_position = np.arange(metadata.num_tokens) + (metadata.seqused_k - metadata.cu_seqlens_q[1:])[row_seq]
    mask = (row_seq[:, None] == column_seq) & (column_position <= row_position[:, None])
    if left >= 0:
        mask &= column_position >= row_position[:, None] - left
    return mask
