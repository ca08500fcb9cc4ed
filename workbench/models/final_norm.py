"""Pass only the rows that sample to the language-model head.

An mlx-lm model projects every token it is given onto the vocabulary; of a prompt chunk only the last row is needed, or
none. The final norm is the last module before the head and works row by row, so it selects the rows; the model's own
head code (tied embeddings, soft cap, logit scale) then runs on those rows unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from workbench.models.class_patch import ClassPatch, subclass_that_calls

_SELECTED: ContextVar[tuple[nn.Module, mx.array] | None] = ContextVar("selected_rows", default=None)
"""The norm that selects, and the rows it selects. Per thread, so that engines that share a model do not interfere."""

LAST_WORDS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f")
"""Usual names of final norms; they only decide the order in which candidates are tried."""


class FinalNorm(ClassPatch):
    """A model's final norm, changed so that it can select rows until `restore`.

    Attributes:
        path: Dotted name of the norm in the model.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        self.path = path
        self._norm: nn.Module = reduce(getattr, path.split("."), model)
        super().__init__([self._norm], _selecting)

    @contextmanager
    def selecting(self, rows: mx.array) -> Iterator[None]:
        """Select ``rows``, int32 [num_rows], of every input that the norm is given inside the block."""
        token = _SELECTED.set((self._norm, rows))
        try:
            yield
        finally:
            _SELECTED.reset(token)


def norm_candidates(model: nn.Module) -> list[str]:
    """Norms outside of any list of layers, the likeliest final norm first.

    The preflight runs the model to find out which of them is the final norm, if any.
    """
    paths = [
        path
        for path, module in model.named_modules()
        if not any(part.isdigit() for part in path.split("."))
        and ("norm" in type(module).__name__.lower() or "norm" in path.rpartition(".")[2])
        and not module.children()
    ]
    return sorted(paths, key=lambda path: (path.rpartition(".")[2] not in LAST_WORDS, path.count(".")))


@cache
def _selecting(norm_class: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a norm that selects rows before it normalises them."""

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        selected = _SELECTED.get()
        if selected is not None and selected[0] is self:
            x = x[selected[1]]
        return norm_class.__call__(self, x, *args, **kwargs)

    return subclass_that_calls(norm_class, call)
