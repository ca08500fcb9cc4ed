"""Models: load them, check how they can be served, and give them the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import imported
from workbench.models.mlx_lm_import import prepare_import

if TYPE_CHECKING:
    from workbench.models.bundled import fetch_bundled
    from workbench.models.load import LoadedModel, load_model
    from workbench.models.tokenizer import Tokenizer

_HOMES = {
    "LoadedModel": "load",
    "Tokenizer": "tokenizer",
    "fetch_bundled": "bundled",
    "load_model": "load",
}

__all__ = ["LoadedModel", "Tokenizer", "fetch_bundled", "load_model"]


prepare_import()


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use: importing this package does not import MLX."""
    if name in _HOMES:
        return imported(f"workbench.models.{_HOMES[name]}", name)
    raise AttributeError(f"module 'workbench.models' has no attribute {name!r}")
