"""The code that a model runs and the numbers that it names: what decides how it computes, apart from its weights.

A rule of a model may begin at a position: a factor on queries beyond the length of its first training, another RoPE
from some length on. The number is in its configuration or in its code, under any name. So checks try positions around
all of them, and a finding about a model holds for the same code alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import mlx.nn as nn

from workbench.models.folder import CONTEXT_FIELDS
from workbench.models.patch import Replacement, modules_of

DEFAULT_CONTEXT = 8192
"""Positions that are tried of a model that does not say how many it has."""

_MAX_LIST = 64
_SCALARS = (bool, int, float, str, type(None))
_NOT_ITS_OWN = ("mlx", "workbench", "builtins")
"""Packages whose classes are MLX's, or stand in a model for a while, and not the model's."""


def own_class(module: nn.Module) -> type:
    """The class of a module before this package put a subclass or a packed layer in its place."""
    classes = type(module).__mro__
    return next((one for one in classes if not hasattr(one.__call__, "stands_in")), classes[0])


def arguments(module: nn.Module) -> Any:
    """The arguments that a model, or a part of it, was made with; None if it does not keep them."""
    return next((found for name in ("args", "config") if (found := getattr(module, name, None)) is not None), None)


def scalars(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are plain values, without those that say how it is used at present."""
    values = {**vars(module), **dict(module.items())}
    used = ("_training", "training", "num_holders", "_no_grad")
    return {name: value for name, value in values.items() if name not in used and isinstance(value, _SCALARS)}


def named_numbers(model: nn.Module) -> list[int]:
    """The whole numbers, from 2 on, that a model's arguments, its modules and its code name."""
    found: set[int] = set()
    for module in model.modules():
        for value in [*scalars(module).values(), arguments(module)]:
            found.update(_numbers_in(value))
    classes = {type(module) for module in model.modules()}
    for function in _functions(classes):
        found.update(_numbers_in(list(_constants(function.__code__))))
        found.update(_numbers_in([*(function.__defaults__ or ()), *_closure(function)]))
    for module in _code_modules(classes):
        found.update(number for value in vars(module).values() for number in _numbers_in(value, depth=1))
    return sorted(found)


def position_limit(model: nn.Module) -> int:
    """Number of positions of a model, by its arguments."""
    for module in model.modules():
        found = arguments(module)
        for name in CONTEXT_FIELDS:
            value = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                return value
    return DEFAULT_CONTEXT


def fingerprint(model: nn.Module) -> str:
    """Digest of a model's code, of the plain values of its modules and arguments, and of the shapes of its modules."""
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        digest.update(repr((path, own_class(module).__qualname__, sorted(scalars(module).items(), key=str))).encode())
        digest.update(repr(_plain(arguments(module))).encode())
    digest.update(code_digest(model).encode())
    return digest.hexdigest()


def code_digest(model: nn.Module) -> str:
    """Digest of the code of a model's classes and of the functions beside them, as they are now."""
    digest, classes = hashlib.sha256(), {type(module) for module in model.modules()}
    for function in _functions(classes):
        digest.update(function.__qualname__.encode())
        _add_code(digest, function.__code__)
        digest.update(repr(_plain([function.__defaults__, function.__kwdefaults__, _closure(function)])).encode())
    for module in _code_modules(classes):
        values = {name: value for name, value in vars(module).items() if isinstance(value, int | float | tuple)}
        digest.update(repr(_plain(values)).encode())
    return digest.hexdigest()


def _code_modules(classes: Collection[type[nn.Module]]) -> list[Any]:
    """Modules of Python that define a model's classes, and those of their package whose functions these use."""
    modules = {module.__name__: module for module in modules_of(classes)}
    packages = tuple({name.rpartition(".")[0] + "." for name in modules if "." in name} | {"mlx_lm.models."})
    rest = list(modules.values())
    while rest:
        for value in vars(rest.pop()).values():
            name = getattr(_unpatched(value), "__module__", None) or ""
            if name.startswith(packages) and name in sys.modules and name not in modules:
                modules[name] = sys.modules[name]
                rest.append(modules[name])
    return [modules[name] for name in sorted(modules) if name.partition(".")[0] not in _NOT_ITS_OWN]


def _functions(classes: Collection[type[nn.Module]]) -> Iterator[FunctionType]:
    """The functions and methods of a model's code, in an order that does not depend on the run."""
    seen: set[int] = set()
    for module in _code_modules(classes):
        for _, value in sorted(vars(module).items(), key=lambda item: item[0]):
            members = [value, *(vars(value).values() if isinstance(value, type) else ())]
            for member in map(_unpatched, members):
                if isinstance(member, FunctionType) and id(member) not in seen:
                    seen.add(id(member))
                    yield member
    for class_ in sorted(classes, key=lambda one: (one.__module__, one.__qualname__)):
        for base in class_.__mro__:
            if base.__module__.partition(".")[0] in _NOT_ITS_OWN:
                continue
            for member in map(_unpatched, vars(base).values()):
                if isinstance(member, FunctionType) and id(member) not in seen and not hasattr(member, "stands_in"):
                    seen.add(id(member))
                    yield member


def _unpatched(value: Any) -> Any:
    """A function as the model's author wrote it."""
    if isinstance(value, Replacement):
        value = value.original
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    return getattr(value, "__wrapped__", value) if isinstance(value, FunctionType) else value


def _closure(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def _constants(code: CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield constant


def _add_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant).encode())


def _numbers_in(value: Any, depth: int = 5) -> Iterator[int]:
    if isinstance(value, bool) or depth < 0:
        return
    if isinstance(value, int | float):
        if 2 <= value < 2**31 and value == int(value):
            yield int(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers_in(item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        if len(value) <= _MAX_LIST or depth == 5:
            for item in value:
                yield from _numbers_in(item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _numbers_in(vars(value), depth - 1)


def _plain(value: Any) -> Any:
    """A value as its representation does not name a place in memory."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Mapping):
        return sorted((str(name), _plain(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, _plain(vars(value))]
    if isinstance(value, FunctionType):
        return value.__qualname__
    return type(value).__qualname__
