"""Checks of one field's value. Each returns the value to keep, or says field, value and range in a ValueError."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

MAX_INT32 = 2**31 - 1
"""Token ids, block ids, positions and cumulative lengths are int32 in every kernel."""


def integer(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> int:
    """The value as an int within ``[low, high]``."""
    allowed = f">= {low}" if high is None else f"from {low} to {high}"
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}{hint}") from None
    if result < low or (high is not None and result > high):
        raise ValueError(f"{name} must be {allowed}, got {result}{hint}")
    return result


def number(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> float:
    """The value as a finite float within the interval, whose ends are open where it says so."""
    if high == math.inf:
        allowed = f"{'>' if low_open else '>='} {low:g} and finite"
    else:
        allowed = f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    try:
        if isinstance(value, bool | str):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number {allowed}, got {value!r}") from None
    below = result <= low if low_open else result < low
    above = result >= high if high_open else result > high
    if not math.isfinite(result) or below or above:
        raise ValueError(f"{name} must be {allowed}, got {result}")
    return result


def flag(name: str, value: Any) -> bool:
    """The value, which must be a bool and not merely true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """The value, which must be one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def items(name: str, value: Any, what: str) -> Iterable[Any]:
    """The value as something to iterate over; None stands for nothing."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of {what}, got {value!r}")
    return value
