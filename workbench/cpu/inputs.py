"""Inputs of products as the kernels read them: scaled for a format, or as codes of 8 bits."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba.extending import register_jitable

from workbench.cpu.attention.simd import LANES, jit, load, splat, total_of
from workbench.cpu.formats import INT8_UNIT_BYTES, UNIT, Activations, Format
from workbench.cpu.int8_inputs import quantise_rows

_LINES = 64  # four lines of a cache, in units of 4 bytes


def code_bits(form: Format, activations: Activations) -> int:
    """The format's bits in base words, by which compiled code orders codes of 8 bits; 0 to make none."""
    return form.base if activations == "int8" else 0


@cache
def factors(form: Format) -> np.ndarray:
    """The power of two that each column of a unit is multiplied with beforehand, float32 [32]."""
    if form.is_plain:
        return np.ones(UNIT, np.float32)
    per_word, width, number = UNIT // form.base, form.base, np.arange(UNIT) % (UNIT // form.base)
    if form.table or form.extra:  # codes are bytes, of columns that lie in the same part of a byte of base words
        per_word, width, number = 4, 8, number // form.parts
    shift = np.where(number == per_word - 1, 0, width * number)
    return np.float32(0.5) ** shift.astype(np.float32)


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


@register_jitable
def row_size(num_units, codes):
    """Distance of prepared rows in units of 4 bytes.

    Rows at multiples of 4 KiB would share the same lines of a first-level cache.
    """
    size = num_units * (INT8_UNIT_BYTES // 4 if codes else UNIT)
    return size + _LINES if size % 1024 == 0 else size


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
