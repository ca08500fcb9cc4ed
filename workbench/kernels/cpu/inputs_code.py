"""Prepare inputs of products, compiled: scaled for a format, or as codes of 8 bits."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from workbench.kernels.cpu.attention.simd import LANES, jit, load, splat, total_of
from workbench.kernels.cpu.formats import UNIT
from workbench.kernels.cpu.inputs import row_size
from workbench.kernels.cpu.int8_inputs import quantise_rows

register_jitable(row_size)


@jit
def _scale_rows(x, num_columns, form_factors, group, prepared, sums):
    """Scale the input for a format, pad it to whole units and sum its groups; see `prepare_rows`."""
    whole = num_columns // UNIT * UNIT
    for row in range(x.shape[0]):
        for first in range(0, whole, UNIT):
            for column in range(UNIT):
                prepared[row, first + column] = x[row, first + column] * form_factors[column]
        for column in range(whole, prepared.shape[1]):
            prepared[row, column] = x[row, column] * form_factors[column - whole] if column < num_columns else 0.0
        for index in range(sums.shape[1]):
            sums[row, index] = _sum_of(x[row], index * group, min((index + 1) * group, num_columns))


@jit
def _sum_of(numbers, first, stop):
    """The sum of some elements."""
    total, rest = splat(np.float32(0.0)), np.float32(0.0)
    whole = first + max(0, stop - first) // LANES * LANES
    for at in range(first, whole, LANES):
        total = total + load(numbers, at)
    for at in range(whole, stop):
        rest += numbers[at]
    return total_of(total) + rest


@jit
def prepare_rows(x, num_columns, codes, middle, form_factors, group, prepared, sums):
    """Prepare the input of a product.

    Args:
        x: float32 [num_rows, at least num_columns].
        num_columns: Columns of the matrix.
        codes: `code_bits`.
        middle: `Format.middle`.
        form_factors: `factors` of the format.
        group: Columns per group.
        prepared: float32 [num_rows, `row_size`]; written.
        sums: Sums of the groups of the input that is multiplied, float32 [num_rows, num_units * 32 / group]; written.
    """
    if codes:
        quantise_rows(x, num_columns, codes, middle, group, prepared, sums)
    else:
        _scale_rows(x, num_columns, form_factors, group, prepared, sums)
