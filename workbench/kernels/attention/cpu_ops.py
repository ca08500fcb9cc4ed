"""Element-wise operations of a model, vectorised; on a CPU, MLX computes one exponential at a time."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.cpu_backend import shared_memory
from workbench.kernels.cpu.attention.compiled import EntryPoint
from workbench.kernels.cpu.attention.processor import LANES

_swiglu = EntryPoint("workbench.kernels.attention.cpu_ops_code:swiglu")


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up`` in float32, evaluated immediately.

    Args:
        gate: float32 of any shape.
        up: float32 of the same shape.

    Returns:
        float32 of that shape, within 2e-6 of the exact value if that is a normal number.

    Raises:
        ValueError: A dtype is not float32, or the shapes differ.
    """
    if gate.shape != up.shape or gate.dtype != mx.float32 or up.dtype != mx.float32:
        raise ValueError(
            f"gate is {gate.dtype} {gate.shape} and up is {up.dtype} {up.shape}; both must be float32 and have the "
            "same shape"
        )
    mx.eval(gate, up)
    out = np.empty(gate.size, np.float32)
    _swiglu(out, shared_memory(gate).reshape(-1), shared_memory(up).reshape(-1), np.zeros(2 * LANES, np.float32))
    return mx.array(out.reshape(gate.shape))
