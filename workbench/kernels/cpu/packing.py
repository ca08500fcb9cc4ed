"""Move stored matrices into the layout of `workbench.kernels.cpu.formats`, row by row and bit by bit.

The values do not change. A matrix is read from the memory-mapped file and written to its place; nothing larger than a
row lies in between.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.kernels.cpu.attention.compiled import EntryPoint
from workbench.kernels.cpu.formats import SUPER, UNIT, Format

NIBBLES, BYTES, POWERS, Q2_K, Q3_K, Q4_K, Q6_K = range(7)
"""Kinds of ggml blocks."""

KINDS = {
    "Q4_0": NIBBLES,
    "Q4_1": NIBBLES,
    "Q5_0": NIBBLES,
    "Q5_1": NIBBLES,
    "IQ4_NL": NIBBLES,
    "Q8_0": BYTES,
    "MXFP4": POWERS,
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q4_K,
    "Q6_K": Q6_K,
}
"""The kind of each ggml type's blocks."""


def half_of_power(exponents: np.ndarray) -> np.ndarray:
    """Bits of ``2**(exponent - 128)`` as bfloat16, uint16; the exponents are uint8."""
    return np.array([power(exponent) for exponent in range(256)], np.uint16)[exponents]


def power(exponent: int) -> np.uint32:
    """Bits of ``2**(exponent - 128)`` as bfloat16, of which the smallest two are not normal."""
    if exponent < 2:
        return np.uint32(0x20) << np.uint32(exponent)
    return (np.uint32(exponent) - np.uint32(1)) << np.uint32(7)


class Layout(NamedTuple):
    """The numbers of a format and a matrix that compiled code needs: attributes of `Format`, and two more.

    Attributes:
        tile_bytes: Bytes of a tile.
        num_units: Units of the matrix.
    """

    bits: int
    base: int
    extra: int
    sets: int
    scale_bytes: int
    has_minima: int
    offset: int
    signed: int
    word_bytes: int
    unit_bytes: int
    super_bytes: int
    tile_bytes: int
    num_units: int


def layout_of(form: Format, num_units: int) -> Layout:
    """The layout of a matrix of ``num_units`` units."""
    numbers = [int(getattr(form, name) or 0) for name in Layout._fields[:-2]]
    return Layout._make([*numbers, form.tile_bytes(num_units), num_units])


class Scales(NamedTuple):
    """Bits of the scales and minima of one row, uint32.

    Attributes:
        scales: [num_groups].
        minima: [num_groups].
        shared: [num_supers].
        shared_minima: [num_supers].
    """

    scales: np.ndarray
    minima: np.ndarray
    shared: np.ndarray
    shared_minima: np.ndarray


def _row_scales(layout: Layout) -> Scales:
    groups, supers = layout.num_units * layout.sets, -(-layout.num_units // SUPER)
    return Scales(*(np.zeros(size, np.uint32) for size in (groups, groups, supers, supers)))


def pack_ggml(raw: np.ndarray, kind: int, layout: Layout, packed: np.ndarray, first_output: int) -> None:
    """Pack rows of ggml blocks, uint8 [num_rows, row_bytes], as the outputs from ``first_output`` on."""
    codes = np.zeros(layout.num_units * UNIT, np.uint8)
    place = (layout, packed.view(np.uint32), first_output, codes, _row_scales(layout))
    if kind in (NIBBLES, BYTES, POWERS):
        _pack_small_blocks(raw, kind, *place)
    else:
        _pack_super_blocks(raw, kind, *place)


def pack_affine(
    words: np.ndarray, scales: np.ndarray, minima: np.ndarray, layout: Layout, packed: np.ndarray, first_output: int
) -> None:
    """Pack rows of MLX's affine quantisation.

    Args:
        words: uint8 [num_rows, row_bytes].
        scales: Bits of the scales, uint16 or uint32 [num_rows, num_groups of 32, 64 or 128].
        minima: Bits of the biases, likewise.
        layout: The layout.
        packed: The packed matrix; written.
        first_output: The output that the first row becomes.
    """
    codes = np.zeros(layout.num_units * UNIT, np.uint8)
    _pack_affine(words, scales, minima, layout, packed.view(np.uint32), first_output, codes, _row_scales(layout))


def pack_floats(bits: np.ndarray, layout: Layout, packed: np.ndarray, first_output: int) -> None:
    """Pack rows of floating-point numbers, given as their bits: uint16 or uint32 [num_rows, num_columns]."""
    _pack_floats(bits, layout, packed.view(bits.dtype), first_output)


_pack_small_blocks = EntryPoint("workbench.kernels.cpu.packing_code:pack_small_blocks")
_pack_super_blocks = EntryPoint("workbench.kernels.cpu.packing_code:pack_super_blocks")
_pack_affine = EntryPoint("workbench.kernels.cpu.packing_code:pack_affine")
_pack_floats = EntryPoint("workbench.kernels.cpu.packing_code:pack_floats")

unpack_rows = EntryPoint("workbench.kernels.cpu.packing_code:unpack_rows")
"""Writes the weights of some outputs; see `workbench.kernels.cpu.packing_code` for the arguments."""
