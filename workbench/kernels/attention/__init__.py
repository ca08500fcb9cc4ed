"""Paged varlen attention: one function, several backends, one work list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import imported

if TYPE_CHECKING:
    from workbench.config import BACKEND_NAMES
    from workbench.kernels.attention.backend import AttentionBackend
    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions
    from workbench.kernels.attention.paged_varlen import paged_varlen_attention
    from workbench.kernels.attention.selection import get_backend
    from workbench.kernels.attention.work_list import build_work_list

_HOMES = {
    "AttentionBackend": "backend",
    "AttentionMetadata": "metadata",
    "AttentionOptions": "options",
    "BACKEND_NAMES": "selection",
    "build_work_list": "work_list",
    "get_backend": "selection",
    "paged_varlen_attention": "paged_varlen",
}

__all__ = [
    "BACKEND_NAMES",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionOptions",
    "build_work_list",
    "get_backend",
    "paged_varlen_attention",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use, so that importing the package does not load MLX."""
    if name in _HOMES:
        return imported(f"workbench.kernels.attention.{_HOMES[name]}", name)
    raise AttributeError(f"module 'workbench.kernels.attention' has no attribute {name!r}")
