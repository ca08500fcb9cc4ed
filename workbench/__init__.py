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

import sys
from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import ASKED_FOR, ATTACHED, before_import, imported

if TYPE_CHECKING:
    from workbench.analysis.certify import Certificate, certify
    from workbench.analysis.explain import slowest
    from workbench.analysis.fleet.at_scale import simulate_fleet_at_scale
    from workbench.analysis.fleet.demand import Demand
    from workbench.analysis.fleet.events import Change
    from workbench.analysis.fleet.router import Router
    from workbench.analysis.fleet.simulate import simulate_fleet
    from workbench.analysis.hunt import Finding, hunt
    from workbench.analysis.hunt.drive import Plan, PlannedChunk
    from workbench.analysis.misses import misses_table
    from workbench.analysis.predict import Predictor
    from workbench.apps import course
    from workbench.apps.course.random_models import random_model
    from workbench.base.blas import backend_info
    from workbench.config import EngineConfig, SamplingParams
    from workbench.engine.distributed.group import join_group, leader_host
    from workbench.engine.distributed.link import open_link
    from workbench.engine.distributed.lockstep import LockstepEngine
    from workbench.engine.sampler import SampledToken, keyed_uniform
    from workbench.engine.speculation import verification
    from workbench.kernels import msl
    from workbench.kernels.attention import (
        AttentionBackend,
        AttentionMetadata,
        AttentionOptions,
        build_work_list,
        paged_varlen_attention,
    )
    from workbench.kernels.attention.backend import WHOLE
    from workbench.kernels.attention.metal.launch import PagedVarlenKernels, metal_source
    from workbench.kernels.attention.probe import ERROR_LIMIT, Probe, float64_attention, probe_batch, relative_error
    from workbench.kernels.attention.work_list import WORK_ITEM_COLUMNS
    from workbench.methods import Engine, Trace, simulate
    from workbench.models import LoadedModel, load_model
    from workbench.scheduler.eviction import Eviction
    from workbench.scheduler.fairness import Victim, VirtualTokenCounter, WeightedFairQueueing
    from workbench.scheduler.policies import Deadline, DecodeFirst, ShortestRemainingFirst
    from workbench.scheduler.policy import SchedulingPolicy
    from workbench.scheduler.sliding_window import SlidingWindow
    from workbench.simulation.access_log import read_access_log
    from workbench.simulation.arrivals import read_generated
    from workbench.simulation.at_scale import simulate_at_scale
    from workbench.simulation.costs.cost_model import CostModel
    from workbench.trace import (
        Chunk,
        Keyframe,
        RequestInfo,
        StepRecord,
        TraceError,
        TraceFollower,
        TraceMeta,
        TraceWriter,
    )
    from workbench.trace.laws import LAWS, RULES, Broken, Checker, Limits, SchedulerState
    from workbench.trace.readings.compare import Comparison, compare
    from workbench.trace.readings.fairness import jain_index, service
    from workbench.trace.readings.fleet import Fleet
    from workbench.trace.readings.narrate import narrate
    from workbench.trace.readings.prefills import prefills
    from workbench.viz import panes

__version__ = "0.2.0.dev0"

_NAMES = {
    "workbench.analysis.certify": "Certificate certify",
    "workbench.analysis.explain": "slowest",
    "workbench.analysis.fleet.at_scale": "simulate_fleet_at_scale",
    "workbench.analysis.fleet.demand": "Demand",
    "workbench.analysis.fleet.events": "Change",
    "workbench.analysis.fleet.router": "Router",
    "workbench.analysis.fleet.simulate": "simulate_fleet",
    "workbench.analysis.hunt": "Finding hunt",
    "workbench.analysis.hunt.drive": "Plan PlannedChunk",
    "workbench.analysis.misses": "misses_table",
    "workbench.analysis.predict": "Predictor",
    "workbench.apps.course.random_models": "random_model",
    "workbench.base.blas": "backend_info",
    "workbench.config": "EngineConfig SamplingParams",
    "workbench.engine.distributed.group": "join_group leader_host",
    "workbench.engine.distributed.link": "open_link",
    "workbench.engine.distributed.lockstep": "LockstepEngine",
    "workbench.engine.engine": "Engine",
    "workbench.engine.sampler": "SampledToken keyed_uniform",
    "workbench.kernels.attention": "AttentionBackend AttentionMetadata AttentionOptions paged_varlen_attention",
    "workbench.kernels.attention.backend": "WHOLE",
    "workbench.kernels.attention.metal.launch": "PagedVarlenKernels metal_source",
    "workbench.kernels.attention.probe": "ERROR_LIMIT Probe float64_attention probe_batch relative_error",
    "workbench.kernels.attention.work_list": "WORK_ITEM_COLUMNS build_work_list",
    "workbench.models": "LoadedModel load_model",
    "workbench.scheduler.eviction": "Eviction",
    "workbench.scheduler.fairness": "Victim VirtualTokenCounter WeightedFairQueueing",
    "workbench.scheduler.policies": "Deadline DecodeFirst ShortestRemainingFirst",
    "workbench.scheduler.policy": "SchedulingPolicy",
    "workbench.scheduler.sliding_window": "SlidingWindow",
    "workbench.simulation.access_log": "read_access_log",
    "workbench.simulation.arrivals": "read_generated",
    "workbench.simulation.at_scale": "simulate_at_scale",
    "workbench.simulation.costs.cost_model": "CostModel",
    "workbench.simulation.simulate": "simulate",
    "workbench.trace": "Chunk Keyframe RequestInfo StepRecord Trace TraceError TraceFollower TraceMeta TraceWriter",
    "workbench.trace.laws": "LAWS RULES Broken Checker Limits SchedulerState",
    "workbench.trace.readings.compare": "Comparison compare",
    "workbench.trace.readings.fairness": "jain_index service",
    "workbench.trace.readings.fleet": "Fleet",
    "workbench.trace.readings.narrate": "narrate",
    "workbench.trace.readings.prefills": "prefills",
}
"""The public names, by the module that has them."""

_MODULES = {
    "course": "workbench.apps.course",
    "msl": "workbench.kernels.msl",
    "panes": "workbench.viz.panes",
    "verification": "workbench.engine.speculation.verification",
}
"""The public modules, whose place in a room is internal."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

ATTACHED.update(
    {
        "Trace.check": "workbench.trace.laws.replay:check",
        "Trace.explain": "workbench.analysis.explain:explain",
        "Trace.figure": "workbench.viz.figures:trace_figure",
        "Trace.fork": "workbench.analysis.fork:fork",
        "Trace.incident": "workbench.analysis.incident:incident",
        "Trace.kernel_run": "workbench.engine.kernel_run:of_trace",
        "Trace.keyframe_before": "workbench.trace.readings.pool_state:keyframe_before",
        "Trace.metrics": "workbench.trace.readings.metrics_collector:metrics",
        "Trace.pool_state": "workbench.trace.readings.pool_state:pool_state",
        "Trace.replay": "workbench.engine.replay:replay",
        "Trace.slowest": "workbench.analysis.explain:slowest",
        "Trace.stalls": "workbench.simulation.costs.stalls:stalls",
        "Trace.to_chrome_trace": "workbench.trace.formats.export:to_chrome_trace",
        "Trace.to_html": "workbench.viz.export_html:to_html",
        "Trace.to_link": "workbench.viz.link:link_to",
        "Trace.to_pandas": "workbench.trace.formats.export:to_pandas",
        "Trace.tune": "workbench.analysis.tune:tune",
        "Trace.view": "workbench.viz.widget:view",
        "Trace.watch": "workbench.viz.widget:watch",
        "Trace.whatif": "workbench.analysis.predict:whatif",
        "Trace.why": "workbench.analysis.why:why",
        "Trace.why_missed": "workbench.analysis.misses:why_missed",
        "TraceMetrics.figure": "workbench.viz.figures:metrics_figure",
        "StepRecord.__repr__": "workbench.trace.readings.narrate:in_one_line",
        "StepRecord.__str__": "workbench.trace.readings.narrate:narrate",
        "Engine.__panel__": "workbench.viz.panes:page_of",
        "Engine.view": "workbench.viz.widget:view",
        "Engine.watch": "workbench.viz.widget:watch",
        "Engine._repr_html_": "workbench.viz.reprs:engine_html",
        "MetricsByRequest._repr_html_": "workbench.viz.reprs:requests_html",
        "Outputs._repr_html_": "workbench.viz.reprs:outputs_html",
        "PoolState._repr_html_": "workbench.viz.reprs:pool_html",
        "StepRecord._repr_html_": "workbench.viz.reprs:step_html",
        "Summary._repr_html_": "workbench.viz.reprs:summary_html",
        "Trace.__panel__": "workbench.viz.panes:page_of",
        "Trace._repr_html_": "workbench.viz.reprs:trace_html",
        "TraceMetrics._repr_html_": "workbench.viz.reprs:metrics_html",
        "Tuning._repr_html_": "workbench.viz.pareto:tuning_html",
    }
)
# Methods and pictures that rooms give to the classes of rooms below, which do not know them
# (`workbench.base.on_demand`).

ASKED_FOR.update(
    {
        "Apart.page": "workbench.viz.finding_page:page_of_two",
        "CauseTable._repr_html_": "workbench.viz.cause_tables:causes_html",
        "Certificate.page": "workbench.viz.finding_page:page_of_certificate",
        "Comparison._repr_html_": "workbench.viz.reprs:comparison_html",
        "Crossover.to_svg": "workbench.viz.lines:lines_svg",
        "Explanation._repr_html_": "workbench.viz.cause_tables:explanation_html",
        "Finding.page": "workbench.viz.finding_page:page",
        "FleetRun.to_svg": "workbench.viz.fleet_rows:fleet_svg",
        "KernelRun._repr_html_": "workbench.viz.kernel_run:run_html",
        "WhatIf._repr_html_": "workbench.viz.reprs:whatif_html",
        "Misses._repr_html_": "workbench.viz.cause_tables:missed_html",
        "MissTable._repr_html_": "workbench.viz.cause_tables:misses_html",
        "KernelRun.of_step": "workbench.engine.kernel_run:of_step",
        "KernelRun.save_html": "workbench.viz.kernel_run:save_html",
        "KernelRun.watch": "workbench.viz.kernel_run:watch",
        "Sizing.to_svg": "workbench.viz.pareto:pareto_svg",
        "StepPicture.view": "workbench.viz.step_picture:view",
        "Trace.complete_slo": "workbench.analysis.tuning:complete_slo",
    }
)
# Functions that a method of the class, or the shell, asks for by name.

__all__ = [
    "ERROR_LIMIT",
    "LAWS",
    "RULES",
    "WHOLE",
    "WORK_ITEM_COLUMNS",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionOptions",
    "Broken",
    "Certificate",
    "Change",
    "Checker",
    "Chunk",
    "Comparison",
    "CostModel",
    "Deadline",
    "DecodeFirst",
    "Demand",
    "Engine",
    "EngineConfig",
    "Eviction",
    "Finding",
    "Fleet",
    "Keyframe",
    "Limits",
    "LoadedModel",
    "LockstepEngine",
    "PagedVarlenKernels",
    "Plan",
    "PlannedChunk",
    "Predictor",
    "Probe",
    "RequestInfo",
    "Router",
    "SampledToken",
    "SamplingParams",
    "SchedulerState",
    "SchedulingPolicy",
    "ShortestRemainingFirst",
    "SlidingWindow",
    "StepRecord",
    "Trace",
    "TraceError",
    "TraceFollower",
    "TraceMeta",
    "TraceWriter",
    "Victim",
    "VirtualTokenCounter",
    "WeightedFairQueueing",
    "backend_info",
    "build_work_list",
    "certify",
    "compare",
    "course",
    "float64_attention",
    "hunt",
    "jain_index",
    "join_group",
    "keyed_uniform",
    "leader_host",
    "load_model",
    "metal_source",
    "misses_table",
    "msl",
    "narrate",
    "open_link",
    "paged_varlen_attention",
    "panes",
    "prefills",
    "probe_batch",
    "random_model",
    "read_access_log",
    "read_generated",
    "relative_error",
    "service",
    "simulate",
    "simulate_at_scale",
    "simulate_fleet",
    "simulate_fleet_at_scale",
    "slowest",
    "verification",
]

before_import("mlx.core", "workbench.base.blas", "preload")
if "IPython" in sys.modules:
    imported("workbench.base.ipython", "set_up")(lambda: imported("workbench.config", "field_names")())


def __getattr__(name: str) -> Any:
    """Import a public name or module when it is first used."""
    if name in _HOMES:
        return imported(_HOMES[name], name)
    if name in _MODULES:
        module = imported(_MODULES[name])
        vars(module).setdefault("__dir__", lambda: sorted(module.__all__))  # for tab completion
        return module
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, for tab completion."""
    return sorted([*__all__, "__version__"])


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook ``%%ask``, ``%step``, ``%watch`` and ``%explain``: ``%load_ext workbench``."""
    imported("workbench.apps.magics", "load")(shell)
