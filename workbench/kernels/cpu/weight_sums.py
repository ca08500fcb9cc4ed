"""Sums of the softmax weights of a row of logits, block by block: all that sampling needs of a whole vocabulary.

NumPy's exp of float64 takes twice as long on a processor without AVX-512, and reads and writes memory in between.
"""

from __future__ import annotations

import numpy as np

from workbench.kernels.cpu.attention.compiled import EntryPoint

BLOCK = 64
"""Logits of a block."""

sum_weights = EntryPoint("workbench.kernels.cpu.weight_sums_code:sum_weights")
"""Sums the weights; see `workbench.kernels.cpu.weight_sums_code` for the arguments."""


def sum_with_numpy(logits: np.ndarray, largest: float, scale: float, low: float, high: float, sums: np.ndarray) -> None:
    """The same sums but for rounding, while the function is compiled by another process."""
    weights = np.exp((logits - largest) * scale)
    starts = np.arange(0, len(logits), BLOCK)
    for row, limit in zip(sums, (low, high)):
        row[:] = np.add.reduceat(np.where(logits > limit, weights, 0.0), starts)


def keep_sum_weights() -> None:
    """Compile the function for the arguments that sampling gives it, if it is not kept."""
    sum_weights.address(np.zeros(1), 0.0, 1.0, 0.0, 0.0, np.empty((2, 1)))
