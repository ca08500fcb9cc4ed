"""Checks of one field's value. Each returns the value to keep, or says field, value and range in a FieldError."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType
from typing import Any, TypeVar, cast

from workbench.base.short_traceback import ShortTraceback
from workbench.base.text import MAX_SHOWN, shown

S = TypeVar("S", bound=str)

MAX_INT32 = 2**31 - 1
"""Token ids, block ids, positions and cumulative lengths are int32 in every kernel."""

SMALLEST = 1e-100
"""Smallest factor of logits; a float32 divided by two such factors is still a float64."""


MAX_LISTED = 8
"""Most fields that a message lists if something else lists them, too."""


class FieldError(ShortTraceback, ValueError):
    """A value that a field does not take; the message names the field, the value and what it takes."""


class UnknownFieldError(ShortTraceback, TypeError):
    """A keyword argument that is not a field; the message names the one that was meant, and all others."""


def integer(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> int:
    """The value as an int within ``[low, high]``; ``hint`` follows this range in an error."""
    allowed = (f">= {low}" if high is None else f"from {low} to {high}") + hint
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        raise FieldError(f"{name} must be an integer {allowed}, got {shown(value)}") from None
    if result < low or (high is not None and result > high):
        raise FieldError(f"{name} must be {allowed}, got {shown(result)}")
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
        raise FieldError(f"{name} must be a number {allowed}, got {shown(value)}") from None
    below = result <= low if low_open else result < low
    above = result >= high if high_open else result > high
    if not math.isfinite(result) or below or above:
        raise FieldError(f"{name} must be {allowed}, got {result}")
    return result


def computable(name: str, value: float, *, zero_means: str = "") -> float:
    """The value, which logits can be multiplied with and divided by without an overflow.

    Args:
        name: Name of the field.
        value: The value.
        zero_means: The meaning of 0; "" if it has none, and is refused.
    """
    if not (SMALLEST <= value <= 1 / SMALLEST or (zero_means and value == 0)):
        zero = f" 0 ({zero_means}) or" if zero_means else ""
        raise FieldError(f"{name} must be{zero} from {SMALLEST:g} to {1 / SMALLEST:g}, got {shown(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """The value, which must be a bool and not merely true."""
    if not isinstance(value, bool):
        raise FieldError(f"{name} must be True or False, got {shown(value)}")
    return value


def choice(name: str, value: Any, allowed: Sequence[S]) -> S:
    """The value, which must be one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise FieldError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}{suggestion(value, allowed)}"
        )
    return cast("S", value)


def items(name: str, value: Any, what: str) -> Iterable[Any]:
    """The value as something to iterate over; None stands for nothing."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise FieldError(f"{name} must be a list of {what}, got {shown(value)}")
    return value


def json_object(name: str, value: Any, fields: Collection[str] | None = None) -> Mapping[str, Any]:
    """The value, which must be a mapping and have none but these fields; None allows any field."""
    if not isinstance(value, Mapping):
        raise FieldError(f"{name} must be an object, got {shown(value)}")
    for field in value:
        if fields is not None and field not in fields:
            raise FieldError(f"{name} has an unknown field {shown(field)}{did_you_mean(field, fields)}")
    return value


MIN_BEGINNING = 3
"""Letters from which on the beginning of a word stands for it in a suggestion."""


def suggestion(value: object, known: Iterable[str]) -> str:
    """The end of a message on a word that is not known: the one that was probably meant; "" if none is similar."""
    if not isinstance(value, str) or len(value) > MAX_SHOWN:
        return ""
    names = list(known)
    similar = get_close_matches(value, names, n=1, cutoff=0.7)  # two letters of a short word swapped
    if not similar and len(value) >= MIN_BEGINNING:
        begun = [name for name in names if name.startswith(value)]
        similar = begun if len(begun) == 1 else []
    return f" (did you mean {similar[0]}?)" if similar else ""


def refuse_misspelt_methods(kind: type, base: type) -> None:
    """Refuse a subclass with a method that is nearly one of its base: it would never be called.

    Args:
        kind: The subclass.
        base: The class whose methods a user overrides.

    Raises:
        FieldError: A public method of ``kind`` is none of its parents, and its name is like one of ``base``.
    """
    known = [name for name, value in vars(base).items() if callable(value) and not name.startswith("_")]
    for name, value in vars(kind).items():
        if (
            name.startswith("_")
            or not isinstance(value, FunctionType)
            or any(hasattr(one, name) for one in kind.__bases__)
        ):
            continue
        if similar := get_close_matches(name, known, n=1, cutoff=0.8):
            raise FieldError(
                f"{kind.__name__}.{name} is not a method of {base.__name__} (did you mean {similar[0]}?); it would "
                "never be called. If it is a helper, begin its name with _"
            )


def did_you_mean(name: object, known: Collection[str], listed_by: str = "") -> str:
    """The end of a message on an unknown field: the one that was probably meant, and the others.

    Args:
        name: The unknown field.
        known: The fields.
        listed_by: A command or call that lists the fields, such as "help(EngineConfig)". The message names it, and
            only similar fields, if there are many.
    """
    meant = suggestion(name, known)
    if not listed_by or len(known) <= MAX_LISTED:
        return f"{meant}; the fields are {', '.join(known)}"
    similar = get_close_matches(name, known, n=4, cutoff=0.5) if isinstance(name, str) and meant else []
    others = f"; similar ones are {', '.join(similar[1:])}" if similar[1:] else ""
    return f"{meant}{others}; {listed_by} lists all {len(known)} fields"
