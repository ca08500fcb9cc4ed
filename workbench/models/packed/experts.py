"""The experts of a mixture, each a packed matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from workbench.models.packed.layers import FIXED, PackedLayer, rows_in_memory
from workbench.models.packed.matrix import PackedMatrix


class PackedExperts(PackedLayer):
    """mlx-lm's ``SwitchLinear`` with packed weights: a linear layer per expert, and each row names its expert.

    Args:
        matrices: A matrix per expert.
    """

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        super().__init__(matrices, np.arange(matrices[0].num_outputs))

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.matrices)

    @property
    def input_dims(self) -> int:
        """Columns of each expert's matrix."""
        return self.matrices[0].num_columns

    @property
    def output_dims(self) -> int:
        """Rows of each expert's matrix."""
        return self.matrices[0].num_outputs

    @property
    def weight(self) -> mx.array:
        """The weights as float32 [num_experts, num_outputs, num_columns], for a model that computes by itself."""
        return mx.array(np.stack([matrix.rows(self._outputs) for matrix in self.matrices]))

    @weight.deleter
    def weight(self) -> None:
        raise AttributeError(FIXED)

    def products(self, x: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Each row multiplied with the matrix of its expert; rows of one expert share a product.

        Args:
            x: float32 [num_rows, num_columns].
            experts: Integers [num_rows].

        Returns:
            float32 [num_rows, num_outputs].
        """
        y = np.empty((len(x), self.output_dims), np.float32)
        for expert in np.unique(experts):
            rows = np.flatnonzero(experts == expert)
            y[rows] = self.matrices[expert].multiply(x[rows])
        return y

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """The outputs of the experts that are named, as mlx-lm's layer has them.

        Args:
            x: [..., num_rows, num_columns], whose leading dimensions are broadcast to those of ``indices``.
            indices: The expert of each block of rows, integers [...].
            sorted_indices: Has no effect.

        Returns:
            [*indices.shape, num_rows, num_outputs] in x's dtype.
        """
        shape, num_rows = tuple(indices.shape), x.shape[-2]
        inputs = np.broadcast_to(rows_in_memory(x), (*shape, *x.shape[-2:]))
        experts = np.repeat(np.array(indices).reshape(-1), num_rows)
        y = self.products(np.ascontiguousarray(inputs).reshape(-1, self.input_dims), experts)
        outputs = mx.array(y.reshape(*shape, num_rows, -1)).astype(x.dtype)
        return outputs + mx.expand_dims(self.bias[indices], -2) if "bias" in self else outputs

    def _extra_repr(self) -> str:
        return f"{self.num_experts} x {self.input_dims} -> {self.output_dims}, {self.bits} bits"


WeightsOf = Callable[[int, np.ndarray], np.ndarray]
"""Some rows of the weights of an expert, float32, from their source."""
