"""Compare products with packed weights to the same products with dequantised weights, when a model is loaded.

A model that is compared with itself shows nothing about a wrong product, because both sides are wrong. So the weights
of some outputs are dequantised by other code (PyPI gguf, MLX), and multiplied in float64. The same comparison with the
input shifted by a column has to fail. The rows that an embedding reads are compared with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from workbench.kernels.cpu.formats import TILE, UNIT
from workbench.kernels.cpu.kernels import PROBED_ROWS
from workbench.models.packed.errors import WrongProductError
from workbench.models.packed.experts import PackedExperts, WeightsOf
from workbench.models.packed.matrix import PackedMatrix
from workbench.models.remembered import Remembered

TOLERANCE = 1e-5
"""Largest error of a product that rounding explains, relative to the sum of the magnitudes of its terms."""

_PROBED_ROWS = 12


class ProductChecks:
    """Probes one packed matrix of each format and shape of a model.

    Args:
        remembered: Formats and shapes that passed in an earlier start are not probed again.
        name: Name of the finding.
    """

    def __init__(self, remembered: Remembered, name: str = "products") -> None:
        self._remembered, self._name = remembered, name
        self._passed: set[str] = set(remembered.get(name) or ())

    def check(self, matrix: PackedMatrix, dequantised: Callable[[np.ndarray], np.ndarray], name: str) -> None:
        """Probe a matrix, unless one of its format and shape has passed: see `check_products`.

        Raises:
            WrongProductError: A product is wrong, or the shifted input cannot be told from the right one.
        """
        kind = f"{matrix.num_outputs} x {matrix.num_columns}, {tuple(matrix.form)}"
        if kind not in self._passed:
            check_products(matrix, dequantised, name)
            self._passed.add(kind)

    def check_experts(self, layer: PackedExperts, dequantised: WeightsOf, name: str) -> None:
        """Probe the matrix of the first expert, and whether rows meet the matrices of their experts.

        Raises:
            WrongProductError: A product is wrong, or one of another expert cannot be told from the right one.
        """
        self.check(layer.matrices[0], partial(dequantised, 0), name)
        kind = f"{layer.num_experts} of {layer.output_dims} x {layer.input_dims}, {tuple(layer.matrices[0].form)}"
        if kind not in self._passed:
            check_experts(layer, dequantised, name)
            self._passed.add(kind)

    def keep(self) -> None:
        """Remember what passed."""
        if self._passed != set(self._remembered.get(self._name) or ()):
            self._remembered.put(self._name, sorted(self._passed))


_WEIGHTS = {"float32": "its dequantised weights", "int8": "the numbers that codes of 8 bits stand for"}


def check_products(matrix: PackedMatrix, dequantised: Callable[[np.ndarray], np.ndarray], name: str) -> None:
    """Probe a packed matrix.

    Args:
        matrix: The matrix.
        dequantised: Gives the weights of some outputs, float32 [len(outputs), num_columns], from their source.
        name: Name of a layer, for the message.

    Raises:
        WrongProductError: A product or a row is wrong, a weight is not a finite number, or the shifted input cannot be
            told from the right one.
    """
    outputs = _probed_outputs(matrix.num_outputs)
    weights = _as_float64(dequantised(outputs), name)
    generator = np.random.default_rng(matrix.num_outputs)
    for num_rows in PROBED_ROWS:
        x = generator.standard_normal((num_rows, matrix.num_columns)).astype(np.float32)
        result = matrix.multiply(x)[:, outputs]
        x = x if matrix.activations == "float32" else as_int8(x)
        error = _error(result, x, weights)
        control = _error(result, np.roll(x, 1, axis=1), weights)
        if not error <= TOLERANCE:  # also true of a NaN
            raise WrongProductError(
                f"the product with {name} ({matrix.form.bits} bits, {matrix.num_outputs} x {matrix.num_columns}) "
                f"differs from that with {_WEIGHTS[matrix.activations]} by {error:.1e} of its terms "
                f"(allowed: {TOLERANCE:.0e})"
            )
        if not control > 10 * TOLERANCE and weights.any() and matrix.num_columns > 1:
            raise WrongProductError(f"a shifted input changes the product with {name} by {control:.1e} only")
    error = np.abs(matrix.rows(outputs) - weights).max() / max(np.abs(weights).max(), np.finfo(np.float32).tiny)
    if not error <= TOLERANCE:
        raise WrongProductError(
            f"rows of {name} ({matrix.form.bits} bits, {matrix.num_outputs} x {matrix.num_columns}) differ from its "
            f"dequantised weights by {error:.1e} of the largest (allowed: {TOLERANCE:.0e})"
        )


def check_experts(layer: PackedExperts, dequantised: WeightsOf, name: str) -> None:
    """Probe the choice of experts: rows in random order, some of the same expert.

    Args:
        layer: The experts.
        dequantised: Gives the weights of some outputs of an expert, from their source.
        name: Name of the layer, for the message.

    Raises:
        WrongProductError: A product is wrong, a weight is not a finite number, or another expert's product cannot be
            told from the right one.
    """
    generator = np.random.default_rng(layer.num_experts)
    experts = generator.integers(0, layer.num_experts, _PROBED_ROWS)
    x = generator.standard_normal((len(experts), layer.input_dims)).astype(np.float32)
    outputs = _probed_outputs(layer.output_dims)
    result = layer.products(x, experts)[:, outputs]
    used = sorted({*experts.tolist(), *(experts - 1).tolist()} - {-1})
    weights = {e: _as_float64(dequantised(e, outputs), f"expert {e} of {name}") for e in used}
    for row, expert in enumerate(experts.tolist()):
        error = _error(result[row : row + 1], x[row : row + 1], weights[expert])
        if not error <= TOLERANCE:
            raise WrongProductError(f"a product with expert {expert} of {name} is off by {error:.1e} of its terms")
        other = weights.get(expert - 1)
        if other is not None and not np.array_equal(other, weights[expert]):
            control = _error(result[row : row + 1], x[row : row + 1], other)
            if not control > TOLERANCE:
                raise WrongProductError(f"another expert changes a product with {name} by {control:.1e} only")


def as_int8(x: np.ndarray) -> np.ndarray:
    """The numbers that an input's codes of 8 bits stand for.

    Args:
        x: float32 [num_rows, num_columns].

    Returns:
        float64, likewise.
    """
    num_rows, num_columns = x.shape
    units = np.pad(x, ((0, 0), (0, -num_columns % UNIT))).reshape(num_rows, -1, UNIT)
    scales = np.abs(units).max(axis=-1, keepdims=True) / np.float32(127)
    codes = np.rint(units * (np.float32(1) / np.where(scales > 1e-30, scales, np.float32(np.inf))))
    return (codes.astype(np.float64) * scales).reshape(num_rows, -1)[:, :num_columns]


def _probed_outputs(num_outputs: int) -> np.ndarray:
    """Outputs of the first tile, of one in the middle, and of the last two, whose second may be partly empty."""
    middle = num_outputs // 2 // TILE * TILE
    ranges = [range(TILE), range(middle, middle + TILE), range(num_outputs - TILE - 1, num_outputs)]
    return np.array(sorted({output for span in ranges for output in span if 0 <= output < num_outputs}))


def _as_float64(weights: np.ndarray, name: str) -> np.ndarray:
    """Weights that a product can be compared with; those of a damaged file are named as such."""
    if not np.isfinite(weights).all():
        raise WrongProductError(f"{name} holds weights that are not finite numbers; its file may be damaged")
    return weights.astype(np.float64)


def _error(result: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    expected = x.astype(np.float64) @ weights.T
    terms = np.abs(x).astype(np.float64) @ np.abs(weights).T
    return float((np.abs(result - expected) / np.maximum(terms, np.finfo(np.float32).tiny)).max())
