"""Activations of 8 bits for a model with packed weights, an option that changes logits.

An input of a product becomes codes of 8 bits with a scale per 32 columns, and sums of a group are integers. When a
model is loaded, these products are compared with exact products of the numbers that the codes stand for.
"""

from __future__ import annotations

import mlx.nn as nn

from workbench.cpu.int8_inputs import instruction_set
from workbench.models.packed.activations import packed_matrices
from workbench.models.packed.check import ProductChecks
from workbench.models.remembered import Remembered


def why_no_int8() -> str:
    """Why this processor cannot multiply activations of 8 bits; empty if it can."""
    return "" if instruction_set() else "compiled code knows no instructions of this processor that multiply bytes"


def use_int8(model: nn.Module, remembered: Remembered) -> None:
    """Make the activations of every product with codes 8 bits wide; weights of 16 and 32 bits keep float32.

    Args:
        model: The model with packed weights.
        remembered: Products that passed their check in an earlier start are not checked again.

    Raises:
        ValueError: No weights are codes.
        WrongProductError: A product is wrong.
    """
    matrices = {path: matrix for path, matrix in packed_matrices(model).items() if matrix.form.takes("int8")}
    if not matrices:
        raise ValueError('activations="int8" needs quantised weights, and this model has none: use "float32"')
    checks = ProductChecks(remembered, "int8 products")
    for path, matrix in matrices.items():
        matrix.use("int8")
        checks.check(matrix, matrix.rows, path)
    checks.keep()
