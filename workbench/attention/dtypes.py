"""Element types of queries and KV caches, by name."""

from __future__ import annotations

import mlx.core as mx

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
"""Those that attention takes."""


def dtype_name(dtype: mx.Dtype) -> str:
    """The name of an MLX dtype, such as "float32"."""
    return str(dtype).removeprefix("mlx.core.")
