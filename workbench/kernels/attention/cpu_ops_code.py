"""`workbench.kernels.attention.cpu_ops`, compiled."""

from __future__ import annotations

import numpy as np

from workbench.kernels.cpu.attention.simd import LANES, exp, jit, load, splat, store

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@jit
def _vector(gate, up):
    return gate / (splat(_ONE) + exp(splat(_ZERO) - gate)) * up


def swiglu(out, gate, up, rest):
    """Whole vectors in place; the remaining elements go through ``rest``, two vectors of zeros."""
    whole = out.size - out.size % LANES
    for at in range(0, whole, LANES):
        store(out, at, _vector(load(gate, at), load(up, at)))
    for at in range(whole, out.size):
        rest[at - whole] = gate[at]
        rest[at - whole + LANES] = up[at]
    store(rest, 0, _vector(load(rest, 0), load(rest, LANES)))
    for at in range(whole, out.size):
        out[at] = rest[at - whole]
