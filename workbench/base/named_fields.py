"""Functions that take the fields of a configuration by name, and show them in their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any


class _Kept:
    def __repr__(self) -> str:
        return "..."


KEPT = _Kept()
"""The default of a field in a signature: a field that is not named keeps the value that it has."""


def show_fields(kind: type, *functions: Callable[..., Any]) -> None:
    """Put the fields of a dataclass into the signatures of functions, before their ``**keywords``.

    Their default is `KEPT`, shown as "...". Nothing else changes: the function gets the fields as keywords and checks
    them.

    Args:
        kind: The dataclass, such as EngineConfig.
        *functions: They change in place.

    Example:
        >>> from workbench import EngineConfig
        >>> def changed(trace, **changes): ...
        >>> show_fields(EngineConfig, changed)
        >>> "max_num_seqs" in inspect.signature(changed).parameters
        True
    """
    for function in functions:
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        assert rest.kind is rest.VAR_KEYWORD, f"{function.__qualname__} takes no keywords beside its own"
        taken = {parameter.name for parameter in own}
        added = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=KEPT, annotation=field.type)
            for field in fields(kind)
            if field.name not in taken
        ]
        function.__signature__ = signature.replace(parameters=[*own, *added, rest])  # type: ignore[attr-defined]
