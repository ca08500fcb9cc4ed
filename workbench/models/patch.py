"""Replace names in the modules of an unmodified mlx-lm model, and put the originals back.

A model's attention class calls ``scaled_dot_product_attention`` by a name in its own module. `patch_name` puts a
`Replacement` under that name, which looks at the cache it is given and otherwise calls the original. So one module can
serve two models at once, and plain mlx-lm caches still work beside them.

Some models write the arithmetic of attention out. In their modules the names of MLX and numpy are replaced as well, by
namespaces in which a few functions know `workbench.models.fetched`.

On a CPU ``swiglu`` is replaced too, by a compiled function: MLX computes its exponentials one at a time there. It has
no cache to look at, so the compiled function is used only while a packed batch runs (`compiled_operations`).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from workbench.kernels.attention.backend import AttentionBackend
from workbench.models.fetched import Fetched, RowPositions, Scores, Weights, positions_between
from workbench.models.latents import LatentPatch
from workbench.models.paged_layer import PagedLayerCache

ATTENTION_NAME = "scaled_dot_product_attention"
SWIGLU_NAME = "swiglu"

MIN_COMPILED_SIZE = 16_384
"""Elements from which the compiled function is faster, although it has to wait for MLX's pending work."""

_COMPILED: ContextVar[bool] = ContextVar("compiled_operations", default=False)


class Replacement:
    """An object under a name of a module, in place of the original.

    Attributes:
        original: The object that it replaces.
        num_holders: Number of patches that need it; the last one to be restored puts the original back.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.num_holders = 0


class AttentionByCache(Replacement):
    """``scaled_dot_product_attention``, computed by the layer whose keys it is given, or by a paged layer cache."""

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        """See mlx-lm's function of that name.

        Raises:
            NotImplementedError: The model passes a mask or an option that a paged kernel does not take.
        """
        layer = keys.layer if isinstance(keys, Fetched) else cache
        if not isinstance(layer, PagedLayerCache):
            sinks_option = {} if sinks is None else {"sinks": sinks}
            return self.original(queries, keys, values, cache=cache, scale=scale, mask=mask, **sinks_option, **options)
        if options:
            given = ", ".join(sorted(options))
            raise NotImplementedError(f"the model's attention passes {given}, which a paged kernel does not take")
        return layer.attention(queries, keys, values, softmax_scale=scale, mask=mask, sinks=sinks)


class Namespace(Replacement):
    """A module, or a part of one, in which some functions are others."""

    def __init__(self, original: Any, functions: Callable[[Any], Mapping[str, Any]]) -> None:
        super().__init__(original)
        vars(self).update(functions(original))

    def __getattr__(self, name: str) -> Any:
        """Everything else is the original's."""
        return getattr(self.original, name)


def _knowing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of MLX that leaves keys, values, scores and weights to their own method of the same name."""

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, Fetched | Scores | Weights):
            return getattr(first, name)(*args, **kwargs)
        return original(first, *args, **kwargs)

    return call


def _operating(original: Callable[..., Any], operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A function of two arrays that becomes an operator if one of them is known."""

    def call(a: Any, b: Any, **kwargs: Any) -> Any:
        known = isinstance(a, Scores | Weights) or isinstance(b, Fetched | Scores)
        return operation(a, b) if known else original(a, b, **kwargs)

    return call


def _arange(original: Callable[..., Any], num_axes: int) -> Callable[..., Any]:
    """``arange`` that also counts from `RowPositions` or up to them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start, stop = args[:2] if len(args) > 1 else (0, *args)
        if isinstance(start, RowPositions) or isinstance(stop, RowPositions):
            return positions_between(start, stop, num_axes)
        return original(*args, **kwargs)

    return call


def _functions_of_mlx(core: Any) -> Mapping[str, Any]:
    attention = AttentionByCache(core.fast.scaled_dot_product_attention)

    def attend(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **options: Any) -> mx.array:
        if isinstance(k, Fetched):
            return attention(q, k, v, scale=scale, **options)
        return core.fast.scaled_dot_product_attention(q, k, v, scale=scale, **options)

    operators = {"matmul": operator.matmul, "multiply": operator.mul, "divide": operator.truediv, "add": operator.add}
    return {
        **{name: _knowing(getattr(core, name), name) for name in ("expand_dims", "tile", "tanh", "softmax")},
        **{name: _knowing(getattr(core, name), name) for name in ("swapaxes", "transpose")},
        **{name: _operating(getattr(core, name), operation) for name, operation in operators.items()},
        "arange": _arange(core.arange, 3),
        "fast": Namespace(core.fast, lambda fast: {ATTENTION_NAME: attend}),
    }


_NAMESPACES: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "mlx.core": _functions_of_mlx,
    "numpy": lambda numpy: {"arange": _arange(numpy.arange, 2)},
}
"""Functions that replace those of a module, by its name."""


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
        name: A module-level name that the model's classes use.
        make: Makes the replacement from the original.

    Returns:
        The handle that puts the originals back; it holds no module if none has the name.
    """
    modules = tuple(module for module in defining_modules(model) if hasattr(module, name))
    if make is _namespace:
        modules = tuple(module for module in modules if name in _namespaces_in(module))
    for module in modules:
        current = getattr(module, name)
        if not isinstance(current, Replacement):
            current = make(current)
            setattr(module, name, current)
        current.num_holders += 1
    return Patch(modules, name)


def patch_model(
    model: nn.Module, backend: AttentionBackend, reads_arithmetic: bool = False
) -> list[Patch | LatentPatch]:
    """Replace every name, and the class of every module, that an attention backend needs replaced to serve a model.

    Args:
        model: The model.
        backend: The attention backend.
        reads_arithmetic: Read attention that the model's classes compute by themselves.
    """
    patches: list[Patch | LatentPatch] = [patch_name(model, ATTENTION_NAME, AttentionByCache), LatentPatch(model)]
    if reads_arithmetic:
        for name in sorted({name for module in defining_modules(model) for name in _namespaces_in(module)}):
            patches.append(patch_name(model, name, _namespace))
    if backend.name == "cpu":
        patches.append(patch_name(model, SWIGLU_NAME, CompiledSwiglu))
    return patches


def _namespace(original: Any) -> Any:
    """A namespace in place of MLX or numpy."""
    return Namespace(original, _NAMESPACES[original.__name__])


def _namespaces_in(module: ModuleType) -> Iterator[str]:
    """Names of a module under which it knows MLX or numpy."""
    for name, value in vars(module).items():
        original = value.original if isinstance(value, Namespace) else value
        if isinstance(original, ModuleType) and original.__name__ in _NAMESPACES:
            yield name


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
