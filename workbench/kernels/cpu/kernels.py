"""Compiled products with packed weights: ``y = x @ w.T`` in float32.

One function is compiled per format (`product_kernel`) and called by its address, so compiled code that runs a whole
model need not know formats when it is compiled.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from workbench.kernels.cpu.attention.compiled import EntryPoint
from workbench.kernels.cpu.attention.object_code import Signature, Wanted, code_of
from workbench.kernels.cpu.attention.processor import LANES
from workbench.kernels.cpu.formats import Activations, Format

WIDE = LANES != 8
"""Whether there are 32 vector registers, as in AVX-512 and on Arm; AVX2 has 16."""

MANY = 8 if WIDE else 4
"""Rows of the tile that many rows are cut into; the last 1 to 6 share a tile."""

TILE_ROWS = (1, 2, 3, 4, 5, 6, 8) if WIDE else (1, 2, 3, 4, 5, 6)
"""Rows of each tile."""

ROWS = 128
"""Maximum number of rows that products take at a time: their input fits into the second-level cache, and what surrounds
products needs memory for no more. Weights are read again for the next rows."""

PROBED_ROWS = (*TILE_ROWS, 7, 11) if WIDE else (*TILE_ROWS, 7, 11, 27, 28, 29)
"""Numbers of rows that together take each tile, with panels and without."""

multiply = EntryPoint("workbench.kernels.cpu.kernels_code:multiply")
"""``y = x @ w.T`` for some outputs; see `workbench.kernels.cpu.kernels_code` for the arguments."""


@cache
def product_kernel(form: Format, activations: Activations = "float32") -> int:
    """Address of the product kernel of a format, compiled or read from disk on first use."""
    home, types = "workbench.kernels.cpu.kernels_code", repr((tuple(form), activations))

    def signature() -> Signature:
        return import_module(home).product_signature(form, activations)

    return code_of(Wanted(home, "product", types, signature, for_python=False)).address
