"""Old names of modules, and of names in modules and classes, that work for one version with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GOES_WITH = "0.3"
"""The version that no longer knows the old names."""


def warn(what: str, level: int = 3) -> None:
    """Warn that an old name goes, at the caller of our caller, or ``level`` calls up."""
    warnings.warn(f"{what}; its old name goes with version {GOES_WITH}", DeprecationWarning, stacklevel=level)


class MovedModules(MetaPathFinder):
    """Finds modules by their old names, when no other finder has found them.

    Args:
        home: Name of the module that has the table, which is imported then; its ``moved(name)`` finds the module.
    """

    def __init__(self, home: str) -> None:
        self._home = home

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module at its new place, for an old name; None for any other."""
        if fullname.partition(".")[0] != self._home.partition(".")[0]:
            return None
        return importlib.import_module(self._home).moved(fullname)

    def install(self) -> None:
        """Let old names be imported."""
        if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
            sys.meta_path.append(self)


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
        warn(f"{self._old} is {self._new} now")
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
        warn(f"{module}.{name} is {home or module}.{new_names[name]} now")
        return getattr(importlib.import_module(home or module), new_names[name])

    return find
