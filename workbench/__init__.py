"""Workbench: an LLM inference engine that can be opened.

Example:
    >>> from workbench import Engine, EngineConfig, SamplingParams
    >>> engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=256))
    >>> engine.add_request("The capital of France is", SamplingParams(max_tokens=8))
    'r0'
    >>> engine.step().chunks[0].text
    ' Paris'

Importing workbench is light. It puts an optimised BLAS in front of MLX's reference BLAS on Linux, which has to
happen before the first ``import mlx.core``; MLX itself is imported when an Engine is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workbench.blas import backend_info, preload

if TYPE_CHECKING:
    from workbench.engine.config import EngineConfig, SamplingParams
    from workbench.engine.engine import Engine
    from workbench.engine.simulate import simulate
    from workbench.trace import StepRecord, Trace

__version__ = "0.1.0"

_HOMES = {
    "Engine": "workbench.engine.engine",
    "EngineConfig": "workbench.engine.config",
    "SamplingParams": "workbench.engine.config",
    "StepRecord": "workbench.trace",
    "Trace": "workbench.trace",
    "simulate": "workbench.engine.simulate",
}

__all__ = ["Engine", "EngineConfig", "SamplingParams", "StepRecord", "Trace", "backend_info", "simulate"]

preload()


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, for tab completion."""
    return sorted([*__all__, "__version__"])
