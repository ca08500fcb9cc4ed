"""Layers of an mlx-lm model whose weights are packed: the products of a linear layer and of an embedding.

A layer waits for its input, because compiled code reads the memory of evaluated arrays. Layers that have the same
input, such as the projections to q, k and v, share one product: the first of them computes it, the others take their
part.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.kernels.attention.cpu_backend import shared_memory
from workbench.models.packed.matrix import PackedMatrix

FIXED = 'packed weights cannot be replaced: load the model with weights="float32"'
"""Message of the error when a program or a model assigns new weights to a packed layer."""


class Product:
    """A packed matrix and its latest result, for the layers that share it.

    Args:
        matrix: The matrix.
        sizes: Outputs of each layer, from the first output on.
    """

    def __init__(self, matrix: PackedMatrix, sizes: Sequence[int]) -> None:
        self.matrix = matrix
        self.sizes = tuple(sizes)
        self._input: mx.array | None = None
        self._result: np.ndarray | None = None
        self._taken: set[int] = set()

    def part(self, x: mx.array, index: int) -> mx.array:
        """The outputs of one layer, [..., sizes[index]] in x's dtype; x is [..., num_columns]."""
        if self._input is not x or self._result is None or index in self._taken:
            self._result = self.matrix.multiply(rows_in_memory(x).reshape(-1, self.matrix.num_columns))
            self._input, self._taken = x, set()
        first = sum(self.sizes[:index])
        result = self._result[:, first : first + self.sizes[index]]
        self._taken.add(index)
        if len(self._taken) == len(self.sizes):
            self._input = self._result = None  # nothing of the step stays in memory
        return mx.array(result).reshape(*x.shape[:-1], self.sizes[index]).astype(x.dtype)

    def outputs_of(self, index: int) -> np.ndarray:
        """Indices of a layer's outputs in the matrix."""
        first = sum(self.sizes[:index])
        return np.arange(first, first + self.sizes[index])


class PackedLayer(nn.Module):
    """A layer whose weights lie in packed matrices.

    Args:
        matrices: One matrix, or one per expert.
        outputs: The layer's rows of each matrix.
    """

    def __init__(self, matrices: Sequence[PackedMatrix], outputs: np.ndarray) -> None:
        super().__init__()
        self._matrices, self._outputs = tuple(matrices), outputs

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """The matrices that hold its weights."""
        return self._matrices

    @property
    def bits(self) -> int:
        """Bits per weight."""
        return self._matrices[0].form.bits

    @property
    def num_packed_weights(self) -> int:
        """Number of weights, without biases."""
        return len(self._matrices) * len(self._outputs) * self._matrices[0].num_columns

    @property
    def weight(self) -> mx.array:
        """The weights as float32 [num_outputs, num_columns], for a model that computes with them by itself."""
        return mx.array(self._matrices[0].rows(self._outputs))

    @weight.deleter
    def weight(self) -> None:  # MLX deletes an attribute before an array takes its place
        raise AttributeError(FIXED)


class PackedLinear(PackedLayer):
    """``x @ weight.T + bias`` with packed weights.

    Args:
        product: The product it is part of.
        index: Its place among the product's layers.
    """

    def __init__(self, product: Product, index: int = 0) -> None:
        super().__init__([product.matrix], product.outputs_of(index))
        self.product, self.index = product, index

    def __call__(self, x: mx.array) -> mx.array:
        """The layer's outputs, [..., num_outputs] in x's dtype; x is [..., num_columns]."""
        y = self.product.part(x, self.index)
        return y + self.bias if "bias" in self else y

    def _extra_repr(self) -> str:
        return f"{self.product.matrix.num_columns} -> {len(self._outputs)}, {self.bits} bits"


class PackedEmbedding(PackedLayer):
    """An embedding with packed weights, which can also be the language-model head.

    Args:
        product: The product of the head.
        dtype: Element type of the embeddings.
    """

    def __init__(self, product: Product, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__([product.matrix], product.outputs_of(0))
        self.product, self._dtype = product, dtype

    def __call__(self, token_ids: mx.array) -> mx.array:
        """Embeddings of token ids, [*token_ids.shape, hidden_size]."""
        rows = self.product.matrix.rows(np.array(token_ids, dtype=np.int64).reshape(-1))
        return mx.array(rows).reshape(*token_ids.shape, -1).astype(self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of x [..., hidden_size]."""
        return self.product.part(x, 0)

    def _extra_repr(self) -> str:
        return f"{len(self._outputs)}, {self.product.matrix.num_columns}, {self.bits} bits"


def rows_in_memory(x: mx.array) -> np.ndarray:
    """An input in memory, float32 and contiguous, in its shape."""
    if x.dtype != mx.float32:
        x = x.astype(mx.float32)
    mx.eval(x)
    return np.ascontiguousarray(shared_memory(x)).reshape(x.shape)
