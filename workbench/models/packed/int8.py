"""Activations of 8 bits for a model with packed weights, an option that changes logits.

An input of a product becomes codes of 8 bits with a scale per 32 columns, and sums of a group are integers. When a
model is loaded, these products are compared with exact products of the numbers that the codes stand for.
"""

from __future__ import annotations

import time

import mlx.nn as nn
import numpy as np

from workbench.kernels.cpu.attention.processor import instruction_set
from workbench.kernels.cpu.formats import GGML_FORMATS, Activations
from workbench.models.packed.activations import packed_matrices
from workbench.models.packed.check import ProductChecks
from workbench.models.packed.matrix import PackedMatrix
from workbench.models.remembered import Remembered

_ROWS, _REPEATS = 16, 3


def why_no_int8() -> str:
    """Why this processor cannot multiply activations of 8 bits; empty if it can."""
    return "" if instruction_set() else "compiled code knows no instructions of this processor that multiply bytes"


def takes_int8(model: nn.Module) -> bool:
    """Whether activations of 8 bits would change this model's products on this processor."""
    return not why_no_int8() and any(matrix.form.takes("int8") for matrix in packed_matrices(model).values())


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


def int8_gain() -> str:
    """The speed of products with activations of 8 bits on this machine, measured in a moment.

    A single row reads 40 MiB of weights, more than a cache holds; several are limited by arithmetic.
    """
    one, several = _gain(1, 8192), _gain(_ROWS, 1024)
    return f"products with weights of 4 bits are {one:.1f} times as fast, {several:.1f} with {_ROWS} rows"


def _gain(num_rows: int, num_outputs: int) -> float:
    """CPU time of a product with float32 activations, in units of that with int8."""
    matrix, x = PackedMatrix(GGML_FORMATS["Q4_1"], num_outputs, 8192), np.ones((num_rows, 8192), np.float32)
    matrix.data[:] = 0x3C  # scales of about 1; pages that nobody has written would share one page, held by a cache
    seconds: dict[Activations, list[float]] = {"float32": [], "int8": []}
    for _ in range(_REPEATS):
        for activations, measured in seconds.items():
            matrix.use(activations)
            started = time.process_time()
            matrix.multiply(x)
            measured.append(time.process_time() - started)
    return min(seconds["float32"]) / min(seconds["int8"])
