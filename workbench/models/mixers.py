"""The modules that pass a recurrent layer's state on: found by watching the model run, and patched while it is served.

A mixer is a module that is handed a layer's state and hands it to no other module. `find_mixers` watches the plain
model run to find them, so there is no list of them. A mixer's class is replaced by a subclass until `restore`; with
mlx-lm's own caches it does what it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import mlx.nn as nn

from workbench.models.class_patch import ClassPatch, calls_through, subclass_that_calls
from workbench.models.state_cache import StateLayerCache


class MixerPatch(ClassPatch):
    """A hold on the mixers of a model, whose calls go through a `StateLayerCache` if they are given one.

    Args:
        model: The model.
        paths: Dotted names of the mixers.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        modules = dict(model.named_modules())
        super().__init__([modules[path] for path in paths], _by_sequence)


@cache
def _by_sequence(mixer_class: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a mixer that leaves the layout of its rows to the layer's cache."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, StateLayerCache):
                return value.run(partial(mixer_class.__call__, self), args, kwargs)
        return mixer_class.__call__(self, *args, **kwargs)

    return subclass_that_calls(mixer_class, call)


@contextmanager
def find_mixers(model: nn.Module, caches: Sequence[Any]) -> Iterator[list[list[str]]]:
    """Watch the model run inside the block.

    Args:
        model: The model; unchanged afterwards.
        caches: The state caches that it is given in the block.

    Yields:
        For each cache the dotted names of its mixers, complete when the block ends.
    """
    found: list[list[str]] = [[] for _ in caches]
    handed_on: list[set[int]] = []  # for each module that is running, the caches that it has handed to another one
    seen = [set[str]() for _ in caches]

    def call(path: str, base: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        given = [i for i, one in enumerate(caches) if any(value is one for value in (*args, *kwargs.values()))]
        if handed_on:
            handed_on[-1].update(given)
        handed_on.append(set())
        result = base(module, *args, **kwargs)
        below = handed_on.pop()
        if handed_on:
            handed_on[-1].update(below)
        for index in given:
            if index not in below and path not in seen[index]:
                seen[index].add(path)
                found[index].append(path)
        return result

    with calls_through({path: module for path, module in model.named_modules() if path}, call):
        yield found
