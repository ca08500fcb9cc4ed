"""Workbench: an LLM engine you can look inside.

Example:
    >>> from workbench import Engine, EngineConfig, SamplingParams
    >>> engine = Engine("smollm2", EngineConfig(max_num_batched_tokens=256))
    >>> engine.add_request("The capital of France is", SamplingParams(max_tokens=8))
    'r0'
    >>> engine.step().chunks[0].text
    ' Paris'

Importing workbench is light. On Linux, the first ``import mlx.core`` after it loads an optimised BLAS before MLX, in
front of MLX's reference BLAS; MLX itself is imported when an Engine is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.ground.on_demand import ATTACHED, before_import, imported

if TYPE_CHECKING:
    from workbench.config import EngineConfig, SamplingParams
    from workbench.fleet.simulate import simulate_fleet
    from workbench.ground.blas import backend_info
    from workbench.methods import Engine, Trace, simulate
    from workbench.trace import StepRecord

__version__ = "0.2.0.dev0"

_HOMES = {
    "Engine": "workbench.engine.engine",
    "EngineConfig": "workbench.config",
    "SamplingParams": "workbench.config",
    "StepRecord": "workbench.trace",
    "Trace": "workbench.trace",
    "backend_info": "workbench.ground.blas",
    "simulate": "workbench.simulation.simulate",
    "simulate_fleet": "workbench.fleet.simulate",
}

ATTACHED.update(
    {
        "Trace.check": "workbench.laws.replay:check",
        "Trace.explain": "workbench.analysis.explain:explain",
        "Trace.figure": "workbench.viz.figures:trace_figure",
        "Trace.fork": "workbench.analysis.fork:fork",
        "Trace.incident": "workbench.analysis.incident:incident",
        "Trace.keyframe_before": "workbench.readings.pool_state:keyframe_before",
        "Trace.metrics": "workbench.readings.metrics_collector:metrics",
        "Trace.pool_state": "workbench.readings.pool_state:pool_state",
        "Trace.replay": "workbench.engine.replay:replay",
        "Trace.slowest": "workbench.analysis.explain:slowest",
        "Trace.stalls": "workbench.costs.stalls:stalls",
        "Trace.to_chrome_trace": "workbench.formats.export:to_chrome_trace",
        "Trace.to_html": "workbench.viz.export_html:to_html",
        "Trace.to_pandas": "workbench.formats.export:to_pandas",
        "Trace.tune": "workbench.analysis.tune:tune",
        "Trace.view": "workbench.viz.widget:view",
        "Trace.watch": "workbench.viz.widget:watch",
        "Trace.whatif": "workbench.analysis.predict:whatif",
        "Trace.why": "workbench.analysis.why:why",
        "Trace.why_missed": "workbench.analysis.misses:why_missed",
        "TraceMetrics.figure": "workbench.viz.figures:metrics_figure",
        "StepRecord.__str__": "workbench.readings.narrate:narrate",
        "Engine._repr_html_": "workbench.viz.reprs:engine_html",
        "PoolState._repr_html_": "workbench.viz.reprs:pool_html",
        "StepRecord._repr_html_": "workbench.viz.reprs:step_html",
        "Trace._repr_html_": "workbench.viz.reprs:trace_html",
        "TraceMetrics._repr_html_": "workbench.viz.reprs:metrics_html",
        "Tuning._repr_html_": "workbench.viz.pareto:tuning_html",
    }
)
# Methods that rooms give to the classes of rooms below, which do not know them (`workbench.ground.on_demand`).

__all__ = [
    "Engine",
    "EngineConfig",
    "SamplingParams",
    "StepRecord",
    "Trace",
    "backend_info",
    "simulate",
    "simulate_fleet",
]

before_import("mlx.core", "workbench.ground.blas", "preload")


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name in _HOMES:
        return imported(_HOMES[name], name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, for tab completion."""
    return sorted([*__all__, "__version__"])
