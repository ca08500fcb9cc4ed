"""How a trace finds the pictures of itself without knowing who draws them.

``workbench.viz.reprs`` registers a renderer per kind of object when it is imported; a notebook that shows an object
asks here. Nothing is imported until something is shown, and where no renderer is found the plain text repr is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

RENDERERS_MODULE = "workbench.viz.reprs"
"""Module that registers the renderers when it is imported."""

_renderers: dict[str, Callable[[Any], str]] = {}


def register(kind: str, render: Callable[[Any], str]) -> None:
    """Make ``render`` the HTML renderer of a kind of object.

    Args:
        kind: "step" (StepRecord), "trace" (Trace), "metrics" (TraceMetrics) or "pool" (PoolState).
        render: Takes the object and returns a self-contained HTML fragment with every text escaped.
    """
    _renderers[kind] = render


def html(kind: str, shown: Any) -> str | None:
    """HTML of an object, or None, on which a notebook falls back to the object's text."""
    if kind not in _renderers:
        try:
            importlib.import_module(RENDERERS_MODULE)
        except ModuleNotFoundError:
            return None
    render = _renderers.get(kind)
    return render(shown) if render else None
