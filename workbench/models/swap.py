"""Replace a name in the modules of an unmodified mlx-lm model, and put it back.

A model's attention class calls ``scaled_dot_product_attention`` by a name in its own module. `swap_name` puts a
function of ours under that name, which looks at the cache it is handed and otherwise calls the original. So two models
of one module can be served at once, and plain mlx-lm caches still work beside them.

On a CPU ``swiglu`` is replaced as well, by a compiled one: MLX computes its exponentials one at a time there. It has no
cache to look at, so it stands in only while a packed batch is under way (`compiled_operations`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from workbench.attention.backend import AttentionBackend
from workbench.models.paged_cache import PagedLayerCache

ATTENTION_NAME = "scaled_dot_product_attention"
SWIGLU_NAME = "swiglu"

MIN_COMPILED_SIZE = 16_384
"""Elements from which the compiled operation is faster although MLX's pending work has to be waited for."""

_COMPILED: ContextVar[bool] = ContextVar("compiled_operations", default=False)


class Swap:
    """Holds names swapped in some modules; `restore` gives them back once every holder has done so."""

    def __init__(self, modules: Iterable[ModuleType], name: str) -> None:
        self.modules = tuple(modules)
        self.name = name
        self._held = True

    def __repr__(self) -> str:
        """The name and where it is swapped."""
        return f"Swap({self.name!r} in {[module.__name__ for module in self.modules]})"

    def restore(self) -> None:
        """Put the original back where nobody else needs the replacement. A second call does nothing."""
        if not self._held:
            return
        self._held = False
        for module in self.modules:
            replacement = getattr(module, self.name)
            replacement.num_holders -= 1
            if replacement.num_holders == 0:
                setattr(module, self.name, replacement.original)


def swap_name(model: nn.Module, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Swap:
    """Swap ``name`` in every module that defines a class of the model.

    Args:
        model: Any mlx-lm model; it is not changed itself.
        name: A module-level name the model's classes call.
        wrap: Makes the replacement from the original.

    Returns:
        The handle that puts the originals back; it holds no module when none has the name.
    """
    modules = [module for module in defining_modules(model) if hasattr(module, name)]
    for module in modules:
        current = getattr(module, name)
        if not hasattr(current, "num_holders"):
            replacement = wrap(current)
            replacement.original = current
            replacement.num_holders = 0
            setattr(module, name, replacement)
        getattr(module, name).num_holders += 1
    return Swap(modules, name)


def swap_for(model: nn.Module, backend: AttentionBackend) -> list[Swap]:
    """Everything that is swapped to serve a model with an attention backend."""
    swaps = [swap_name(model, ATTENTION_NAME, _dispatch_on_cache)]
    if backend.name == "cpu":
        swaps.append(swap_name(model, SWIGLU_NAME, _compiled_swiglu))
    return swaps


@contextmanager
def compiled_operations(backend: AttentionBackend | None) -> Iterator[None]:
    """Let swapped operations stand in for MLX's inside the block, where the backend runs on a CPU."""
    token = _COMPILED.set(backend is not None and backend.name == "cpu")
    try:
        yield
    finally:
        _COMPILED.reset(token)


def defining_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the model's classes and their bases, MLX's own layers left out."""
    names = {
        base.__module__: None
        for class_ in {type(module) for module in model.modules()}
        for base in class_.__mro__
        if issubclass(base, nn.Module) and not base.__module__.startswith("mlx.")
    }
    return [sys.modules[name] for name in sorted(names)]


def _dispatch_on_cache(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        if not isinstance(cache, PagedLayerCache):
            sinks_option = {} if sinks is None else {"sinks": sinks}
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **sinks_option, **options)
        if mask is not None or options:
            raise NotImplementedError(
                f"the model's attention passes {'a mask of its own' if mask is not None else sorted(options)}, "
                "which a paged kernel does not take"
            )
        return cache.attend(queries, keys, values, softmax_scale=scale, sinks=sinks)

    return scaled_dot_product_attention


def _compiled_swiglu(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    from workbench.attention import cpu_ops

    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        suits = gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape and gate.size >= MIN_COMPILED_SIZE
        return cpu_ops.swiglu(gate, x) if _COMPILED.get() and suits else original(gate, x)

    return swiglu
