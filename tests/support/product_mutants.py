"""Packed matrices of random rows, and ways to break their products that a check has to see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from stored_rows import dequantised, random_rows

from workbench.models.cpu.formats import Activations
from workbench.models.cpu.kernels import product_kernel
from workbench.models.packed.matrix import PackedMatrix, from_ggml


def random_matrix(
    type_name: str, num_outputs: int, num_columns: int, activations: Activations = "float32", seed: int = 0
) -> tuple[PackedMatrix, np.ndarray]:
    """A packed matrix of random rows, and its weights, float64 [num_outputs, num_columns], by PyPI gguf."""
    rows = random_rows(type_name, num_outputs, num_columns, seed)
    packed = from_ggml(type_name, [rows])
    packed.use(activations)
    return packed, dequantised(type_name, rows).astype(np.float64)


def wrong_zero_point(packed: PackedMatrix) -> None:
    """Subtract one too little from every code."""
    offset = packed.form.offset
    assert offset is not None
    packed.kernel = product_kernel(packed.form._replace(offset=offset - 1), packed.activations)


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
