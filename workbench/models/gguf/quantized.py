"""Repack the ggml types that MLX can compute with, Q4_0, Q4_1 and Q8_0, block by block.

A ggml block is 32 elements of a row with their scale; MLX's affine quantisation with groups of 32 keeps the elements
of a matrix in uint32 words, lowest bits first, and scales and biases beside them: value = scale * q + bias. The
repacking is exact: it moves bits and changes no value. (``mx.load`` does the same for a file that holds no other
quantised type; most files hold several.)
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from workbench.models.gguf.file import GGUFTensor

QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
QUANTIZED_GROUP_SIZE = 32


def pack_quantized(tensor: GGUFTensor, rows: np.ndarray | None, dtype: mx.Dtype) -> dict[str, mx.array]:
    """A quantised matrix in MLX's layout.

    Args:
        tensor: [out, in] of type Q4_0, Q4_1 or Q8_0.
        rows: Order of the output rows, None to keep them.
        dtype: Element type of scales and biases.

    Returns:
        "weight" uint32 [out, in * bits / 32], "scales" and "biases" [out, in / 32].
    """
    raw = tensor.raw if rows is None else tensor.raw[rows]
    num_rows, num_groups = tensor.shape[0], tensor.shape[1] // QUANTIZED_GROUP_SIZE
    blocks = np.ascontiguousarray(raw).reshape(num_rows, num_groups, -1)
    scales = blocks[..., :2].copy().view("<f2")[..., 0].astype(np.float32)
    if tensor.type_name == "Q8_0":
        elements = blocks[..., 2:] ^ 0x80  # int8 as uint8 with an offset of 128
        biases = -128.0 * scales
    else:
        header = 4 if tensor.type_name == "Q4_1" else 2
        nibbles = blocks[..., header:]  # byte j: element j in its low half, element j + 16 in its high half
        low_first = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)
        elements = low_first[..., 0::2] | (low_first[..., 1::2] << 4)
        if tensor.type_name == "Q4_1":
            biases = blocks[..., 2:4].copy().view("<f2")[..., 0].astype(np.float32)
        else:
            biases = -8.0 * scales
    words = np.ascontiguousarray(elements).reshape(num_rows, -1).view("<u4")
    return {
        "weight": mx.array(words),
        "scales": mx.array(scales).astype(dtype),
        "biases": mx.array(biases).astype(dtype),
    }
