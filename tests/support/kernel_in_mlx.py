"""The tiled kernel as MLX operations, for engines with the backend of an Apple GPU on a machine that has none.

It reads what the kernel reads, work items and block tables as arrays, so its part of a step's graph can be recorded and
replayed. It has no sliding window, soft cap or sinks.
"""

import math

import mlx.core as mx

from workbench.kernels.attention.metal.backend import MetalBackend

Q_START, NUM_ROWS, FIRST_POSITION, PARTIAL_START = 1, 2, 7, 8


def metal_kernel(name, **_text):
    """A function with the signature of ``mx.fast.metal_kernel``."""
    return {"paged_varlen": attend, "paged_varlen_split": attend, "merge_splits": merge}[name]


def attend(*, inputs, output_shapes, output_dtypes, **_launch):
    """``paged_varlen``; each split writes the whole row's result as its partial one."""
    q, k_cache, v_cache, items, block_table, _, scoring, _ = inputs
    scale = scoring[0] / math.log2(math.e)
    item, row = _owners(items, Q_START, q.shape[0])
    value_dim = output_shapes[0][2]
    out = _rows(q, k_cache, v_cache, items[item], block_table, row, scale, value_dim)
    if len(output_shapes) == 1:
        return [out.astype(output_dtypes[0])]
    item, row = _owners(items, PARTIAL_START, output_shapes[1][0])
    rows = q[items[item][:, Q_START] + row]
    partial = _rows(rows, k_cache, v_cache, items[item], block_table, row, scale, value_dim)
    return [out.astype(output_dtypes[0]), partial, mx.zeros(output_shapes[2])]


def merge(*, inputs, output_shapes, output_dtypes, **_launch):
    """``merge_splits`` of such partial results."""
    partial, _, merge_rows = inputs
    return [partial[merge_rows[: output_shapes[0][0], 0]].astype(output_dtypes[0])]


def _owners(items, start, count):
    """The item that each of ``count`` rows belongs to, and the row's place in it; one that begins at -1 has none."""
    row = mx.arange(count)[:, None]
    inside = (items[:, start] >= 0) & (row >= items[:, start]) & (row < items[:, start] + items[:, NUM_ROWS])
    item = mx.argmax(inside, axis=1)
    return item, mx.arange(count) - items[item][:, start]


def _rows(q, k_cache, v_cache, items, block_table, row, scale, value_dim):
    """Attention of each row over its own context, [rows, num_heads, value_dim]."""
    position = items[:, FIRST_POSITION] + row
    keys, values = (cache[block_table[items[:, 0]]].flatten(1, 2).astype(mx.float32) for cache in (k_cache, v_cache))
    rows, num_keys, num_kv_heads, head_dim = keys.shape
    queries = q.astype(mx.float32).reshape(rows, num_kv_heads, -1, head_dim)
    scores = queries @ keys.transpose(0, 2, 3, 1) * scale
    visible = mx.arange(num_keys) <= position[:, None]
    weights = mx.softmax(mx.where(visible[:, None, None], scores, -mx.inf), axis=-1)
    return (weights @ values[..., :value_dim].swapaxes(1, 2)).reshape(*q.shape[:2], value_dim)


class MetalInMlx(MetalBackend):
    """The backend of an Apple GPU with these kernels."""

    kernel_maker = staticmethod(lambda: metal_kernel)
