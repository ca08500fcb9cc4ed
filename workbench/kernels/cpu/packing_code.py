"""`workbench.kernels.cpu.packing`, compiled."""

from __future__ import annotations

import numpy as np

from workbench.kernels.cpu.attention.simd import jit
from workbench.kernels.cpu.decoders import decode_bits, decode_small_blocks, decode_super_blocks
from workbench.kernels.cpu.formats import SUPER, TILE, UNIT

_WORD = np.uint64(0xFFFFFFFF)
_LOW_FOUR = tuple(map(np.uint64, (0x0F0F0F0F0F0F0F0F, 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0xFFFFFFFF)))
_LOW_TWO = tuple(map(np.uint64, (0x0303030303030303, 0x000F000F000F000F, 0x000000FF000000FF, 0xFFFF)))
"""Masks of `_low_bits` for 4 and for 2 bits, one per step."""


# Two functions instead of one, because most files need one, and compiling takes seconds.
def pack_small_blocks(raw, kind, layout, packed, first_output, codes, scales):
    """Pack rows of blocks of 32 columns."""
    for row in range(raw.shape[0]):
        decode_small_blocks(kind, raw[row], layout.has_minima, layout.extra, codes, scales)
        _place(layout, packed, first_output + row, codes, scales)


def pack_super_blocks(raw, kind, layout, packed, first_output, codes, scales):
    """Pack rows of blocks of 256 columns."""
    for row in range(raw.shape[0]):
        decode_super_blocks(kind, raw[row], layout.extra, codes, scales)
        _place(layout, packed, first_output + row, codes, scales)


def pack_affine(words, scale_bits, minimum_bits, layout, packed, first_output, codes, scales):
    """Pack rows of MLX's affine quantisation."""
    repeats = layout.num_units // scale_bits.shape[1]
    for row in range(words.shape[0]):
        decode_bits(words[row], layout.bits, codes)
        for unit in range(layout.num_units):
            scales.scales[unit] = scale_bits[row, unit // repeats]
            scales.minima[unit] = minimum_bits[row, unit // repeats]
        _place(layout, packed, first_output + row, codes, scales)


@jit
def _place(layout, packed, output, codes, scales):
    """Write one output: its lane of each unit of its tile."""
    tile, lane = output // TILE, output % TILE
    first = tile * layout.tile_bytes
    supers = -(-layout.num_units // SUPER) if layout.super_bytes else 0
    for index in range(supers):
        at = first + index * layout.super_bytes
        _write(packed, at + 2 * lane, 2, scales.shared[index])
        if layout.has_minima:
            _write(packed, at + 2 * (TILE + lane), 2, scales.shared_minima[index])
    base, extra, eights = layout.base, layout.extra, codes.view(np.uint64)
    for unit in range(layout.num_units):
        at = first + supers * layout.super_bytes + unit * layout.unit_bytes
        for word in range(base):
            packed[(at >> 2) + word * TILE + lane] = _base_word(eights, unit * base + word, base, 0)
        for number in range(extra):
            sharing = base // extra
            bits = np.uint32(0)
            for part in range(sharing):
                high = _base_word(eights, unit * base + number * sharing + part, base, base)
                bits |= high << np.uint32(extra * part)
            packed[(at >> 2) + (base + number) * TILE + lane] = bits
        size = layout.scale_bytes
        for number in range(layout.sets):
            place = at + layout.word_bytes + (number * TILE + lane) * size
            _write(packed, place, size, scales.scales[unit * layout.sets + number])
            if layout.has_minima:
                place += layout.sets * TILE * size
                _write(packed, place, size, scales.minima[unit * layout.sets + number])


@jit
def _base_word(eights, word, base, shift):
    """Codes of a base word of a row, each without its lowest ``shift`` bits and cut to ``base`` bits.

    Args:
        eights: The row's codes, eight bytes in an element.
        word: The word.
        base: Bits per code: 2, 4 or 8.
        shift: 0, or ``base`` for the bits above.
    """
    if base == 8:
        return np.uint32(eights[word >> 1] >> np.uint64(32 * (word & 1)) & _WORD)
    if base == 4:
        return _low_bits(eights[word] >> np.uint64(shift), 4, _LOW_FOUR)
    first, second = eights[2 * word] >> np.uint64(shift), eights[2 * word + 1] >> np.uint64(shift)
    return _low_bits(first, 2, _LOW_TWO) | _low_bits(second, 2, _LOW_TWO) << np.uint32(16)


@jit
def _low_bits(eight, bits, masks):
    """The lowest bits of eight bytes next to each other: of neighbours, then of pairs, then of fours."""
    gap = np.uint64(8 - bits)
    eight &= masks[0]
    eight = (eight | eight >> gap) & masks[1]
    eight = (eight | eight >> gap * np.uint64(2)) & masks[2]
    return np.uint32((eight | eight >> gap * np.uint64(4)) & masks[3])


@jit
def _write(packed, at, size, bits):
    """Write the low ``size`` bytes of ``bits`` at byte ``at`` of an array of uint32."""
    if size == 4:
        packed[at >> 2] = bits
        return
    shift = np.uint32(8 * (at & 3))
    mask = np.uint32(0xFFFF if size == 2 else 0xFF)
    packed[at >> 2] = packed[at >> 2] & ~(mask << shift) | (bits & mask) << shift


@jit
def _read(packed, at, size):
    if size == 4:
        return packed[at >> 2]
    mask = np.uint32(0xFFFF if size == 2 else 0xFF)
    return packed[at >> 2] >> np.uint32(8 * (at & 3)) & mask


def pack_floats(bits, layout, packed, first_output):
    """Pack rows of floating-point numbers."""
    columns = layout.num_units * UNIT
    for row in range(bits.shape[0]):
        output = first_output + row
        at = output // TILE * columns * TILE + output % TILE
        for column in range(bits.shape[1]):
            packed[at + column * TILE] = bits[row, column]


def unpack_rows(packed, layout, table, numbers, outputs, out):
    """Write the weights of some outputs.

    Args:
        packed: The packed matrix as uint32.
        layout: Its layout.
        table: uint8 [16], the number that each code of 4 bits stands for; empty if codes are numbers.
        numbers: float32 [65536], the number that each 16 bits stand for; empty for scales of 32 bits.
        outputs: int64 [num_rows].
        out: float32 [num_rows, num_columns]; written.
    """
    for row in range(outputs.size):
        tile, lane = outputs[row] // TILE, outputs[row] % TILE
        first = tile * layout.tile_bytes
        if layout.bits >= 16:
            size = layout.bits // 8
            for column in range(out.shape[1]):
                bits = _read(packed, first + (column * TILE + lane) * size, size)
                out[row, column] = _number(bits, numbers)
            continue
        supers = -(-layout.num_units // SUPER) if layout.super_bytes else 0
        for column in range(out.shape[1]):
            unit, place = column // UNIT, column % UNIT
            at = first + supers * layout.super_bytes + unit * layout.unit_bytes
            code = _code(packed, at, place, lane, layout)
            if table.size:
                code = np.uint32(table[code])
            scale_at = at + layout.word_bytes + (place * layout.sets // UNIT * TILE + lane) * layout.scale_bytes
            super_at = first + unit // SUPER * layout.super_bytes + 2 * lane
            scale = _scale(packed, scale_at, super_at, layout, numbers)
            if layout.has_minima:
                scale_at += layout.sets * TILE * layout.scale_bytes
                minimum = _scale(packed, scale_at, super_at + 2 * TILE, layout, numbers)
                out[row, column] = scale * np.float32(code) + minimum
            else:
                out[row, column] = scale * np.float32(np.int64(code) - layout.offset)


@jit
def _number(bits, numbers):
    if numbers.size:
        return numbers[bits]
    return np.uint32(bits).view(np.float32)


@jit
def _scale(packed, at, super_at, layout, numbers):
    bits = _read(packed, at, layout.scale_bytes)
    if layout.super_bytes == 0:
        return _number(bits, numbers)
    code = np.int64(bits)
    if layout.signed and code > 127:
        code -= 256
    return np.float32(code) * numbers[_read(packed, super_at, 2)]


@jit
def _code(packed, at, place, lane, layout):
    base, extra = layout.base, layout.extra
    per_word = UNIT // base
    word, index = place // per_word, place % per_word
    code = packed[(at >> 2) + word * TILE + lane] >> np.uint32(base * index) & np.uint32((1 << base) - 1)
    if extra:
        sharing = base // extra
        bits = packed[(at >> 2) + (base + word // sharing) * TILE + lane]
        bits = bits >> np.uint32(base * index + extra * (word % sharing)) & np.uint32((1 << extra) - 1)
        code |= bits << np.uint32(base)
    return code
