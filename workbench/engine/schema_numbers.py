"""Bounds and constants of a JSON schema as llguidance can keep them: what it allows is then always valid.

llguidance reads every number as a double, and lets a number be an excluded whole number if the other bound is within 1
of it and further from 0. Such bounds are moved inwards, by as little as a double can tell, or by a millionth of the
range.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

_EXACT = 2**53
_MARGIN = 2.0**-20
"""Part of the range next to an excluded whole number that is left out."""


def with_kept_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with bounds that llguidance keeps; the same object if they are kept as they are."""
    words = "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"
    bounds = {word: schema[word] for word in words if _is_number(schema.get(word))}
    if not bounds or schema.get("type", "number") not in ("number", "integer", ["number"], ["integer"]):
        return schema
    kept = dict(bounds)
    for word, value in bounds.items():
        if isinstance(value, int) and abs(value) >= _EXACT:
            is_lower, is_open = word.endswith("inimum"), word.startswith("exclusive")
            step = math.inf if is_lower else -math.inf
            if is_open and schema.get("type") in ("integer", ["integer"]):
                value, is_open = value + (1 if is_lower else -1), False
            moved = _moved(value, step)
            if is_open and moved == value:
                moved = math.nextafter(moved, step)
            del kept[word]
            name = "minimum" if is_lower else "maximum"
            others = [kept[name]] if name in kept else []
            kept[name] = (max if is_lower else min)([int(moved) if math.isfinite(moved) else value, *others])
    if schema.get("type", "number") in ("number", ["number"]):
        _open(kept, "exclusiveMinimum", "minimum", [kept[w] for w in words[2:] if w in kept], 1)
        _open(kept, "exclusiveMaximum", "maximum", [kept[w] for w in words[:2] if w in kept], -1)
    return schema if kept == bounds else {**{w: v for w, v in schema.items() if w not in bounds}, **kept}


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
