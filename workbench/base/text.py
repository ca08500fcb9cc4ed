"""Values, numbers and names as a message or a page shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

MAX_SHOWN = 200
"""Maximum number of characters of a value in an error message."""


def shown(value: Any) -> str:
    """The value's repr for an error message, shortened in the middle if it is long."""
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        value = value[:MAX_SHOWN] + value[-MAX_SHOWN:]  # the repr of a megabyte takes a while, too
    elif isinstance(value, list | tuple) and len(value) > MAX_SHOWN:
        value = [*value[:MAX_SHOWN], *value[-MAX_SHOWN:]]
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write very long ones
        return f"an integer of {value.bit_length()} bits"
    return shortened(repr(value))


def shortened(text: str) -> str:
    """The text, without its middle if it is long."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 4 :]}"


def counted(value: int, noun: str, plural: str = "") -> str:
    """A number of things, for example "1 request" and "2,000 requests".

    Args:
        value: The number.
        noun: The word for one of them.
        plural: The word for several, if it is not the noun with an s.
    """
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Fields with their values as a command takes them, such as "max_num_seqs=8, enable_prefix_caching=false"."""
    words = {"None": "none", "True": "true", "False": "false"}
    return ", ".join(f"{name}={words.get(f'{value}', value)}" for name, value in settings.items())


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits or all before the point: "0.0512", "18.7", "186", "1,864".

    ``formatNumber`` of the pages (`workbench/viz/js/dom.js`) writes three digits alike.
    """
    rounded = f"{value:.{digits}g}"
    if not math.isfinite(value):
        return rounded
    return f"{value:,.0f}" if abs(float(rounded)) >= 10 ** (digits - 1) else f"{Decimal(rounded):f}"


_THREE_DIGITS = Context(prec=3, rounding=ROUND_HALF_UP)


def duration(seconds: float) -> str:
    """A time in the unit that reads best, with three digits: "5.49 µs", "12 ms", "1.5 s" or "1,234 s".

    ``formatSeconds`` of the pages (`workbench/viz/js/dom.js`) writes the same.
    """
    if seconds == 0:
        return "0 s"
    for unit, length in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        rounded = float(_THREE_DIGITS.create_decimal(seconds / length))
        if abs(rounded) < 1000:
            return f"{rounded:g} {unit}"
    return f"{seconds:,.0f} s"


def printable(text: str) -> str:
    """A text without line breaks, control characters and other characters that steer a terminal, which are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
