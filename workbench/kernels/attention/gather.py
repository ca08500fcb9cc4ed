"""Paged attention from MLX operations alone; it runs on any device, in every dtype, and needs no compiler.

Each sequence's blocks are gathered into one run of keys and values for ``mx.fast.scaled_dot_product_attention``. The
other backends are compared with this one, and it is the fallback when they cannot run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.stored import from_stored, value_dim_of
from workbench.kernels.attention.work_list import first_visible

if TYPE_CHECKING:
    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions


class GatherBackend(AttentionBackend):
    """Gathers the blocks of each sequence, then attends sequence by sequence.

    Only positions that at least one row of the sequence may see are gathered, so a stale slot or a block before the
    window can never reach an output. Inside a chunk the mask is MLX's: a value that is not finite reaches every row of
    its chunk, the earlier rows too (the cpu and dense backends keep those clean).
    """

    name = "gather"

    def attend(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata, options: AttentionOptions
    ) -> mx.array:
        """See `AttentionBackend.attend`."""
        reach = options.reach
        outputs = []
        for seq in np.flatnonzero(metadata.query_lens).tolist():
            start, stop = metadata.cu_seqlens_q[seq : seq + 2].tolist()
            first, end = visible_range(metadata, seq, reach)
            k, v = (gather_positions(cache, metadata, seq, first, end) for cache in (k_cache, v_cache))
            v = v[..., : value_dim_of(v_cache, options)]
            mask = causal_mask(stop - start, first, end, reach)
            queries, keys, values = (x.astype(q.dtype).swapaxes(0, 1)[None] for x in (q[start:stop], k, v))
            out = scaled_dot_product_attention(queries, keys, values, mask, options)
            outputs.append(out[0].swapaxes(0, 1))
        return mx.concatenate(outputs) if outputs else no_rows(q, v_cache, options)


def no_rows(q: mx.array, v_cache: mx.array, options: AttentionOptions) -> mx.array:
    """The attention of a batch without rows, [0, num_heads, value_dim]."""
    return mx.zeros((0, q.shape[1], value_dim_of(v_cache, options)), q.dtype)


def visible_range(metadata: AttentionMetadata, seq: int, reach: int) -> tuple[int, int]:
    """The KV positions [first, end) that at least one query row of a sequence may see."""
    end = int(metadata.seqused_k[seq])
    return int(first_visible(end - int(metadata.query_lens[seq]), reach)), end


def gather_positions(cache: mx.array, metadata: AttentionMetadata, seq: int, first: int, end: int) -> mx.array:
    """KV positions [first, end) of one sequence, contiguous, [end - first, num_kv_heads, head_dim]."""
    size = metadata.block_size
    blocks = metadata.block_table[seq, first // size : -(-end // size)]
    run = cache[mx.array(blocks)].flatten(0, 1)
    skipped = first // size * size
    return from_stored(run[first - skipped : end - skipped])


def causal_mask(num_rows: int, first: int, end: int, reach: int) -> mx.array | str | None:
    """The mask of the last ``num_rows`` of the positions [first, end), in the form that MLX accepts."""
    if num_rows == 1:
        return None
    last_row_sees = int(first_visible(end - 1, reach))
    if last_row_sees <= first:
        return "causal"
    rows, keys = np.arange(end - num_rows, end)[:, None], np.arange(first, end)
    return mx.array((keys <= rows) & (keys >= first_visible(rows, reach)))


def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | str | None,
    options: AttentionOptions,
) -> mx.array:
    """MLX's attention plus the soft cap that it lacks.

    Args:
        q: Queries, [1, num_heads, rows, head_dim].
        k: Keys, [1, num_kv_heads, keys, head_dim].
        v: Values, [1, num_kv_heads, keys, value_dim].
        mask: "causal", a bool array [rows, keys] that is True where a row may attend, or None.
        options: Scale, soft cap and sinks; the mask replaces the window.

    Returns:
        [1, num_heads, rows, value_dim] in q's dtype.
    """
    scale, softcap = options.softmax_scale, options.softcap
    sinks = None if options.sinks is None else options.sinks.astype(q.dtype)
    if not softcap:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    _, num_heads, rows, head_dim = q.shape
    num_kv_heads, keys = k.shape[1:3]
    q32 = q.astype(mx.float32).reshape(1, num_kv_heads, -1, rows, head_dim) * scale
    scores = q32 @ k.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    scores = softcap * mx.tanh(scores / softcap)
    if isinstance(mask, str):
        mask = mx.arange(keys)[None] <= mx.arange(keys - rows, keys)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        column = sinks.astype(mx.float32).reshape(1, num_kv_heads, -1, 1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :keys]
    out = weights @ v.astype(mx.float32)[:, :, None]
    return out.reshape(1, num_heads, rows, v.shape[-1]).astype(q.dtype)
