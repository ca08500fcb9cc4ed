"""Checks on the arrays that a caller hands to paged varlen attention.

MLX does not check the indices of a gather: a block id slightly past the end silently reads garbage, and a larger one
ends the process. So every array is checked before anything is computed, and an error names the sequence, the value
and the allowed range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from workbench.kernels.attention.dtypes import DTYPES, dtype_name
from workbench.kernels.attention.stored import STORED_DTYPES, head_dim_of


def validate_tensors(q: mx.array, k_cache: mx.array, v_cache: mx.array, sinks: Any = None) -> None:
    """Check shapes and dtypes.

    Raises:
        ValueError: An array's shape or dtype is not the one that `paged_varlen_attention` documents.
    """
    for name, array, layout in (
        ("q", q, ("T", "num_heads", "head_dim")),
        ("k_cache", k_cache, ("num_blocks", "block_size", "num_kv_heads", "head_dim")),
        ("v_cache", v_cache, ("num_blocks", "block_size", "num_kv_heads", "head_dim")),
    ):
        if not isinstance(array, mx.array):
            raise ValueError(f"{name} is a {type(array).__name__}; it must be an mlx.core.array")
        if array.ndim != len(layout):
            raise ValueError(f"{name} has shape {array.shape}; it must be [{', '.join(layout)}]")
        *others, last = map(dtype_name, (DTYPES if name == "q" else STORED_DTYPES).values())
        if dtype_name(array.dtype) not in (*others, last):
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {', '.join(others)} or {last}")
        if 0 in array.shape[1:]:
            raise ValueError(f"{name} has shape {array.shape}; only T and num_blocks may be 0")
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache is {k_cache.dtype} {k_cache.shape} and v_cache is {v_cache.dtype} {v_cache.shape}; "
            "they must agree"
        )
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    if head_dim != head_dim_of(k_cache):
        raise ValueError(f"q has head_dim {head_dim} and the caches have {head_dim_of(k_cache)}; they must agree")
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which is not a multiple of the caches' {num_kv_heads} KV heads")
    if sinks is not None:
        _check_sinks(sinks, num_heads)


def _check_sinks(sinks: Any, num_heads: int) -> None:
    if isinstance(sinks, mx.array):
        shape, numbers = sinks.shape, mx.issubdtype(sinks.dtype, mx.floating)
    else:
        try:
            array = np.asarray(sinks)
        except ValueError:
            raise ValueError(f"sinks must be a list of [num_heads] = [{num_heads}] numbers, got {sinks!r}") from None
        shape, numbers = array.shape, array.dtype.kind in "fiu"
    if tuple(shape) != (num_heads,):
        raise ValueError(f"sinks has shape {tuple(shape)}; it must be [num_heads] = [{num_heads}]")
    if not numbers:
        raise ValueError(f"sinks must hold floating-point numbers, got {sinks!r}")


def int32_array(name: str, values: mx.array | np.ndarray | Sequence[Any], ndim: int) -> np.ndarray:
    """A metadata argument as a contiguous int32 NumPy array; lists of Python integers are accepted too.

    Raises:
        ValueError: The values are not int32, or do not have ``ndim`` dimensions.
    """
    if isinstance(values, mx.array | np.ndarray):
        if dtype_name(values.dtype) != "int32":
            raise ValueError(f"{name} has dtype {values.dtype}; it must be int32")
        array = np.asarray(values)
    else:
        try:
            array = np.array(values)
        except ValueError:
            raise ValueError(f"{name} has rows of different lengths; pad them to one length") from None
        if array.size == 0:
            array = array.astype(np.int32)
        if array.dtype.kind not in "iu" or (array.size and not -(2**31) <= array.min() <= array.max() < 2**31):
            raise ValueError(f"{name} holds something other than integers in the range of int32: {values!r}")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; it must have {ndim} dimension{'s' if ndim > 1 else ''}")
    return np.ascontiguousarray(array, dtype=np.int32)


def validate_metadata(
    cu_seqlens_q: np.ndarray,
    seqused_k: np.ndarray,
    block_table: np.ndarray,
    *,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Check the sequences of a packed batch and the places of their context.

    Args:
        cu_seqlens_q: int32 [num_seqs + 1].
        seqused_k: int32 [num_seqs].
        block_table: int32 [num_seqs, max_blocks].
        num_tokens: Number of rows of the packed batch, T.
        num_blocks: Number of blocks of the KV cache.
        block_size: Tokens per KV block.

    Raises:
        ValueError: Lengths do not agree; ``cu_seqlens_q`` does not start at 0, decreases or does not end at T; a
            sequence has a context shorter than its query rows or longer than its blocks; a block that is read
            lies outside the cache. The message names the first such sequence.
    """
    num_seqs = len(seqused_k)
    if len(cu_seqlens_q) != num_seqs + 1:
        raise ValueError(
            f"cu_seqlens_q has {len(cu_seqlens_q)} entries and seqused_k has {num_seqs}: cu_seqlens_q must have one "
            f"more, {num_seqs + 1}"
        )
    if len(block_table) != num_seqs:
        raise ValueError(f"block_table has {len(block_table)} rows; it must have one per sequence, {num_seqs}")
    if cu_seqlens_q[0] != 0:
        raise ValueError(f"cu_seqlens_q[0] (sequence 0) is {cu_seqlens_q[0]}; it must be 0")
    query_lens = np.diff(cu_seqlens_q.astype(np.int64))
    if (seq := _first(query_lens < 0)) is not None:
        raise ValueError(
            f"sequence {seq}: cu_seqlens_q decreases from {cu_seqlens_q[seq]} to {cu_seqlens_q[seq + 1]}; "
            "it must not decrease"
        )
    if cu_seqlens_q[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens_q ends at {cu_seqlens_q[-1]} (sequence {num_seqs - 1}); it must end at the number of packed "
            f"rows of q, {num_tokens}"
        )
    if (seq := _first(seqused_k < query_lens)) is not None:
        raise ValueError(
            f"sequence {seq}: seqused_k is {seqused_k[seq]}; it counts this step's tokens too, so it must be at "
            f"least the sequence's {query_lens[seq]} query rows"
        )
    held_blocks = -(-seqused_k.astype(np.int64) // block_size)
    if (seq := _first(held_blocks > block_table.shape[1])) is not None:
        raise ValueError(
            f"sequence {seq}: seqused_k is {seqused_k[seq]}, which takes {held_blocks[seq]} blocks of {block_size}; "
            f"block_table has {block_table.shape[1]} columns"
        )
    read = np.arange(block_table.shape[1]) < held_blocks[:, None]
    outside = read & ((block_table < 0) | (block_table >= num_blocks))
    if (seq := _first(outside.any(axis=1))) is not None:
        column = int(np.argmax(outside[seq]))
        raise ValueError(
            f"sequence {seq}: block_table[{seq}, {column}] is {block_table[seq, column]}; the cache has {num_blocks} "
            f"blocks, so it must be in [0, {num_blocks})"
        )


def _first(wrong: npt.ArrayLike) -> int | None:
    """Index of the first True, None if there is none."""
    found = np.flatnonzero(wrong)
    return int(found[0]) if found.size else None
