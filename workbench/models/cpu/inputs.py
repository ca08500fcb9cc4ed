"""Inputs of products as the kernels read them: scaled for a format, or as codes of 8 bits with their scales.

A unit of an input of 8 bits is 32 codes from -127 to 127, in the order in which the kernel multiplies them, and their
scale as float32. The largest magnitude of the unit becomes 127.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from workbench.attention.cpu.simd import LANES, jit, larger, largest_of, load, splat, total_of
from workbench.models.cpu.formats import INT8_UNIT_BYTES, UNIT, Activations, Format

_ZERO, _ONE, _LARGEST_CODE = np.float32(0.0), np.float32(1.0), np.float32(127.0)
_SMALLEST = np.float32(1e-30)
"""A unit of smaller magnitudes becomes 0, because the reciprocal of its scale may not be a number."""


def code_bits(form: Format, activations: Activations) -> int:
    """The format's bits in base words, by which compiled code orders codes of 8 bits; 0 to make none."""
    return form.base if activations == "int8" else 0


@cache
def factors(form: Format) -> np.ndarray:
    """The power of two that each column of a unit is multiplied with beforehand, float32 [32]."""
    if form.is_plain:
        return np.ones(UNIT, np.float32)
    per_word = UNIT // form.base
    width = form.base
    index = np.arange(UNIT) % per_word
    if form.table:  # its entries are bytes: those of even columns lie side by side, and those of odd ones
        width, per_word, index = 8, per_word // 2, index // 2
    shift = np.where(index == per_word - 1, 0, width * index)
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
            total = np.float32(0.0)
            for column in range(index * group, min((index + 1) * group, num_columns)):
                total += x[row, column]
            sums[row, index] = total


@jit
def row_size(num_units, codes):
    """Size of a prepared row in units of 4 bytes."""
    return num_units * (INT8_UNIT_BYTES // 4 if codes else UNIT)


@jit
def prepare_rows(x, num_columns, codes, form_factors, group, prepared, sums):
    """Prepare the input of a product.

    Args:
        x: float32 [num_rows, at least num_columns].
        num_columns: Columns of the matrix.
        codes: `code_bits`.
        form_factors: `factors` of the format.
        group: Columns per group.
        prepared: float32 [num_rows, `row_size`]; written.
        sums: Sums of the groups of the input that is multiplied, float32 [num_rows, num_units * 32 / group]; written.
    """
    if codes:
        _quantise_rows(x, num_columns, codes, group, prepared, sums)
    else:
        _scale_rows(x, num_columns, form_factors, group, prepared, sums)


@jit
def _quantise_rows(x, num_columns, base, group, prepared, sums):
    """Make codes of 8 bits; see `prepare_rows`. A unit with a number that is not finite has a scale that is not."""
    numbers, rounded = np.zeros(UNIT, np.float32), np.zeros(UNIT, np.int32)
    num_units = sums.shape[1] * group // UNIT
    for row in range(x.shape[0]):
        codes = prepared[row].view(np.int8)
        for unit in range(num_units):
            first, place = unit * UNIT, unit * INT8_UNIT_BYTES
            if first + UNIT <= num_columns:
                for column in range(UNIT):
                    numbers[column] = x[row, first + column]
            else:
                for column in range(UNIT):
                    numbers[column] = x[row, first + column] if first + column < num_columns else _ZERO
            scale = _scale_of(numbers)
            reciprocal = _ONE / scale if scale > _SMALLEST else _ZERO
            for column in range(UNIT):
                rounded[column] = np.int32(np.rint(numbers[column] * reciprocal))
            _order(rounded, base, codes, place)
            prepared[row, (place + UNIT) // 4] = scale
            for part in range(UNIT // group):
                total = np.int32(0)
                for column in range(part * group, (part + 1) * group):
                    total += rounded[column]
                sums[row, unit * (UNIT // group) + part] = scale * np.float32(total)


@jit
def _scale_of(numbers):
    """The largest magnitude of a unit divided by 127; NaN if one of its numbers is not finite."""
    largest, not_finite = splat(_ZERO), splat(_ZERO)
    for at in range(0, UNIT, LANES):
        part = load(numbers, at)
        largest = larger(largest, larger(part, splat(_ZERO) - part))
        not_finite = not_finite + part * splat(_ZERO)
    return largest_of(largest) / _LARGEST_CODE + total_of(not_finite)


@jit
def _order(rounded, base, codes, place):
    """Write a unit's codes: the first, second, ... columns that share a byte of the base words, word by word."""
    per_byte = 8 // base
    for first in range(0, UNIT, 4 * per_byte):
        for number in range(per_byte):
            for byte in range(4):
                codes[place] = rounded[first + per_byte * byte + number]
                place += 1
