"""Let only the rows that sample reach the language-model head.

An mlx-lm model projects every token it is given onto the vocabulary; for a prompt chunk only the last row is wanted,
or none. The final norm is the last thing before the head that works row by row, so it is told which rows to pass on;
the model's own head code (tied embeddings, soft-cap, logit scale) then runs on those rows unchanged.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class FinalNorm:
    """A model's final norm that passes on chosen rows.

    Attributes:
        path: Dotted name of the norm in the model.
        rows: Rows to pass on, int32 [num_rows]; None passes all of them.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        """Take over the norm at ``path``; parameters keep their names, and `restore` undoes it."""
        self.path = path
        self.rows: mx.array | None = None
        self._norm = dict(model.named_modules())[path]
        self._class = type(self._norm)
        self._norm.logits_rows = self
        self._norm.__class__ = _selecting(self._class)

    def restore(self) -> None:
        """Give the norm its own class back."""
        self._norm.__class__ = self._class
        vars(self._norm).pop("logits_rows", None)


def norm_candidates(model: nn.Module) -> list[str]:
    """Norms outside of any list of layers, the likeliest final norm first.

    Which of them is the final norm, if any, is for the preflight to find out by running the model.
    """
    paths = [
        path
        for path, module in model.named_modules()
        if not any(part.isdigit() for part in path.split("."))
        and ("norm" in type(module).__name__.lower() or "norm" in path.rpartition(".")[2])
        and not module.children()
    ]
    last_words = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm")
    return sorted(paths, key=lambda path: (path.rpartition(".")[2] not in last_words, path.count(".")))


@cache
def _selecting(norm_class: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a norm that selects rows before it normalises them."""

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows = self.logits_rows.rows
        return norm_class.__call__(self, x if rows is None else x[rows], *args, **kwargs)

    return type(norm_class.__name__, (norm_class,), {"__call__": call, "__module__": norm_class.__module__})
