"""Block-diagonal dense attention, the method that paged varlen attention replaces; kept for comparison.

The contexts of all sequences are laid side by side and every packed row is scored against all of them. A mask then
removes the other sequences and the future. It has rows x total_kv entries, so a batch is computed in parts of at most
MAX_ROWS packed rows, each beside the contexts of the sequences in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.gather import gather_positions, no_rows, scaled_dot_product_attention
from workbench.kernels.attention.stored import value_dim_of
from workbench.kernels.attention.work_list import first_visible

if TYPE_CHECKING:
    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions

MAX_ROWS = 4096
"""Maximum number of packed rows in one mask."""


class Part(NamedTuple):
    """Some rows of one sequence, with the KV positions that at least one of them may see.

    Attributes:
        seq: The sequence.
        begin: Its first row, by the position of its token.
        end: The end of its rows, and of the KV positions.
        first: The first KV position.
    """

    seq: int
    begin: int
    end: int
    first: int


def parts_of(metadata: AttentionMetadata, rows: range, reach: int) -> list[Part]:
    """The sequences of some packed rows."""
    found = []
    for seq in np.flatnonzero(metadata.query_lens).tolist():
        start, stop = int(metadata.cu_seqlens_q[seq]), int(metadata.cu_seqlens_q[seq + 1])
        to_position = int(metadata.seqused_k[seq]) - stop
        begin, end = max(start, rows.start) + to_position, min(stop, rows.stop) + to_position
        if begin < end:
            found.append(Part(seq, begin, end, int(first_visible(begin, reach))))
    return found


class DenseBackend(AttentionBackend):
    """Attention calls over the whole batch, in parts of MAX_ROWS rows, under a block-diagonal causal mask."""

    name = "dense"

    def attend(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata, options: AttentionOptions
    ) -> mx.array:
        """See `AttentionBackend.attend`."""
        if metadata.num_tokens == 0:
            return no_rows(q, v_cache, options)
        outs = []
        for start in range(0, metadata.num_tokens, MAX_ROWS):
            rows = range(start, min(start + MAX_ROWS, metadata.num_tokens))
            parts = parts_of(metadata, rows, options.reach)
            outs.append(_attend(q[rows.start : rows.stop], k_cache, v_cache, metadata, parts, options))
        return mx.concatenate(outs) if len(outs) > 1 else outs[0]


def _attend(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    metadata: AttentionMetadata,
    parts: list[Part],
    options: AttentionOptions,
) -> mx.array:
    """Attention of the rows of some parts, which are side by side in ``q``."""
    k, v = (
        mx.concatenate([gather_positions(cache, metadata, part.seq, part.first, part.end) for part in parts]).astype(
            q.dtype
        )
        for cache in (k_cache, v_cache)
    )
    mask = mx.array(block_diagonal_mask(parts, options.reach))
    v = v[..., : value_dim_of(v_cache, options)]
    # A masked weight is 0, and 0 * NaN would carry one sequence's NaN into all the others. So values that are not
    # finite are left out of the product and put back into the rows that see them.
    finite = mx.isfinite(v)
    out = scaled_dot_product_attention(
        q.swapaxes(0, 1)[None], k.swapaxes(0, 1)[None], mx.where(finite, v, 0).swapaxes(0, 1)[None], mask, options
    )[0].swapaxes(0, 1)
    seen = mask.astype(mx.float32) @ (~finite).flatten(1).astype(mx.float32)
    seen = mx.repeat(seen.reshape(len(seen), *v.shape[1:]), q.shape[1] // v.shape[1], axis=1)
    return mx.where(seen > 0, mx.array(mx.nan, q.dtype), out)


def block_diagonal_mask(parts: list[Part], reach: int = -1) -> np.ndarray:
    """Bool [rows, columns], True where a row may attend; the columns are the KV positions of each part in turn."""
    columns, rows = [part.end - part.first for part in parts], [part.end - part.begin for part in parts]
    column_part = np.repeat(np.arange(len(parts)), columns)
    column_position = np.concatenate([np.arange(part.first, part.end) for part in parts])
    row_part = np.repeat(np.arange(len(parts)), rows)
    row_position = np.concatenate([np.arange(part.begin, part.end) for part in parts])
    mask = (row_part[:, None] == column_part) & (column_position <= row_position[:, None])
    return mask & (column_position >= first_visible(row_position, reach)[:, None])
