"""`workbench.kernels.cpu.kernels`, compiled."""

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from workbench.kernels.cpu.attention.calls import call_by_address
from workbench.kernels.cpu.attention.object_code import Signature
from workbench.kernels.cpu.attention.simd import LANES, jit, load
from workbench.kernels.cpu.formats import TILE, UNIT, VECTORS, Activations, Format
from workbench.kernels.cpu.inputs import row_size
from workbench.kernels.cpu.inputs_code import prepare_rows
from workbench.kernels.cpu.kernels import MANY, ROWS, WIDE
from workbench.kernels.cpu.tiles import (
    PackedType,
    panel_bytes,
    panel_rows,
    panel_tile,
    panel_units,
    product_tile,
    tile_at,
    unpack,
)

_PAIR = VECTORS // 2
_FEW = VECTORS if WIDE else _PAIR  # vectors of a tile of 3 to 6 rows, whose sums fill the registers
_one, _two, _many = product_tile(1, VECTORS), product_tile(2, VECTORS), product_tile(8, _PAIR)
_three, _four, _five, _six = (product_tile(rows, _FEW) for rows in (3, 4, 5, 6))
_three_of_panel, _four_of_panel, _five_of_panel, _six_of_panel = (panel_tile(rows, _PAIR) for rows in (3, 4, 5, 6))

_LINE = 64


@jit
def _block(weights, units, x, x_row, sums, sums_row, y, y_row, left):
    """Multiply some of ``left`` rows with a tile; return how many."""
    if left == 1:
        _one(weights, 0, units, x, x_row, sums, sums_row, y, y_row)
        return 1
    if left == 2:
        _two(weights, 0, units, x, x_row, sums, sums_row, y, y_row)
        return 2
    if WIDE and left >= MANY:
        for first in range(0, VECTORS, _PAIR):
            _many(weights, first, units, x, x_row, sums, sums_row, y, y_row)
        return MANY
    count = left if left <= 6 else 4
    for first in range(0, VECTORS, _FEW):
        if count == 3:
            _three(weights, first, units, x, x_row, sums, sums_row, y, y_row)
        elif count == 4:
            _four(weights, first, units, x, x_row, sums, sums_row, y, y_row)
        elif count == 5:
            _five(weights, first, units, x, x_row, sums, sums_row, y, y_row)
        else:
            _six(weights, first, units, x, x_row, sums, sums_row, y, y_row)
    return count


@jit
def _multiply_panels(weights, units, x, x_row, sums, sums_row, y, num_rows, panel):
    """Multiply rows with a tile, panel by panel.

    Args:
        weights: Address of the tile.
        units: Its units of 32 columns.
        x: As in `product`, like ``x_row``, ``sums``, ``sums_row`` and ``num_rows``.
        x_row: See there.
        sums: See there.
        sums_row: See there.
        y: Address of the tile's outputs, float32 [num_rows, `TILE`], which are added to.
        num_rows: Number of input rows.
        panel: Address of memory for a panel.
    """
    for first_unit in range(0, units, panel_units(weights)):
        count = min(panel_units(weights), units - first_unit)
        unpack(weights, units, first_unit, count, panel)
        row = 0
        while row < num_rows:
            left = num_rows - row
            rows = left if left <= 6 else 4 if left <= 8 else 6
            inputs, totals, out = x + 4 * x_row * row, sums + 4 * sums_row * row, y + 4 * TILE * row
            for first in range(0, VECTORS, _PAIR):
                place = (panel, first, first_unit, count, inputs, x_row, totals, sums_row, out, TILE)
                if rows == 3:
                    _three_of_panel(weights, *place)
                elif rows == 4:
                    _four_of_panel(weights, *place)
                elif rows == 5:
                    _five_of_panel(weights, *place)
                else:
                    _six_of_panel(weights, *place)
            row += rows


def product(weights, x, x_row, sums, sums_row, y, y_row, num_rows, num_units, num_outputs, first_tile, last_tile):
    """Outputs of the tiles [first_tile, last_tile) for all rows.

    Args:
        weights: Address of the packed weights.
        x: Address of the prepared input, [num_rows, x_row].
        x_row: Distance of its rows in units of 4 bytes.
        sums: Address of the sums of its groups, float32 [num_rows, sums_row].
        sums_row: Distance of their rows in elements.
        y: Address of the result, float32 [num_rows, y_row]; no element beyond ``num_outputs`` of a row is written.
        y_row: Distance of its rows in elements.
        num_rows: Number of input rows.
        num_units: Units of 32 columns.
        num_outputs: Outputs of the matrix.
        first_tile: First tile.
        last_tile: The tile to stop before.
    """
    by_panels = 0 < panel_rows(weights) <= num_rows
    memory = np.empty(panel_bytes(weights) + _LINE if by_panels else 0, np.uint8)
    part = np.empty(num_rows * TILE, np.float32)  # of a tile by panels, or of one that holds more outputs than are left
    for tile in range(first_tile, last_tile):
        at, out = tile_at(weights, num_units, tile), y + 4 * TILE * tile
        left = min(TILE, num_outputs - tile * TILE)
        is_direct = left == TILE and not by_panels
        target, target_row = (out, y_row) if is_direct else (np.intp(part.ctypes.data), TILE)
        if by_panels:
            panel = (np.intp(memory.ctypes.data) + _LINE - 1) // _LINE * _LINE  # in the loop, which keeps the memory
            part[:] = 0.0
            _multiply_panels(at, num_units, x, x_row, sums, sums_row, target, num_rows, panel)
        else:
            row = 0
            while row < num_rows:
                inputs, totals = x + 4 * x_row * row, sums + 4 * sums_row * row
                place = (target + 4 * target_row * row, target_row, num_rows - row)
                row += _block(at, num_units, inputs, x_row, totals, sums_row, *place)
        if not is_direct:
            for row in range(num_rows):
                _copy(part, row * TILE, left, out + 4 * y_row * row)


@jit
def _copy(part, first, count, out):
    """Copy elements from the element ``first`` of an array on to an address."""
    whole = count - count % LANES
    for at in range(0, whole, LANES):
        store_at(out + 4 * at, load(part, first + at))
    for at in range(whole, count):
        store_at(out + 4 * at, part[first + at])


@intrinsic
def store_at(typing_context, address, value):
    """Store a float32 or a vector at an address."""

    def codegen(context, builder, signature, values):
        builder.store(values[1], builder.inttoptr(values[0], values[1].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, value), codegen


call_kernel = call_by_address((types.intp,) * 12)
"""Calls a kernel by its address; see `product` for the arguments."""


def product_signature(form: Format, activations: Activations) -> Signature:
    """The types of the arguments of `product` for a format."""
    return (PackedType(form, activations), *[types.intp] * 11)


def multiply(kernel, weights, num_columns, num_units, codes, middle, form_factors, group, x, y, first_tile, last_tile):
    """``y = x @ w.T`` for the outputs of the tiles [first_tile, last_tile).

    Args:
        kernel: Address of the format's kernel.
        weights: Address of the packed weights.
        num_columns: Columns of the matrix.
        num_units: Units of 32 columns.
        codes: `code_bits` of the kernel.
        middle: `Format.middle`.
        form_factors: `factors` of the format.
        group: Columns per group.
        x: float32 [num_rows, num_columns].
        y: float32 [num_rows, num_outputs]; written.
        first_tile: First tile.
        last_tile: The tile to stop before.
    """
    count = min(x.shape[0], ROWS)
    prepared = np.empty((count, row_size(num_units, codes)), np.float32)
    sums = np.empty((count, num_units * (UNIT // group)), np.float32)
    for row in range(0, x.shape[0], ROWS):
        rows, out = x[row : row + ROWS], y[row : row + ROWS]
        prepare_rows(rows, num_columns, codes, middle, form_factors, group, prepared, sums)
        inputs = (np.intp(prepared.ctypes.data), prepared.shape[1], np.intp(sums.ctypes.data), sums.shape[1])
        outputs = (np.intp(out.ctypes.data), out.shape[1])
        sizes = (rows.shape[0], num_units, out.shape[1], first_tile, last_tile)
        call_kernel(kernel, (weights, *inputs, *outputs, *sizes))
