"""A packed matrix: made from stored rows, multiplied with activations, and read row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from workbench.base.threads import num_threads
from workbench.kernels.cpu.formats import (
    GGML_FORMATS,
    MXFP4,
    TILE,
    UNIT,
    Activations,
    Format,
    ScaleKind,
    affine_format,
)
from workbench.kernels.cpu.inputs import code_bits, factors
from workbench.kernels.cpu.kernels import multiply, product_kernel
from workbench.kernels.cpu.packing import (
    KINDS,
    half_of_power,
    layout_of,
    pack_affine,
    pack_floats,
    pack_ggml,
    unpack_rows,
)
from workbench.kernels.cpu.threads import share, thread_pool
from workbench.models.gguf.types import GGML_TYPES

_LINE = 64
_WORTH_THREADS = 2**21  # multiplications of a product that takes longer than waking threads
_WORTH_PACKING = 2**17  # bytes of stored rows whose packing does


class PackedMatrix:
    """A matrix [num_outputs, num_columns] in the layout of a format.

    Args:
        form: The format.
        num_outputs: Rows of the matrix.
        num_columns: Columns of the matrix.

    Attributes:
        form: The format.
        num_outputs: Rows of the matrix.
        num_columns: Columns of the matrix.
        num_units: Units of 32 columns.
        num_tiles: Tiles of outputs.
        data: The packed weights, uint8.
        activations: The factors of the weights, see `use`.
        kernel: Address of the product kernel for these.
    """

    def __init__(self, form: Format, num_outputs: int, num_columns: int) -> None:
        self.form, self.num_outputs, self.num_columns = form, num_outputs, num_columns
        self.num_units, self.num_tiles = -(-num_columns // UNIT), -(-num_outputs // TILE)
        self.layout = layout_of(form, self.num_units)
        size = self.num_tiles * self.layout.tile_bytes
        memory = np.zeros(size + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        self.data = memory[start : start + size]
        self.use("float32")

    def use(self, activations: Activations) -> None:
        """Multiply with these activations from now on.

        Args:
            activations: "float32", or "int8" for weights that are codes.
        """
        self.activations, self.kernel = activations, product_kernel(self.form, activations)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.data.nbytes

    def write_ggml(self, type_name: str, raw: np.ndarray, first_output: int = 0) -> None:
        """Pack the rows of a ggml tensor as the outputs from ``first_output`` on.

        Args:
            type_name: ggml type; its format is this matrix's.
            raw: The stored rows.
            first_output: The output that the first row becomes.
        """
        if type_name in KINDS:
            rows = raw.view(np.uint8).reshape(raw.shape[0], -1)
            rows.flags.writeable = False  # one type for memory-mapped files and copies: compiled once
            threads = num_threads() if rows.nbytes >= _WORTH_PACKING else 1

            def work_of(thread: int) -> None:
                first, stop = rows_of_thread(first_output, len(rows), thread, threads)
                pack_ggml(rows[first:stop], KINDS[type_name], self.layout, self.data, first_output + first)

            thread_pool(threads).run(work_of)
        else:
            unsigned = np.uint32 if self.form.bits == 32 else np.uint16
            pack_floats(raw.view(unsigned).reshape(raw.shape[0], -1), self.layout, self.data, first_output)

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """``x @ matrix.T`` in float32; with "int8" activations, of the x that its codes of 8 bits stand for.

        Args:
            x: float32 [num_rows, num_columns], contiguous.

        Returns:
            float32 [num_rows, num_outputs].
        """
        y = np.empty((x.shape[0], self.num_outputs), np.float32)
        arguments = (self.kernel, self.data.ctypes.data, self.num_columns, self.num_units)
        codes, middle, group = code_bits(self.form, self.activations), self.form.middle, self.form.group
        threads = num_threads() if x.shape[0] * self.num_outputs * self.num_columns >= _WORTH_THREADS else 1

        def work_of(thread: int) -> None:
            tiles = share(self.num_tiles, thread, threads)
            multiply(*arguments, codes, middle, factors(self.form), group, x, y, *tiles)

        thread_pool(threads).run(work_of)
        return y

    def rows(self, outputs: np.ndarray) -> np.ndarray:
        """Some rows of the matrix, float32 [num_rows, num_columns].

        Args:
            outputs: Their indices, int64 [num_rows].
        """
        out = np.empty((outputs.size, self.num_columns), np.float32)
        kind = "float16" if self.form.scales == "codes" else self.form.scales
        table = np.array(self.form.table, np.uint8)
        unpack_rows(self.data.view(np.uint32), self.layout, table, _numbers(kind), outputs, out)
        return out


def rows_of_thread(first_output: int, num_rows: int, thread: int, threads: int) -> tuple[int, int]:
    """A thread's part of rows that become the outputs from ``first_output`` on: the first, and the one to stop before.

    It ends where a tile ends, because two threads must not write to the same words.
    """
    before = first_output % TILE
    first, stop = share(-(-(before + num_rows) // TILE), thread, threads)
    return max(0, first * TILE - before), min(num_rows, max(0, stop * TILE - before))


@cache
def _numbers(kind: ScaleKind) -> np.ndarray:
    """The number that each 16 bits stand for in a type; empty for types of 32 bits."""
    bits = np.arange(2**16, dtype=np.uint16)
    if kind == "float16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.empty(0, np.float32)


def _joined(
    form: Format, num_columns: int, parts: Sequence[Any], write: Callable[[PackedMatrix, Any, int], None]
) -> PackedMatrix:
    """The packed matrix of matrices that lie one below the other; ``write`` packs one from some output on."""
    bounds = np.cumsum([0, *(len(part[0]) for part in parts)]).tolist()
    matrix = PackedMatrix(form, bounds[-1], num_columns)
    for part, first in zip(parts, bounds):
        write(matrix, part, first)
    return matrix


def from_ggml(type_name: str, parts: Sequence[np.ndarray]) -> PackedMatrix:
    """The packed matrix of one or more ggml tensors of a type, one below the other.

    Args:
        type_name: A key of `GGML_FORMATS`.
        parts: Stored rows of each tensor, [num_rows, stored elements of a row].
    """
    elements, size = next(kind[1:] for kind in GGML_TYPES.values() if kind.name == type_name)
    num_columns = parts[0].shape[-1] * parts[0].itemsize // size * elements
    return _joined(
        GGML_FORMATS[type_name],
        num_columns,
        [(part,) for part in parts],
        lambda matrix, part, first: matrix.write_ggml(type_name, part[0], first),
    )


def from_affine(
    bits: int, parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], scales: ScaleKind
) -> PackedMatrix:
    """The packed matrix of one or more matrices in MLX's affine quantisation, one below the other.

    Args:
        bits: Bits per weight.
        parts: Words (uint32), and the bits of scales and biases (uint16 or uint32), of each matrix.
        scales: Type of scales and biases.
    """
    return _joined(affine_format(bits, scales), parts[0][0].shape[1] * 32 // bits, parts, _write_affine)


def from_mxfp4(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> PackedMatrix:
    """The packed matrix of one or more matrices in MLX's mxfp4, one below the other.

    Args:
        parts: Words (uint32) and the exponents of scales (uint8) of each matrix.
    """
    with_scales = [(words, half_of_power(exponents)) for words, exponents in parts]
    as_affine = [(words, scales, scales) for words, scales in with_scales]  # there are no minima
    return _joined(MXFP4, parts[0][0].shape[1] * 8, as_affine, _write_affine)


def _write_affine(matrix: PackedMatrix, part: tuple[np.ndarray, np.ndarray, np.ndarray], first: int) -> None:
    words, scales, minima = part
    pack_affine(words.view(np.uint8), scales, minima, matrix.layout, matrix.data, first)
