"""Random rows of ggml's types and of MLX's affine quantisation, with every code and every kind of scale."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

HALF_FLOATS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Bytes of a block at which a float16 begins; all others may hold any bits."""


def random_rows(type_name: str, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Stored rows of a ggml type, as `GGUFTensor.raw` has them."""
    generator = np.random.default_rng(seed)
    numbers = generator.standard_normal((num_rows, num_columns)).astype(np.float32)
    if type_name == "F32":
        return numbers
    if type_name == "F16":
        return numbers.astype(np.float16)
    if type_name == "BF16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = generator.integers(0, 256, (num_rows, num_columns // elements, size), dtype=np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = generator.integers(118, 138, blocks.shape[:2])  # the exponent of the scale
    for at in HALF_FLOATS.get(type_name, ()):
        scales = generator.standard_normal((*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def dequantised(type_name: str, rows: np.ndarray) -> np.ndarray:
    """The rows as float32, by PyPI gguf."""
    return dequantize(rows, GGMLQuantizationType[type_name]).astype(np.float32)


def random_affine(
    bits: int, group_size: int, num_rows: int, num_columns: int, dtype: mx.Dtype, seed: int = 0
) -> tuple[mx.array, mx.array, mx.array]:
    """Words, scales and biases of a matrix that MLX has quantised."""
    numbers = np.random.default_rng(seed).standard_normal((num_rows, num_columns)).astype(np.float32)
    words, scales, biases = mx.quantize(mx.array(numbers).astype(dtype), group_size, bits)
    mx.eval(words, scales, biases)
    return words, scales, biases
