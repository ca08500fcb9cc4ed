"""The weights of a layer as mlx-lm has loaded them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from workbench.kernels.cpu.formats import ScaleKind
from workbench.models.packed import matrix

_SCALES: dict[mx.Dtype, ScaleKind] = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}
_NUMBERS = {mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}
LINEAR = (nn.Linear, nn.Embedding, SwitchLinear)
"""Layers of floating-point numbers that can be packed."""
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


@dataclass
class Source(ABC):
    """The stored weights of a layer.

    Attributes:
        arrays: The weights, and scales and biases as far as there are some: [num_outputs, ...] each, or
            [num_experts, num_outputs, ...].
    """

    arrays: list[Any]

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Layers can share a matrix if these are equal."""

    @abstractmethod
    def dequantised(self, rows: np.ndarray) -> np.ndarray:
        """Some rows of the weights, float32 [len(rows), num_columns], dequantised by other code than ours."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weights."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def num_experts(self) -> int:
        """Number of experts; 0 for a layer that has one matrix."""
        return self.arrays[0].shape[0] if self.arrays[0].ndim == 3 else 0

    @property
    def num_outputs(self) -> int:
        """Rows of the matrix, or of that of each expert."""
        return self.arrays[0].shape[-2]

    def expert(self, index: int) -> Self:
        """The weights of one expert."""
        return replace(self, arrays=[array[index] for array in self.arrays])

    def rows_of_expert(self, index: int, rows: np.ndarray) -> np.ndarray:
        """`dequantised` of one expert."""
        return self.expert(index).dequantised(rows)


@dataclass
class Stored(Source):
    """Stored weights of mlx-lm that can be packed.

    Attributes:
        kind: "affine" or "mxfp4", MLX's quantisations, or the ggml type of floating-point numbers.
        bits: Bits per weight.
        scales: Type of the scales.
        group_size: Columns per scale.
    """

    kind: str
    bits: int = 0
    scales: ScaleKind = "none"
    group_size: int = 0

    @property
    def key(self) -> tuple[str, int, ScaleKind]:
        """Layers can share a matrix if these are equal."""
        return self.kind, self.bits, self.scales

    def dequantised(self, rows: np.ndarray) -> np.ndarray:
        """Some rows of the weights, float32 [len(rows), num_columns], as MLX dequantises them."""
        weight, *others = (array[mx.array(rows)] for array in self.arrays)
        if self.kind == "affine":
            scales, biases = (array.astype(mx.float32) for array in others)
            weight = mx.dequantize(weight, scales, biases, self.group_size, self.bits)
        elif self.kind == "mxfp4":
            weight = mx.dequantize(weight, others[0], None, self.group_size, self.bits, mode="mxfp4")
        return np.array(weight.astype(mx.float32))


def stored_weights(module: nn.Module) -> Stored | None:
    """The stored weights of a layer; None if they cannot be packed."""
    if type(module) in _QUANTIZED:
        mode = getattr(module, "mode", "affine")
        if mode == "affine" and module.scales.dtype in _SCALES:
            arrays = [module.weight, module.scales, module.biases]
            return Stored(arrays, mode, int(module.bits), _SCALES[module.scales.dtype], module.group_size)
        if mode == "mxfp4":
            return Stored([module.weight, module.scales], mode, 4, "bfloat16", module.group_size)
    if type(module) in LINEAR and module.weight.dtype in _NUMBERS:
        return Stored([module.weight], _NUMBERS[module.weight.dtype])
    return None


def pack(parts: Sequence[Stored]) -> matrix.PackedMatrix:
    """The packed matrix of one or more matrices of a key, one below the other."""
    kind, bits, scales = parts[0].key
    stored = [[_bits_of(array) for array in part.arrays] for part in parts]
    if kind == "affine":
        return matrix.from_affine(bits, [(part[0], part[1], part[2]) for part in stored], scales)
    if kind == "mxfp4":
        return matrix.from_mxfp4([(part[0], part[1]) for part in stored])
    return matrix.from_ggml(kind, [part[0] for part in stored])


def _bits_of(array: mx.array) -> np.ndarray:
    """An array's bits in memory: uint8, uint16 or uint32."""
    if array.dtype in (mx.float16, mx.bfloat16):
        array = array.view(mx.uint16)
    elif array.dtype == mx.float32:
        array = array.view(mx.uint32)
    mx.eval(array)
    return np.ascontiguousarray(np.asarray(array))
