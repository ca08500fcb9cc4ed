"""An axis of a picture without scripts: its round ticks, and the place of a value on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_LINEAR = 8.0
"""Largest ratio of values on a linear scale; a wider range is on a logarithmic one, so that small values stay apart."""


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        begin: Value at its beginning.
        end: Value at its end.
        ticks: Round values on it.
        is_log: Whether it is logarithmic.
    """

    begin: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    @classmethod
    def around(cls, values: Sequence[float]) -> Axis:
        """From the last tick before all values to the first one after them."""
        low, high = min(values), max(values)
        if low > 0 and high / low > MOST_LINEAR:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            marks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            shown = tuple(mark for mark in marks if low / 2.6 < mark < high * 2.6)
            return cls(shown[0], shown[-1], shown, is_log=True)
        if high - low < 1e-9 * max(1.0, abs(high)):
            low, high = low - max(abs(low), 1.0) * 0.5, high + max(abs(high), 1.0) * 0.5
        step = _step(high - low)
        ticks = _multiples(step, math.floor(low / step), math.ceil(high / step))
        return cls(ticks[0], ticks[-1], ticks)

    @classmethod
    def until(cls, end: float) -> Axis:
        """From 0 to a value above 0, which need not be a tick."""
        step = _step(end)
        return cls(0.0, end, _multiples(step, 0, math.floor(end / step * (1 + 1e-9))))

    def place(self, value: float, begin: float, end: float) -> float:
        """The coordinate of a value, on an axis drawn from one coordinate to another."""
        if self.is_log:
            return begin + math.log(value / self.begin) / math.log(self.end / self.begin) * (end - begin)
        return begin + (value - self.begin) / (self.end - self.begin) * (end - begin)


def _step(span: float) -> float:
    """The distance of about four ticks: a power of ten, twice or five times that."""
    unit = 10.0 ** math.floor(math.log10(span / 4))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= span / 4)


def _multiples(step: float, first: int, last: int) -> tuple[float, ...]:
    return tuple(round(number * step, 12) for number in range(first, last + 1))
