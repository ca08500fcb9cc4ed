"""Inputs of products as the kernels read them: scaled for a format, or as codes of 8 bits."""

from __future__ import annotations

from functools import cache

import numpy as np

from workbench.kernels.cpu.formats import INT8_UNIT_BYTES, UNIT, Activations, Format

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


def row_size(num_units, codes):
    """Distance of prepared rows in units of 4 bytes.

    Rows at multiples of 4 KiB would share the same lines of a first-level cache.
    """
    size = num_units * (INT8_UNIT_BYTES // 4 if codes else UNIT)
    return size + _LINES if size % 1024 == 0 else size
