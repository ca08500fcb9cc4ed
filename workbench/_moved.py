"""Old names of modules. `workbench.ground.old_names` looks here when an import finds nothing."""

from __future__ import annotations

import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from workbench.ground.old_names import warn

MOVED = {
    f"workbench.{old}": f"workbench.{new}"
    for old, new in {
        "blas": "ground.blas",
        "cache_folder": "ground.cache_folder",
        "cache_salt": "ground.cache_salt",
        "device": "ground.device",
        "engine.arrivals": "simulation.arrivals",
        "engine.block_pool": "scheduler.block_pool",
        "engine.config": "config",
        "engine.cost_model": "costs.cost_model",
        "engine.detokenizer": "engine.output_processor",
        "engine.engine_thread": "engine.thread",
        "engine.field_checks": "ground.field_checks",
        "engine.fork": "analysis.fork",
        "engine.kv_cache_manager": "scheduler.kv_cache_manager",
        "engine.latency_histogram": "simulation.at_scale",
        "engine.outputs": "engine.output_processor",
        "engine.partial_prefills": "scheduler.partial_prefills",
        "engine.policies": "scheduler.policies",
        "engine.policy": "scheduler.policy",
        "engine.request": "scheduler.request",
        "engine.scheduled_batch": "scheduler.batch",
        "engine.scheduler": "scheduler.scheduler",
        "engine.simulate": "simulation.simulate",
        "engine.simulate_at_scale": "simulation.at_scale",
        "engine.simulated_run": "simulation.run",
        "engine.sweep": "analysis.sweep",
        "engine.validation": "engine.input_processor",
        "engine.workload": "simulation.workload",
        "field_checks": "ground.field_checks",
        "kernel_check": "cli.kernel",
        "models.gguf_architectures": "models.gguf.architectures",
        "models.gguf_fields": "models.gguf.fields",
        "models.gguf_file": "models.gguf.file",
        "models.gguf_loader": "models.gguf.loader",
        "models.gguf_quantized": "models.gguf.quantized",
        "models.gguf_tokenizer": "models.gguf.tokenizer",
        "models.pre_tokenizers": "models.gguf.pre_tokenizers",
        "models.swap": "models.patch",
        "on_demand": "ground.on_demand",
        "serve.cli": "cli.serve",
        "simulation.access_log": "formats.access_log",
        "simulation.causes": "analysis.causes",
        "simulation.computed_tokens": "analysis.computed_tokens",
        "simulation.cost_model": "costs.cost_model",
        "simulation.drift": "costs.drift",
        "simulation.durations": "costs.durations",
        "simulation.explain": "analysis.explain",
        "simulation.fit": "costs.fit",
        "simulation.fork": "analysis.fork",
        "simulation.miss": "analysis.miss",
        "simulation.misses": "analysis.misses",
        "simulation.predict": "analysis.predict",
        "simulation.prefix_history": "analysis.prefix_history",
        "simulation.request_log": "formats.request_log",
        "simulation.step_model": "costs.step_model",
        "simulation.step_noise": "costs.step_noise",
        "simulation.sweep": "analysis.sweep",
        "simulation.tune": "analysis.tune",
        "threads": "ground.threads",
        "trace.block_replay": "readings.block_replay",
        "trace.bounds": "trace.fields",
        "trace.breakpoints": "readings.breakpoints",
        "trace.cli": "cli.trace",
        "trace.divergence": "readings.divergence",
        "trace.export": "formats.export",
        "trace.fleet": "readings.fleet",
        "trace.frozen": "trace.fields",
        "trace.kv_events": "formats.kv_events",
        "trace.latency": "readings.latency",
        "trace.matching": "readings.matching",
        "trace.metrics": "readings.metrics",
        "trace.metrics_collector": "readings.metrics_collector",
        "trace.metrics_table": "readings.metrics",
        "trace.otlp": "formats.otlp",
        "trace.pool_replay": "readings.block_replay",
        "trace.pool_state": "readings.pool_state",
        "trace.requests": "trace.trace",
        "trace.scrapes": "formats.scrapes",
        "trace.speculation_metrics": "readings.speculation_metrics",
        "trace.spread": "readings.spread",
        "trace.top_tokens": "readings.top_tokens",
        "trace.vcr": "formats.vcr",
    }.items()
}
"""New name by old name."""


def moved(old: str) -> ModuleSpec | None:
    """The module at its new place, for an old name; None for any other."""
    if old not in MOVED:
        return None
    warn(f"{old} has moved to {MOVED[old]}", level=4)
    return ModuleSpec(old, _MovedModuleLoader(MOVED[old]))


class _MovedModuleLoader(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the old name's here
