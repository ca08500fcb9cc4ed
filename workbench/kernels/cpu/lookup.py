"""A table of 16 bytes that one instruction looks up for every byte of a register: ``pshufb`` on x86, ``tbl`` on Arm."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import binding, ir
from numba.core import cgutils

from workbench.kernels.cpu.attention.processor import LANES, cpu_features

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_SIZE = 4 * LANES
"""Bytes of a register."""


def _instruction() -> tuple[str, int]:
    """LLVM's name of the instruction, and the bytes it looks up."""
    if "x86" not in binding.get_default_triple():
        return "llvm.aarch64.neon.tbl1.v16i8", 16
    if LANES == 16 and "avx512bw" in cpu_features():
        return "llvm.x86.avx512.pshuf.b.512", 64
    return ("llvm.x86.avx2.pshuf.b", 32) if LANES >= 8 else ("llvm.x86.ssse3.pshuf.b.128", 16)


def entries(builder: ir.IRBuilder, table: Sequence[int], indices: ir.Value) -> ir.Value:
    """The entries of a table that bytes name.

    Args:
        builder: Builder of the function.
        table: 16 numbers from 0 to 255.
        indices: LANES words of 32 bits, in each of whose bytes is a number from 0 to 15.

    Returns:
        The entries in place of the bytes.
    """
    name, size = _instruction()
    kind = ir.VectorType(_BYTE, size)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind, kind]), name)
    copies = ir.Constant(kind, list(table) * (size // 16))
    whole = builder.bitcast(indices, ir.VectorType(_BYTE, _SIZE))
    found = None
    for first in range(0, _SIZE, size):
        part = _lanes(builder, whole, whole, range(first, first + size))
        part = builder.call(function, [copies, part])
        found = part if found is None else _lanes(builder, found, part, range(2 * size))
    return builder.bitcast(found, indices.type)


def _lanes(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: range) -> ir.Value:
    """Some of the elements of two vectors, one behind the other."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(lanes)), list(lanes)))
