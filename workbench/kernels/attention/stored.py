"""Keys and values as the pool stores them: numbers of one type, or codes of 8 bits with a scale.

A row is the key, or the value, of one token in one head. With codes, a row is its codes and then its scale, a float32::

    row     head_dim codes, int8 | scale, 4 bytes          number = code * scale, scale = largest magnitude / 127

The scale belongs to a token and a head (vLLM's ``int8_per_token_head``), not to a block and a head: a later token with
larger numbers would change the scale of its block, and so the codes that earlier tokens, and other requests that share
the block, have been computed with. A row is written once, whole, so whatever moves blocks moves scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from workbench.kernels.attention.dtypes import DTYPES

if TYPE_CHECKING:
    from workbench.kernels.attention.options import AttentionOptions

STORED_DTYPES = {**DTYPES, "int8_per_token_head": mx.int8}
"""Element type of the pool's arrays, by `EngineConfig.kv_cache_dtype`."""

SCALE_BYTES = 4
LARGEST_CODE = 127


def stored_dim(head_dim: int, dtype: mx.Dtype) -> int:
    """Elements of a row in an array of a type."""
    return head_dim + SCALE_BYTES if dtype == mx.int8 else head_dim


def head_dim_of(cache: mx.array) -> int:
    """Numbers per row of an array of keys or values."""
    return cache.shape[-1] - SCALE_BYTES if cache.dtype == mx.int8 else cache.shape[-1]


def value_dim_of(v_cache: mx.array, options: AttentionOptions) -> int:
    """Numbers per value of a layer: in latent attention, a part of those in a row of the cache."""
    return options.value_dim or head_dim_of(v_cache)


def to_stored(rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Keys or values, [..., head_dim], as rows of an array of a type, [..., stored_dim].

    >>> to_stored(mx.array([[1.0, -2.0, 0.5]]), mx.int8)[:, :3].tolist()
    [[64, -127, 32]]
    """
    if dtype != mx.int8:
        return rows if rows.dtype == dtype else rows.astype(dtype)
    numbers = rows.astype(mx.float32)
    largest = mx.max(mx.abs(numbers), axis=-1, keepdims=True)
    codes = mx.round(numbers * (LARGEST_CODE / mx.where(largest == 0, 1.0, largest))).astype(mx.int8)
    return mx.concatenate([codes, (largest / LARGEST_CODE).view(mx.int8)], axis=-1)


def from_stored(rows: mx.array) -> mx.array:
    """The opposite: codes become float32, other numbers keep their type."""
    if rows.dtype != mx.int8:
        return rows
    codes, scales = rows[..., :-SCALE_BYTES], mx.contiguous(rows[..., -SCALE_BYTES:]).view(mx.float32)
    return codes.astype(mx.float32) * scales
