"""Inputs of 8 bits: the codes, scales and first summands that the kernel reads.

A unit of an input is 32 codes from -127 to 127, in the order in which the kernel multiplies them; their scale as
float32; and 4 bytes for each 16 columns, with which the sums of a run of columns begin, see `run_length`. The largest
magnitude of the unit becomes 127.

The codes q of weights are not negative, because the instruction needs that. A sum of products begins with ``-c`` times
the sum of the input's codes, so that it becomes the sum of ``(q - c) * code``, where c is the middle of the weights'
codes (`Format.middle`). That sum fits into 16 bits if the other does not, and sums in between may wrap around.
Instructions that add in 32 bits need none of this and begin with 0.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workbench.kernels.cpu.attention.simd import (
    FLOAT,
    LANES,
    element_pointer,
    jit,
    larger,
    largest_of,
    load,
    splat,
    total_of,
)
from workbench.kernels.cpu.formats import INT8_UNIT_BYTES, UNIT

_ZERO, _ONE, _LARGEST_CODE = np.float32(0.0), np.float32(1.0), np.float32(127.0)
_SMALLEST = np.float32(1e-30)
"""A unit of smaller magnitudes becomes 0, because the reciprocal of its scale may not be a number."""

_ROUND = 1.5 * 2**23
"""Adding this to a small float32 rounds it to an integer, which is then in the low bits of the sum."""

PART = 16
"""Columns of a unit that have first summands."""

_BYTE, _HALF, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)


SIGN_BIT = 128
"""The middle of numbers of 8 bits: with this bit turned, they are signed."""

_LARGEST_MIDDLE = 16


def run_length(middle: int, group: int) -> int:
    """Columns of a group that are summed at once: 32 products of codes of 6 bits do not fit into two sums of 16."""
    return PART if middle > _LARGEST_MIDDLE else group


_run_length = jit(run_length)


def _order(base: int) -> list[int]:
    """Columns in the order of multiplication: the first, second, ... that share a byte of base words, word by word."""
    per_byte = 8 // base
    return [
        first + per_byte * byte + number
        for first in range(0, UNIT, 4 * per_byte)
        for number in range(per_byte)
        for byte in range(4)
    ]


def _code_writer(base: int):
    """A function that writes the codes of a unit for base words of some bits.

    Its arguments are ``(numbers, at, reciprocal, prepared, place, sums)``: 32 numbers from the element ``at`` on, the
    reciprocal of their scale, a float32 array and the byte of it where the codes begin, and int32 [4], which receives
    the codes' sums: of the first 16 columns as two halves, then of the others.
    """

    @intrinsic
    def write(typing_context, numbers, at, reciprocal, prepared, place, sums):
        def codegen(context, builder, signature, values):
            numbers, at, reciprocal, prepared, place, sums = values
            floats = ir.VectorType(FLOAT, UNIT)
            pointer = element_pointer(context, builder, signature.args[0], numbers, at)
            loaded = builder.load(builder.bitcast(pointer, floats.as_pointer()), align=4)
            factor = builder.insert_element(ir.Constant(floats, ir.Undefined), reciprocal, _WORD(0))
            factor = builder.shuffle_vector(factor, factor, ir.Constant(ir.VectorType(_WORD, UNIT), [0] * UNIT))
            shifted = builder.fadd(builder.fmul(loaded, factor), ir.Constant(floats, [_ROUND] * UNIT))
            rounded = builder.bitcast(shifted, ir.VectorType(_WORD, UNIT))
            codes = _chosen(builder, builder.trunc(rounded, ir.VectorType(_BYTE, UNIT)), _order(base))
            first = element_pointer(context, builder, signature.args[3], prepared, ir.IntType(64)(0))
            target = builder.gep(builder.bitcast(first, _BYTE.as_pointer()), [place])
            builder.store(codes, builder.bitcast(target, codes.type.as_pointer()), align=4)
            wide = builder.sext(codes, ir.VectorType(_HALF, UNIT))
            for index in range(4):
                part, half = divmod(index, 2)
                columns = [PART * part + 4 * word + 2 * half + byte for word in range(4) for byte in range(2)]
                total = _total(builder, _chosen(builder, wide, columns))
                element = element_pointer(context, builder, signature.args[5], sums, ir.IntType(64)(index))
                builder.store(builder.sext(total, _WORD), element)
            return context.get_dummy_value()

        return types.void(numbers, types.intp, types.float32, prepared, types.intp, sums), codegen

    return write


def _chosen(builder: ir.IRBuilder, vector: ir.Value, places: list[int]) -> ir.Value:
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_WORD, len(places)), places))


def _total(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    name = f"llvm.vector.reduce.add.v{halves.type.count}i16"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_HALF, [halves.type]), name)
    return builder.call(function, [halves])


_write_2, _write_4, _write_8 = _code_writer(2), _code_writer(4), _code_writer(8)


@jit
def quantise_rows(x, num_columns, base, middle, group, prepared, sums):
    """Make codes of 8 bits; see `prepare_rows`. A unit with a number that is not finite has a scale that is not."""
    numbers, parts = np.zeros(UNIT, np.float32), np.zeros(4, np.int32)
    num_units = sums.shape[1] * group // UNIT
    for row in range(x.shape[0]):
        source, target = x[row], prepared[row]
        for unit in range(num_units):
            first, place = unit * UNIT, unit * INT8_UNIT_BYTES
            if first + UNIT > num_columns:
                for column in range(UNIT):
                    numbers[column] = source[first + column] if first + column < num_columns else _ZERO
                source, first = numbers, 0
            scale = _scale_of(source, first)
            reciprocal = _ONE / scale if scale > _SMALLEST else _ZERO
            if base == 8:
                _write_8(source, first, reciprocal, target, place, parts)
            elif base == 4:
                _write_4(source, first, reciprocal, target, place, parts)
            else:
                _write_2(source, first, reciprocal, target, place, parts)
            target[(place + UNIT) // 4] = scale
            _write_starts(parts, middle, group, target.view(np.int32), (place + UNIT) // 4 + 1)
            low, high = parts[0] + parts[1], parts[2] + parts[3]
            if group == UNIT:
                sums[row, unit] = scale * np.float32(low + high)
            else:
                sums[row, 2 * unit], sums[row, 2 * unit + 1] = scale * np.float32(low), scale * np.float32(high)


@jit
def _write_starts(parts, middle, group, target, at):
    """Write the first summands of a unit's runs; see the top of this file."""
    factor = np.int32(-middle)
    if _run_length(middle, group) == PART:
        target[at], target[at + 1] = (
            _start(factor * parts[0], factor * parts[1]),
            _start(factor * parts[2], factor * parts[3]),
        )
    else:
        target[at] = _start(factor * (parts[0] + parts[2]), factor * (parts[1] + parts[3]))


@jit
def _start(low, high):
    """Two summands of 16 bits: of the first two of every four columns, and of the others."""
    return np.int32((low & np.int32(0xFFFF)) | (high << np.int32(16)))


@jit
def _scale_of(numbers, first):
    """The largest magnitude of a unit divided by 127; NaN if one of its numbers is not finite."""
    largest, not_finite = splat(_ZERO), splat(_ZERO)
    for at in range(first, first + UNIT, LANES):
        part = load(numbers, at)
        largest = larger(largest, larger(part, splat(_ZERO) - part))
        not_finite = not_finite + part * splat(_ZERO)
    return largest_of(largest) / _LARGEST_CODE + total_of(not_finite)
