"""Gives functions of a scheduler another text for one run, in the process that has imported it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from workbench.analysis.hunt.between.ran import Places


class NotGrafted(Exception):
    """The function cannot have this text."""


@contextmanager
def grafted(places: Places, grafts: Sequence[Mapping[str, str]]) -> Iterator[None]:
    """Give functions another text.

    Args:
        places: The scheduler's files.
        grafts: ``{"file", "function", "text"}`` each: the file as within its package, the qualified name, and the text
            of the definition without indentation.

    Raises:
        NotGrafted: One of them does not exist or does not compile.
    """
    undo: list[tuple[Any, str, Any]] = []
    try:
        for graft in grafts:
            undo += _replace(places, graft)
        yield
    finally:
        for owner, name, before in reversed(undo):
            setattr(owner, name, before)


def _replace(places: Places, graft: Mapping[str, str]) -> list[tuple[Any, str, Any]]:
    module = _module(places, graft["file"])
    *classes, name = graft["function"].split(".")
    owner: Any = module
    for each in classes:
        owner = getattr(owner, each, None)
    before = vars(owner).get(name) if owner is not None else None
    if before is None:
        raise NotGrafted(f"{graft['function']} does not exist")
    made = _made(module, owner if classes else None, name, graft["text"])
    places_of_it = [(owner, name)]
    if not classes:  # others have imported it by name
        others = [each for each in sys.modules.values() if isinstance(each, ModuleType) and each is not module]
        places_of_it += [(each, key) for each in others for key, value in list(vars(each).items()) if value is before]
    for one, key in places_of_it:
        setattr(one, key, made)
    return [(one, key, before) for one, key in places_of_it]


def _module(places: Places, file: str) -> ModuleType:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(path, str) and places.name(path) == file:
            return module
    raise NotGrafted(f"{file} is not imported")


def _made(module: ModuleType, owner: Any, name: str, text: str) -> Any:
    body = "".join(f"    {line}\n" for line in text.splitlines())
    made: dict[str, Any] = {}
    future = "from __future__ import annotations\n"
    try:  # the parameter is what super() without arguments looks for
        code = compile(f"{future}def _make(__class__):\n{body}    return {name}\n", module.__file__ or "", "exec")
        exec(code, vars(module), made)  # noqa: S102  (the text of a scheduler that the user compares)
        return made["_make"](owner)
    except Exception as problem:
        raise NotGrafted(f"{name}: {problem}") from None
