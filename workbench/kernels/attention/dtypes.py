"""Element types of queries and KV caches, by name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
"""Element types that attention accepts."""


def dtype_name(dtype: mx.Dtype | np.dtype[Any]) -> str:
    """The name of an MLX or NumPy dtype, such as "float32"."""
    return str(dtype).removeprefix("mlx.core.")
