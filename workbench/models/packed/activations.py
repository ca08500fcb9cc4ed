"""The packed matrices of a model, and a way to compute exactly for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.nn as nn

if TYPE_CHECKING:
    from workbench.models.packed.matrix import PackedMatrix


def packed_matrices(model: nn.Module) -> dict[str, PackedMatrix]:
    """The packed matrices of a model by the path of their first layer, and the number of an expert."""
    found: dict[int, tuple[str, PackedMatrix]] = {}
    for path, module in model.named_modules():
        matrices = getattr(module, "matrices", ())
        for index, matrix in enumerate(matrices):
            found.setdefault(id(matrix), (path if len(matrices) == 1 else f"{path}[{index}]", matrix))
    return dict(found.values())


@contextmanager
def float32_activations(model: nn.Module) -> Iterator[bool]:
    """Let a model's products take float32 activations inside the block; its value is whether some did not.

    Comparisons to float32 rounding need it: a difference in the last bit of an input changes its codes of 8 bits.
    """
    changed = [matrix for matrix in packed_matrices(model).values() if matrix.activations != "float32"]
    for matrix in changed:
        matrix.use("float32")
    try:
        yield bool(changed)
    finally:
        for matrix in changed:
            matrix.use("int8")
