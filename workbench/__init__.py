"""Workbench: an LLM engine you can look inside.

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

from typing import TYPE_CHECKING, Any

from workbench import _moved
from workbench.blas import backend_info, preload
from workbench.on_demand import imported

if TYPE_CHECKING:
    from workbench.config import EngineConfig, SamplingParams
    from workbench.engine.engine import Engine
    from workbench.simulation.simulate import simulate
    from workbench.trace import StepRecord, Trace

__version__ = "0.1.0"

_HOMES = {
    "Engine": "workbench.engine.engine",
    "EngineConfig": "workbench.config",
    "SamplingParams": "workbench.config",
    "StepRecord": "workbench.trace",
    "Trace": "workbench.trace",
    "simulate": "workbench.simulation.simulate",
}

ATTACHED = {
    "Trace.to_html": "workbench.viz.export_html:to_html",
    "Trace.figure": "workbench.viz.figures:trace_figure",
    "Trace.show": "workbench.viz.widget:watch",
    "Trace.plot": "workbench.viz.figures:trace_figure",
    "Trace.view": "workbench.viz.widget:view",
    "Trace.watch": "workbench.viz.widget:watch",
    "Trace.explain": "workbench.simulation.explain:explain",
    "Trace.fork": "workbench.simulation.fork:fork",
    "Trace.slowest": "workbench.simulation.explain:slowest",
    "Trace.tune": "workbench.simulation.tune:tune",
    "Trace.whatif": "workbench.simulation.predict:whatif",
    "Trace.why_missed": "workbench.simulation.misses:why_missed",
    "TraceMetrics.figure": "workbench.viz.figures:metrics_figure",
    "Tuning._repr_html_": "workbench.viz.pareto:tuning_html",
    "Trace._repr_html_": "workbench.viz.reprs:trace_html",
    "StepRecord._repr_html_": "workbench.viz.reprs:step_html",
    "TraceMetrics._repr_html_": "workbench.viz.reprs:metrics_html",
    "PoolState._repr_html_": "workbench.viz.reprs:pool_html",
}
"""Methods that other rooms attach to the classes of ``workbench.trace``, which does not know these rooms.

Each is the function's module and name, imported when it is first used; see `workbench.trace.attached`."""

__all__ = ["Engine", "EngineConfig", "SamplingParams", "StepRecord", "Trace", "backend_info", "simulate"]

preload()
_moved.install()


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name in _HOMES:
        return imported(_HOMES[name], name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, for tab completion."""
    return sorted([*__all__, "__version__"])
