"""Modules of a model whose class is replaced by a subclass for a while; they keep their parameters and names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.nn as nn


def subclass_that_calls(base: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of a module's class, of the same name, whose calls go to a function."""
    call.stands_in = True  # type: ignore[attr-defined]
    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


class ClassPatch:
    """A hold on modules of another class than their own, until `restore`. Several objects may hold a module.

    Args:
        modules: The modules.
        subclass: Makes the class that takes the place of a module's own.
    """

    def __init__(self, modules: Sequence[nn.Module], subclass: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
        self._modules: list[Any] = list(modules)
        self._held = True
        for module in self._modules:
            if "num_holders" not in vars(module):
                module.__class__ = subclass(type(module))
                module.num_holders = 0
            module.num_holders += 1

    def restore(self) -> None:
        """Restore the classes of modules that no other object needs changed. A second call does nothing."""
        if not self._held:
            return
        self._held = False
        for module in self._modules:
            module.num_holders -= 1
            if module.num_holders == 0:
                del module.num_holders
                module.__class__ = type(module).__bases__[0]


@contextmanager
def calls_through(modules: Mapping[str, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Let all calls of modules inside the block go through a function.

    Args:
        modules: The modules by their dotted names.
        call: Is given the name, the ``__call__`` of the module's class, the module, its arguments and its keyword
            arguments, and returns what the caller gets.
    """
    watched = []
    for path, module in modules.items():
        watched.append((module, type(module)))
        module.__class__ = _watched(type(module), partial(call, path))
    try:
        yield
    finally:
        for module, original in reversed(watched):
            module.__class__ = original


def _watched(base: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    """A subclass whose calls go through a function."""

    def watch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(base.__call__, self, args, kwargs)

    return subclass_that_calls(base, watch)
