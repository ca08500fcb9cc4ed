"""Rows of stored matrices as codes and scales: one compiled function per kind of block.

Each takes a stored row and fills ``codes``, uint8 [num_columns], and the bits of its scales and minima; the layouts are
those of ggml's block types, in the order of the structures' fields in ``ggml-common.h``, and MLX's affine quantisation.
"""

from __future__ import annotations

import numpy as np

from workbench.kernels.cpu.attention.simd import jit
from workbench.kernels.cpu.packing import BYTES, POWERS, Q2_K, Q3_K, Q4_K, power


@jit
def decode_small_blocks(kind, row, minima, extra, codes, scales):
    """A row of ggml blocks of 32 columns, kinds NIBBLES, BYTES and POWERS (nibbles whose scale is a power of two).

    Args:
        kind: The kind.
        row: uint8 [bytes of the row].
        minima: Whether groups have minima.
        extra: Bits beside the four low ones.
        codes: uint8 [num_columns]; written.
        scales: `Scales` of the row, whose ``scales`` and ``minima`` are written.
    """
    header = 4 if minima else 1 if kind == POWERS else 2
    size = header + (32 if kind == BYTES else 16 + (4 if extra else 0))
    for block in range(codes.size // 32):
        at = block * size
        scales.scales[block] = _power(row[at]) if kind == POWERS else _half(row, at)
        if minima:
            scales.minima[block] = _half(row, at + 2)
        _decode_small(kind, row, at + header, extra, codes, block * 32)


@jit
def decode_super_blocks(kind, row, extra, codes, scales):
    """A row of ggml blocks of 256 columns, the other kinds, whose scales are codes.

    Args:
        kind: The kind.
        row: uint8 [bytes of the row].
        extra: Bits beside the four or two low ones.
        codes: uint8 [num_columns]; written.
        scales: `Scales` of the row; written. The sign of ``shared_minima`` makes them summands.
    """
    codes_of_scales, minimum, shared = scales.scales, scales.minima, scales.shared
    for block in range(codes.size // 256):
        if kind == Q2_K:
            _decode_q2_k(row, block * 84, codes, block * 256)
            for index in range(16):
                both = row[block * 84 + index]
                codes_of_scales[block * 16 + index] = both & 15
                minimum[block * 16 + index] = both >> 4
            shared[block] = _half(row, block * 84 + 80)
            scales.shared_minima[block] = _half(row, block * 84 + 82) ^ np.uint32(0x8000)
        elif kind == Q3_K:
            _decode_q3_k(row, block * 110, codes, block * 256)
            for index in range(16):
                at = block * 110 + 96
                low = row[at + index % 8] >> (4 * (index // 8)) & 15
                high = row[at + 8 + index % 4] >> (2 * (index // 4)) & 3
                codes_of_scales[block * 16 + index] = np.uint32((np.int64(low) + 16 * np.int64(high) - 32) & 255)
            shared[block] = _half(row, block * 110 + 108)
        elif kind == Q4_K:
            at = block * (176 if extra else 144)
            shared[block] = _half(row, at)
            scales.shared_minima[block] = _half(row, at + 2) ^ np.uint32(0x8000)
            _decode_six_bit_scales(row, at + 4, codes_of_scales, minimum, block * 8)
            _decode_q4_k(row, at + 16, extra, codes, block * 256)
        else:
            at = block * 210
            _decode_q6_k(row, at, codes, block * 256)
            for index in range(16):
                codes_of_scales[block * 16 + index] = row[at + 192 + index]
            shared[block] = _half(row, at + 208)


_power = jit(power)


@jit
def _half(row, at):
    return np.uint32(row[at]) | np.uint32(row[at + 1]) << np.uint32(8)


@jit
def _decode_small(kind, row, at, extra, codes, first):
    """32 codes of one byte, or of four bits and perhaps a fifth: byte j holds those of columns j and j + 16."""
    out = codes[first : first + 32]  # a slice, so that LLVM sees that no index is negative, and takes many at once
    if kind == BYTES:
        stored = row[at : at + 32]
        for j in range(32):
            out[j] = stored[j] ^ 0x80
        return
    low_at = at + 4 if extra else at
    stored = row[low_at : low_at + 16]
    for j in range(16):
        out[j] = stored[j] & 15
        out[j + 16] = stored[j] >> 4
    if extra:
        for j in range(16):
            out[j] |= (row[at + j // 8] >> (j % 8) & 1) << 4
            out[j + 16] |= (row[at + 2 + j // 8] >> (j % 8) & 1) << 4


@jit
def _decode_q2_k(row, at, codes, first):
    for half in range(2):
        for part in range(4):
            for j in range(32):
                codes[first + half * 128 + part * 32 + j] = row[at + 16 + half * 32 + j] >> (2 * part) & 3


@jit
def _decode_q3_k(row, at, codes, first):
    for half in range(2):
        for part in range(4):
            for j in range(32):
                low = row[at + 32 + half * 32 + j] >> (2 * part) & 3
                high = row[at + j] >> (half * 4 + part) & 1
                codes[first + half * 128 + part * 32 + j] = low | high << 2


@jit
def _decode_six_bit_scales(row, at, scales, minimum, first):
    """Eight scales and eight minima of six bits in twelve bytes."""
    for j in range(4):
        scales[first + j] = row[at + j] & 63
        minimum[first + j] = row[at + 4 + j] & 63
        scales[first + 4 + j] = (row[at + 8 + j] & 15) | (row[at + j] >> 6) << 4
        minimum[first + 4 + j] = (row[at + 8 + j] >> 4) | (row[at + 4 + j] >> 6) << 4


@jit
def _decode_q4_k(row, at, extra, codes, first):
    low_at = at + 32 if extra else at
    for pair in range(4):
        stored_at, out_at = low_at + pair * 32, first + pair * 64
        stored, out = row[stored_at : stored_at + 32], codes[out_at : out_at + 64]
        for j in range(32):
            out[j] = stored[j] & 15
            out[j + 32] = stored[j] >> 4
        if extra:
            fifth = row[at : at + 32]
            for j in range(32):
                out[j] |= (fifth[j] >> (2 * pair) & 1) << 4
                out[j + 32] |= (fifth[j] >> (2 * pair + 1) & 1) << 4


@jit
def _decode_q6_k(row, at, codes, first):
    for half in range(2):
        for part in range(4):
            stored_at, out_at = at + half * 64 + part % 2 * 32, first + (4 * half + part) * 32
            stored, out = row[stored_at : stored_at + 32], codes[out_at : out_at + 32]
            upper = row[at + 128 + half * 32 : at + 160 + half * 32]
            for j in range(32):
                out[j] = (stored[j] >> (4 * (part // 2)) & 15) | (upper[j] >> (2 * part) & 3) << 4


@jit
def decode_bits(row, bits, codes):
    """A row of codes of equal width, lowest bits first, as MLX stores them.

    Args:
        row: uint8 [num_columns * bits / 8].
        bits: Bits per code, at most 8.
        codes: uint8 [num_columns]; written.
    """
    mask = np.uint32((1 << bits) - 1)
    for column in range(codes.size):
        at = column * bits
        word = np.uint32(row[at // 8])
        if at % 8 + bits > 8:
            word |= np.uint32(row[at // 8 + 1]) << np.uint32(8)
        codes[column] = word >> np.uint32(at % 8) & mask
