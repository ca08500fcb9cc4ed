"""Bounds and constants of a JSON schema as llguidance can keep them: what it allows is then always valid.

llguidance reads every number as a double, and lets a number be an excluded whole number if the other bound is within 1
of it and further from 0. Such bounds are moved inwards, by as little as a double can tell, or by a millionth of the
range. Bounds meet from several places: a schema, the parts of its ``allOf``, what ``$ref`` leads to, and what stands
beside an ``anyOf``.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple

_EXACT = 2**53
_MARGIN = 2.0**-20
"""Part of the range next to an excluded whole number that is left out."""


_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


class Bounds(NamedTuple):
    """The bounds that hold for a number together.

    Attributes:
        words: The strictest value of each word.
        kind: "number", "integer", or "" if the value cannot be a number.
    """

    words: dict[str, Any]
    kind: str

    def also(self, schema: dict[str, Any]) -> Bounds:
        """These bounds and those that a schema has itself."""
        words, kinds = dict(self.words), schema.get("type", "number")
        for word, strictest in (*((word, max) for word in _LOWER), *((word, min) for word in _UPPER)):
            if _is_number(schema.get(word)):
                words[word] = strictest(words.get(word, schema[word]), schema[word])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        kind = "number" if "number" in kinds else "integer" if "integer" in kinds else ""
        return Bounds(words, min(self.kind, kind))  # "" before "integer" before "number"


UNBOUND = Bounds({}, "number")


def with_kept_bounds(schema: dict[str, Any], bounds: Bounds) -> dict[str, Any]:
    """A schema with bounds that llguidance keeps; the same object if they are kept as they are.

    Args:
        schema: The schema.
        bounds: All bounds for its values, those of its parts and of the schemas around it included.
    """
    words, kind = bounds
    if not words or not kind:
        return schema
    kept = dict(words)
    for word, value in words.items():
        if abs(value) >= _EXACT:  # a float of this size is a whole number, too
            value = int(value)
            is_lower, is_open = word in _LOWER, word.startswith("exclusive")
            step = math.inf if is_lower else -math.inf
            if is_open and kind == "integer":
                value, is_open = value + (1 if is_lower else -1), False
            moved = _moved(value, step)
            if is_open and value in (moved, Decimal(repr(moved))):
                moved = math.nextafter(moved, step)
            del kept[word]
            name = "minimum" if is_lower else "maximum"
            others = [kept[name]] if name in kept else []
            kept[name] = (max if is_lower else min)([int(moved) if math.isfinite(moved) else value, *others])
    if kind == "number":
        _open(kept, "exclusiveMinimum", "minimum", [kept[w] for w in _UPPER if w in kept], 1)
        _open(kept, "exclusiveMaximum", "maximum", [kept[w] for w in _LOWER if w in kept], -1)
    return schema if kept == words else {**{w: v for w, v in schema.items() if w not in words}, **kept}


def _open(bounds: dict[str, Any], excluded: str, included: str, others: list[Any], sign: int) -> None:
    """Move an excluded whole number inwards if the other bound is within 1 of it."""
    value = bounds.get(excluded)
    if value is None or value != int(value) or sign * value < 0:
        return
    distances = [sign * (other - value) for other in others]
    if distances and 0 < min(distances) < 1:
        moved = value + sign * min(distances) * _MARGIN
        moved = math.nextafter(value, sign * math.inf) if moved == value else moved
        del bounds[excluded]
        given = bounds.get(included, moved)
        bounds[included] = max(given, moved) if sign > 0 else min(given, moved)


def _moved(value: int, step: float) -> float:
    """The double next to an integer in the direction of a step, or the integer itself.

    The shortest decimal number that means a double is what llguidance compares digits with, so this is inside, too.
    """
    try:
        near = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    while math.isfinite(near) and (min if step > 0 else max)(near, Decimal(repr(near)), value) != value:
        near = math.nextafter(near, step)
    return near


def is_exact(value: Any) -> bool:
    """Whether a constant holds only integers that a double can tell from their neighbours."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
        elif (
            isinstance(part, int)
            and not isinstance(part, bool)
            and abs(part) > _EXACT
            and Decimal(repr(_moved(part, math.inf))) != part
        ):
            return False
    return True


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))
