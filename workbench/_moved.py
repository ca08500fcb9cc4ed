"""Old names of modules, and of names in modules and classes, that work for one version with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GOES_WITH = "0.3"
"""The version that no longer knows the old names."""

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


class MovedModuleFinder(MetaPathFinder):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module at its new place, for an old name; None for any other."""
        if fullname not in MOVED:
            return None
        message = f"{fullname} has moved to {MOVED[fullname]}; its old name goes with version {GOES_WITH}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, _MovedModuleLoader(MOVED[fullname]))


class _MovedModuleLoader(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the old name's here


class Renamed:
    """An attribute of a class under its old name.

    A descriptor, and not a ``__getattr__`` of the class, which would slow down every attribute of its objects.

    Args:
        new: The name it has now.
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        message = f"{self._old} is {self._new} now; its old name goes with version {GOES_WITH}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(owner if instance is None else instance, self._new)


def moved_names(module: str, home: str = "", *names: str, **renamed: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module that finds names by their old places.

    Args:
        module: Name of the module.
        home: Name of the module that has the names now.
        *names: Names that are the same there.
        **renamed: New name by old name.
    """
    new_names = {**{name: name for name in names}, **renamed}

    def find(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = f"{home or module}.{new_names[name]}"
        message = f"{module}.{name} is {new} now; its old name goes with version {GOES_WITH}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home or module), new_names[name])

    return find


def install() -> None:
    """Let old names be imported."""
    if not any(isinstance(finder, MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedModuleFinder())
