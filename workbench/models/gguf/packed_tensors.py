"""The tensors of a GGUF file as packed weights, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.kernels.cpu.formats import GGML_FORMATS
from workbench.models.gguf.file import GGUFFile, GGUFTensor
from workbench.models.packed.matrix import PackedMatrix
from workbench.models.packed.pack_model import Packed, packed_layers, put_packed
from workbench.models.packed.stored import LINEAR, Source
from workbench.models.remembered import Remembered

_BLOCK_BYTES = 2**21
"""Stored bytes of a matrix that are packed at a time."""


def packed_names(file: GGUFFile, names: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Tensor name and path of each layer whose weights can be packed, from the parameter of each tensor."""
    layers = {path for path, module in model.named_modules() if type(module) in LINEAR}
    return {
        tensor_name: path
        for tensor_name, parameter in names.items()
        if (path := parameter.removesuffix(".weight")) in layers
        and parameter.endswith(".weight")
        and file.tensors[tensor_name].type_name in GGML_FORMATS
    }


def pack_tensors(
    file: GGUFFile,
    packed: Mapping[str, str],
    orders: Mapping[str, np.ndarray | None],
    model: nn.Module,
    dtype: mx.Dtype,
    remembered: Remembered,
) -> None:
    """Pack tensors, and put them in the place of a model's layers.

    Args:
        file: The file.
        packed: Path of the layer by tensor name, see `packed_names`.
        orders: Order of the rows in the model, by path; None to keep that of the file.
        model: The model, changed in place.
        dtype: Element type of activations.
        remembered: Products that passed their check in an earlier start are not checked again.
    """
    tensors = {path: file.tensors[tensor_name] for tensor_name, path in packed.items()}
    sources = {path: _StoredTensor([tensor.raw], tensor, orders[path]) for path, tensor in tensors.items()}

    def layers() -> Iterator[Packed]:
        for paths, matrices in packed_layers(sources, partial(_pack_in_blocks, file), remembered):
            yield paths, matrices
            for path in paths:  # Linux maps pages around one that is read, also some that were let go
                file.forget(tensors[path].raw)

    put_packed(model, layers(), dtype)


@dataclass
class _StoredTensor(Source):
    """A tensor that is packed, or an expert of it.

    Attributes:
        tensor: The tensor.
        order: Order of the rows in the model, None to keep it.
    """

    tensor: GGUFTensor
    order: np.ndarray | None

    @property
    def key(self) -> str:
        return self.tensor.type_name

    def rows(self, rows: Any) -> np.ndarray:
        """Some rows as the model orders them, as they are stored; a view if the order is that of the file."""
        return self.arrays[0][rows if self.order is None else self.order[rows]]

    def dequantised(self, rows: np.ndarray) -> np.ndarray:
        """Some rows as PyPI gguf dequantises them."""
        return self.tensor.values(self.rows(rows))


def _pack_in_blocks(file: GGUFFile, parts: Sequence[_StoredTensor]) -> PackedMatrix:
    """Pack matrices that lie one below the other, and let go of each block of stored rows once it is packed.

    An embedding can be most of a file: read as a whole, it would be in memory twice.
    """
    num_outputs = sum(part.num_outputs for part in parts)
    matrix = PackedMatrix(GGML_FORMATS[parts[0].key], num_outputs, parts[0].tensor.shape[-1])
    output = 0
    for part in parts:
        (raw,) = part.arrays
        rows_per_block = max(1, _BLOCK_BYTES // raw[0].nbytes)
        for first in range(0, part.num_outputs, rows_per_block):
            block = slice(first, first + rows_per_block)
            matrix.write_ggml(part.key, part.rows(block), output + first)
            file.forget(raw[block])
        output += part.num_outputs
    return matrix
