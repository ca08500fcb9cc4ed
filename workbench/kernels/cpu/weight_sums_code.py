"""`workbench.kernels.cpu.weight_sums`, compiled."""

from __future__ import annotations

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from workbench.kernels.cpu.weight_sums import BLOCK

LOWEST = -700.0
"""Lower exponents count as this one."""

_ROUND = 1.5 * 2.0**52
_LOG2_E = 1.4426950408889634
_LN2, _LN2_REST = 0.693147180369123816490, 1.90821492927058770002e-10
_EXP = (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040, 1 / 40320, 1 / 362880, 1 / 3628800)
"""e**x on [-0.35, 0.35] to 3e-13, constant term first."""


@intrinsic
def _power_of_two(typing_context, rounded):
    """2**n of a float64 to which adding `_ROUND` has left the integer n in its low bits."""

    def codegen(context, builder, signature, values):
        bits = ir.IntType(64)
        exponent = builder.add(builder.bitcast(values[0], bits), bits(1023))
        return builder.bitcast(builder.shl(exponent, bits(52)), ir.DoubleType())

    return types.float64(types.float64), codegen


# Sums may be added in any order, which lets LLVM add in vectors.
@numba.njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _sum_block(logits, first, stop, largest, scale, low, high):
    above_low, above_high = 0.0, 0.0
    for at in range(first, stop):
        x = max((logits[at] - largest) * scale, LOWEST)
        rounded = x * _LOG2_E + _ROUND
        whole = rounded - _ROUND
        f = (x - whole * _LN2) - whole * _LN2_REST
        weight = _EXP[10]
        weight = weight * f + _EXP[9]
        weight = weight * f + _EXP[8]
        weight = weight * f + _EXP[7]
        weight = weight * f + _EXP[6]
        weight = weight * f + _EXP[5]
        weight = weight * f + _EXP[4]
        weight = weight * f + _EXP[3]
        weight = weight * f + _EXP[2]
        weight = weight * f + _EXP[1]
        weight = (weight * f + _EXP[0]) * _power_of_two(rounded)
        above_low += weight if logits[at] > low else 0.0
        above_high += weight if logits[at] > high else 0.0
    return above_low, above_high


def sum_weights(logits, largest, scale, low, high, sums):
    """Sums of ``exp((logit - largest) * scale)`` over the logits of each block that are above a limit.

    Args:
        logits: float64 [vocab_size]; -inf is allowed.
        largest: The largest of them, finite.
        scale: One over the temperature.
        low: A limit; -inf leaves out logits of -inf alone.
        high: A second limit.
        sums: float64 [2, ceil(vocab_size / `BLOCK`)], those above ``low`` and those above ``high``; written.
    """
    for block in range(sums.shape[1]):
        first = block * BLOCK
        stop = min(first + BLOCK, len(logits))
        sums[0, block], sums[1, block] = _sum_block(logits, first, stop, largest, scale, low, high)
