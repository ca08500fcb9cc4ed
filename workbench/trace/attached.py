"""Methods and pictures that other rooms of the package attach to the objects of this one.

The rooms above know this one, and this one does not know them. One table, ``ATTACHED`` in ``workbench/__init__.py``,
names each attached function and its module, and nothing is imported until it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import workbench
from workbench.on_demand import imported

C = TypeVar("C", bound=type)


def _find(name: str) -> Callable[..., Any]:
    """Import what is attached under a name such as "Trace.watch".

    Raises:
        ModuleNotFoundError: A module that it needs is not installed.
    """
    module, _, function = workbench.ATTACHED[name].partition(":")
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
        function = _find(self.name)
        return function if instance is None else MethodType(function, instance)


def with_attached_methods(owner: C) -> C:
    """Class decorator: give a class the methods that the table attaches to it."""
    for name in workbench.ATTACHED:
        kind, _, method = name.partition(".")
        if kind == owner.__name__ and not method.startswith("_"):
            setattr(owner, method, AttachedMethod(name))
    return owner


def picture(kind: str, shown: object) -> str | None:
    """HTML of an object, for its ``_repr_html_``; None if it cannot be drawn, so that a notebook shows its text.

    Args:
        kind: Name of its class, such as "StepRecord".
        shown: The object.
    """
    try:
        draw = _find(f"{kind}._repr_html_")
    except ModuleNotFoundError:
        return None
    return draw(shown)
