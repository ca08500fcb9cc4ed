"""Sums of the softmax weights of a row of logits, block by block: all that sampling needs of a whole vocabulary.

NumPy's exp of float64 takes twice as long on a processor without AVX-512, and reads and writes memory in between.
"""

from __future__ import annotations

from workbench.kernels.cpu.attention.compiled import EntryPoint

BLOCK = 64
"""Logits of a block."""

sum_weights = EntryPoint("workbench.kernels.cpu.weight_sums_code:sum_weights")
"""Sums the weights; see `workbench.kernels.cpu.weight_sums_code` for the arguments."""
