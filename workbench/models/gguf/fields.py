"""Metadata values of a GGUF file, checked before they are used.

A file may come from anywhere and hold any type under any key. Values read here have the expected type, range and
size; for any other value an error names the key, the value and the allowed range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from workbench.base.short_traceback import ShortTraceback
from workbench.base.text import shown


class GGUFError(ShortTraceback, ValueError):
    """The GGUF file is damaged, or something in it cannot be loaded; the message names the cause."""


MAX_SIZE = 2**24
"""Maximum number of positions, features or tokens of a model."""


def _checked(metadata: Mapping[str, Any], key: str, default: Any, fits: Callable[[Any], bool], description: str) -> Any:
    """The value of a key, or ``default``; None as it is, and anything else that does not fit is refused."""
    value = metadata.get(key, default)
    if value is not None and not fits(value):
        raise GGUFError(f"metadata {key}={shown(value)} must be {description}")
    return value


def whole_number(
    metadata: Mapping[str, Any], key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE
) -> int | None:
    """An integer within ``[low, high]``; ``default`` if the key is missing.

    Raises:
        GGUFError: It is something else.
    """
    return _checked(
        metadata, key, default, lambda v: type(v) is int and low <= v <= high, f"an integer from {low} to {high}"
    )


def number(
    metadata: Mapping[str, Any], key: str, default: float | None = None, *, above: float = -math.inf
) -> float | None:
    """A finite number above a limit; ``default`` if the key is missing.

    Raises:
        GGUFError: It is something else.
    """
    _checked(metadata, key, default, lambda v: type(v) in (int, float) and math.isfinite(v), "a finite number")
    return _checked(metadata, key, default, lambda v: v > above, f"above {above:g}")


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or False; ``default`` if the key is missing.

    Raises:
        GGUFError: It is something else.
    """
    return _checked(metadata, key, default, lambda v: isinstance(v, bool), "true or false")


def text(metadata: Mapping[str, Any], key: str) -> str | None:
    """A text; None if the key is missing.

    Raises:
        GGUFError: It is something else.
    """
    return _checked(metadata, key, None, lambda v: isinstance(v, str), "a text")


def list_of(metadata: Mapping[str, Any], key: str, kind: type, length: int | None = None) -> list[Any] | None:
    """A list whose items are all of one type; None if the key is missing.

    Args:
        metadata: The metadata.
        key: The key.
        kind: int, float or str; an integer is accepted for a float.
        length: Required number of items, None for any.

    Raises:
        GGUFError: It is something else.
    """
    kinds = {int, float} if kind is float else {kind}
    description = f"a list of {'texts' if kind is str else kind.__name__}"
    value = _checked(metadata, key, None, lambda v: isinstance(v, list) and set(map(type, v)) <= kinds, description)
    if value is not None and length is not None and len(value) != length:
        raise GGUFError(f"metadata {key} has {len(value)} entries, it must have {length}")
    return value
