"""MLX arrays as bytes, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import mlx.core as mx
import numpy as np


def bits_of(array: mx.array) -> np.ndarray:
    """A NumPy array on the memory of ``array``; NumPy has no bfloat16, so it becomes uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def view_of(array: mx.array, row_contiguous: bool) -> np.ndarray:
    """`bits_of` an array, in row-major order or with its own strides."""
    view = bits_of(array)
    return np.ascontiguousarray(view).reshape(view.shape) if row_contiguous else view


def memory_of(view: np.ndarray) -> tuple[np.ndarray, int]:
    """The bytes that a strided view spans, and the offset of its first element in them."""
    if view.flags.c_contiguous:
        return view.reshape(-1).view(np.uint8), 0
    low, high = np.lib.array_utils.byte_bounds(view)
    spanned = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    return spanned.copy(), view.__array_interface__["data"][0] - low


def filled(shape: Sequence[int], dtype: mx.Dtype, value: float | None) -> mx.array:
    """An array filled with ``value`` converted to ``dtype``; None stands for 0."""
    return mx.full(tuple(shape), mx.array(0.0 if value is None else value).astype(dtype))


def to_array(data: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """The array of the given shape and dtype that some bytes hold."""
    if dtype == mx.bfloat16:
        return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(data.view(np.dtype(str(dtype).removeprefix("mlx.core.").rstrip("_"))).reshape(shape))
