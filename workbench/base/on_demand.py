"""Imports at the first use: optional modules, and what a room gives to the objects of a room below it.

The base of Workbench needs msgspec alone: it reads, simulates, explains, predicts and records, on any system and in a
web page. Everything else belongs to an extra of ``pyproject.toml``. A missing module is named with the command that
installs it.

Methods and pictures that a room gives to the objects of a room below it, which does not know it, are in one
table, filled by ``workbench/__init__.py``. ``workbench/methods.py`` has their types.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

C = TypeVar("C", bound=type)

PROJECT = "inference-workbench"
"""Name under which pip installs Workbench."""

EXTRA_OF = {
    **dict.fromkeys(("mlx", "mlx_lm", "numpy", "tokenizers", "transformers", "jinja2", "gguf"), "engine"),
    **dict.fromkeys(("numba", "llvmlite", "tqdm", "greenlet", "sentencepiece", "elftools", "llguidance"), "engine"),
    **dict.fromkeys(("anywidget", "ipywidgets", "traitlets", "IPython", "bokeh", "pandas"), "notebook"),
    **dict.fromkeys(("panel", "param", "tornado", "prometheus_client", "zmq", "segno", "psutil"), "serve"),
    "ziglang": "msl",
    "hypothesis": "hunt",
    "argcomplete": "completion",
}
"""The extra that brings a package, by the name it is imported under."""


def missing_extra(what: str, problem: ModuleNotFoundError, extra: str = "") -> ModuleNotFoundError:
    """The error that says which extra is missing and how to install it; ``problem`` if no extra brings the module.

    Args:
        what: Name of the command or function that needs the module, such as "workbench serve".
        problem: The import that failed.
        extra: The extra that brings everything for ``what``; empty for the one of the missing module.

    Example:
        >>> problem = ModuleNotFoundError("No module named 'anywidget'", name="anywidget")
        >>> print(missing_extra("show()", problem))
        show() needs the extra notebook (anywidget is not installed): pip install 'inference-workbench[notebook]'
    """
    package = (problem.name or "").partition(".")[0]
    if package not in EXTRA_OF:
        return problem
    extra = extra or EXTRA_OF[package]
    return ModuleNotFoundError(
        f"{what} needs the extra {extra} ({package} is not installed): pip install '{PROJECT}[{extra}]'",
        name=problem.name,
    )


@contextmanager
def extra_for(what: str) -> Iterator[None]:
    """Name the extra if an import in the block fails.

    Raises:
        ModuleNotFoundError: A module is not installed; the message of `missing_extra`.
    """
    try:
        yield
    except ModuleNotFoundError as problem:
        raise missing_extra(what, problem) from None


def imported(module: str, name: str = "", what: str = "") -> Any:
    """A name of a module, which is imported.

    Args:
        module: Full name of the module.
        name: The name in it; "" for the module itself.
        what: Name of the command or function that needs it, for `missing_extra`; ``name`` if it is empty.

    Raises:
        ModuleNotFoundError: Something that the module needs is not installed.
    """
    with extra_for(what or name or module):
        found = importlib.import_module(module)
        return getattr(found, name) if name else found


class _BeforeImport(MetaPathFinder):
    def __init__(self, module: str, work: Callable[[], Any]) -> None:
        self._module, self._work = module, work

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._module:
            self._work()
        return None  # the finders after this one find the module


def before_import(module: str, home: str, function: str) -> None:
    """Call a function of ``home`` right before the first import of ``module``, or now if it is imported already."""
    if module in sys.modules:
        imported(home, function)()
    else:
        sys.meta_path.insert(0, _BeforeImport(module, lambda: imported(home, function)()))


class OnDemand(ModuleType):
    """Stands for a module that is imported at the first use of one of its names.

    Args:
        name: Full name of the module.
    """

    def __getattr__(self, attribute: str) -> Any:
        """A name of the module.

        Raises:
            ModuleNotFoundError: The module is not installed.
        """
        if attribute.startswith("__"):  # asked for by tools that look at any module
            raise AttributeError(attribute)
        value = imported(self.__name__, attribute, f"{self.__name__}.{attribute}")
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = OnDemand("numpy")


ATTACHED: dict[str, str] = {}
"""Home of each attached function, "module:function", by "Class.method"."""

ASKED_FOR: dict[str, str] = {}
"""The same of functions that a method of the class asks for with `find`."""


def find(name: str) -> Callable[..., Any]:
    """Import what stands in the tables under a name such as "Trace.watch".

    Raises:
        ModuleNotFoundError: A module that it needs is not installed; the message names it.
    """
    module, _, function = {**ASKED_FOR, **ATTACHED}[name].partition(":")
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
    for name in ATTACHED:
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
        draw = find(f"{kind}._repr_html_")
    except ModuleNotFoundError:
        return None
    return draw(shown)
