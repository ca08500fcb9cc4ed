"""Methods, functions and pictures that a room gives to the objects of a room below it, which does not know it.

One table, filled by ``workbench/__init__.py``, names each of them and its home; nothing is imported until it is used.
``workbench/methods.py`` has their types.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from workbench.ground.on_demand import imported

C = TypeVar("C", bound=type)

TABLE: dict[str, str] = {}
"""Home of each attached function, "module:function", by "Class.method" or "package.function"."""


def find(name: str) -> Callable[..., Any]:
    """Import what is attached under a name such as "Trace.watch".

    Raises:
        ModuleNotFoundError: A module that it needs is not installed; the message names it.
    """
    module, _, function = TABLE[name].partition(":")
    return imported(module, function, f"{name}()")


class AttachedMethod:
    """A method that is defined in another room. ``help()`` shows the function that is attached.

    Args:
        name: Its name in the table, such as "Trace.watch".
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        """The attached function, bound to the instance if there is one.

        Raises:
            ModuleNotFoundError: A module that it needs is not installed.
        """
        function = find(self.name)
        return function if instance is None else MethodType(function, instance)


def with_attached_methods(owner: C) -> C:
    """Class decorator: give a class the methods that the table attaches to it."""
    for name in TABLE:
        kind, _, method = name.partition(".")
        if kind == owner.__name__ and not method.startswith("_"):
            setattr(owner, method, AttachedMethod(name))
    return owner


def attached_functions(package: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package that finds the functions that the table attaches to it.

    Args:
        package: Its full name, such as that of the record's room.
    """

    def find_function(name: str) -> Any:
        key = f"{package.partition('.')[2]}.{name}"
        if key not in TABLE:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return find(key)

    return find_function


def picture(kind: str, shown: object) -> str | None:
    """HTML of an object, for its ``_repr_html_``; None if it cannot be drawn, so that a notebook shows its text.

    Args:
        kind: Name of its class, such as "StepRecord".
        shown: The object.
    """
    try:
        draw = find(f"{kind}._repr_html_")
    except ModuleNotFoundError:
        return None
    return draw(shown)
