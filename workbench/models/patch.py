"""Replace functions in the modules of an unmodified mlx-lm model, and put the originals back.

A model's attention class calls ``scaled_dot_product_attention`` by a name in its own module. `patch_name` puts a
`Replacement` under that name, which looks at the cache it is given and otherwise calls the original. So one module can
serve two models at once, and plain mlx-lm caches still work beside them.

On a CPU ``swiglu`` is replaced too, by a compiled function: MLX computes its exponentials one at a time there. It has
no cache to look at, so the compiled function is used only while a packed batch runs (`compiled_operations`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from workbench.kernels.attention.backend import AttentionBackend
from workbench.models.layer_cache import PagedLayerCache

ATTENTION_NAME = "scaled_dot_product_attention"
SWIGLU_NAME = "swiglu"

MIN_COMPILED_SIZE = 16_384
"""Elements from which the compiled function is faster, although it has to wait for MLX's pending work."""

_COMPILED: ContextVar[bool] = ContextVar("compiled_operations", default=False)


class Replacement(ABC):
    """A function under a name of a module, in place of the original.

    Attributes:
        original: The function that it replaces.
        num_holders: Number of patches that need it; the last one to be restored puts the original back.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.num_holders = 0

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the original's work, or call it."""


class AttentionByCache(Replacement):
    """``scaled_dot_product_attention``, computed by the layer cache if that is a `PagedLayerCache`."""

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        """See mlx-lm's function of that name.

        Raises:
            NotImplementedError: The model passes a mask or an option that a paged kernel does not take.
        """
        if not isinstance(cache, PagedLayerCache):
            sinks_option = {} if sinks is None else {"sinks": sinks}
            return self.original(queries, keys, values, cache=cache, scale=scale, mask=mask, **sinks_option, **options)
        if mask is not None or options:
            given = "a mask" if mask is not None else ", ".join(sorted(options))
            raise NotImplementedError(f"the model's attention passes {given}, which a paged kernel does not take")
        return cache.attend(queries, keys, values, softmax_scale=scale, sinks=sinks)


class CompiledSwiglu(Replacement):
    """``swiglu`` by a compiled function, for large float32 arrays inside `compiled_operations`."""

    def __init__(self, original: Callable[..., mx.array]) -> None:
        from workbench.kernels.attention import cpu_ops as ops

        super().__init__(original)
        self._ops = ops

    def __call__(self, gate: mx.array, x: mx.array) -> mx.array:
        """``silu(gate) * x``."""
        suits = gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape and gate.size >= MIN_COMPILED_SIZE
        return self._ops.swiglu(gate, x) if _COMPILED.get() and suits else self.original(gate, x)


class Patch:
    """A hold on a replaced name in some modules, until `restore`.

    Attributes:
        modules: Modules in which the name is replaced.
        name: The name.
    """

    def __init__(self, modules: tuple[ModuleType, ...], name: str) -> None:
        self.modules = modules
        self.name = name
        self._held = True

    def __repr__(self) -> str:
        """The name and the modules in which it is replaced."""
        return f"Patch({self.name!r} in {[module.__name__ for module in self.modules]})"

    def restore(self) -> None:
        """Put the original back if no other patch needs the replacement. A second call does nothing."""
        if not self._held:
            return
        self._held = False
        for module in self.modules:
            replacement = getattr(module, self.name)
            replacement.num_holders -= 1
            if replacement.num_holders == 0:
                setattr(module, self.name, replacement.original)


def patch_name(model: nn.Module, name: str, make: Callable[[Callable[..., Any]], Replacement]) -> Patch:
    """Replace ``name`` in every module that defines a class of the model.

    Args:
        model: Any mlx-lm model; the model object itself does not change.
        name: A module-level name that the model's classes call.
        make: Makes the replacement from the original.

    Returns:
        The handle that puts the originals back; it holds no module if none has the name.
    """
    modules = tuple(module for module in defining_modules(model) if hasattr(module, name))
    for module in modules:
        current = getattr(module, name)
        if not isinstance(current, Replacement):
            current = make(current)
            setattr(module, name, current)
        current.num_holders += 1
    return Patch(modules, name)


def patch_model(model: nn.Module, backend: AttentionBackend) -> list[Patch]:
    """Replace every name that has to be replaced for an attention backend to serve a model."""
    patches = [patch_name(model, ATTENTION_NAME, AttentionByCache)]
    if backend.name == "cpu":
        patches.append(patch_name(model, SWIGLU_NAME, CompiledSwiglu))
    return patches


@contextmanager
def compiled_operations(backend: AttentionBackend | None) -> Iterator[None]:
    """Let compiled functions stand in for MLX's inside the block, if the backend runs on a CPU."""
    token = _COMPILED.set(backend is not None and backend.name == "cpu")
    try:
        yield
    finally:
        _COMPILED.reset(token)


def defining_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the model's classes and their bases, without those of MLX itself."""
    return modules_of({type(module) for module in model.modules()})


def modules_of(classes: Iterable[type[nn.Module]]) -> list[ModuleType]:
    """The Python modules that define classes and their bases, without those of MLX itself."""
    names = {
        base.__module__
        for class_ in classes
        for base in class_.__mro__
        if issubclass(base, nn.Module) and not base.__module__.startswith("mlx.")
    }
    return [sys.modules[name] for name in sorted(names)]
