"""Packed matrices of random rows, and ways to break their products that a check has to see."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from stored_rows import dequantised, random_affine, random_rows

from workbench.kernels.cpu.formats import TILE, Activations
from workbench.kernels.cpu.kernels import product_kernel
from workbench.models.packed.matrix import PackedMatrix, from_affine, from_ggml


def random_matrix(
    type_name: str, num_outputs: int, num_columns: int, activations: Activations = "float32", seed: int = 0
) -> tuple[PackedMatrix, np.ndarray]:
    """A packed matrix of random rows, and its weights, float64 [num_outputs, num_columns], by PyPI gguf."""
    rows = random_rows(type_name, num_outputs, num_columns, seed)
    packed = from_ggml(type_name, [rows])
    packed.use(activations)
    return packed, dequantised(type_name, rows).astype(np.float64)


def random_affine_matrix(
    bits: int, group_size: int, num_outputs: int, num_columns: int, activations: Activations = "float32"
) -> tuple[PackedMatrix, np.ndarray]:
    """A packed matrix in MLX's affine quantisation, and its weights, float64 [num_outputs, num_columns], by MLX."""
    words, scales, biases = random_affine(bits, group_size, num_outputs, num_columns, mx.bfloat16)
    float32 = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
    stored = np.array(words), np.array(scales.view(mx.uint16)), np.array(biases.view(mx.uint16))
    packed = from_affine(bits, [stored], "bfloat16")
    packed.use(activations)
    return packed, np.array(float32).astype(np.float64)


def minimum_of_the_neighbour(packed: PackedMatrix) -> None:
    """Give every group the minimum, from which a zero point follows, of the group beside it."""
    tiles = packed.data.reshape(packed.num_tiles, packed.num_units, packed.form.unit_bytes)
    minima = tiles[..., -2 * TILE :]
    minima[...] = np.roll(minima, packed.num_units // 2, axis=1)


def wrong_zero_point(packed: PackedMatrix) -> None:
    """Subtract one too little from every code."""
    offset = packed.form.offset
    assert offset is not None
    packed.form = packed.form._replace(offset=offset - 1)  # inputs of 8 bits are prepared for it
    packed.kernel = product_kernel(packed.form, packed.activations)


def wrong_table_entry(packed: PackedMatrix) -> None:
    """Take the number beside the right one for one code of 16."""
    table = list(packed.form.table)
    table[11] += 1
    packed.kernel = product_kernel(packed.form._replace(table=tuple(table)), packed.activations)


def scale_of_the_neighbour(packed: PackedMatrix) -> None:
    """Give every group the scale of the group beside it."""
    tiles = packed.data.reshape(packed.num_tiles, packed.num_units, packed.form.unit_bytes)
    tiles[..., packed.form.word_bytes :] = np.roll(tiles[..., packed.form.word_bytes :], 1, axis=1)


def tail_not_written(packed: PackedMatrix) -> None:
    """Leave out the last tile, which is partly empty."""
    packed.num_tiles -= 1


PRODUCT_MUTANTS: tuple[Callable[[PackedMatrix], None], ...] = (
    wrong_zero_point,
    scale_of_the_neighbour,
    tail_not_written,
)
