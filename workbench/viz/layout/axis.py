"""An axis of a picture without scripts: its round ticks, and the place of a value on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_TIMES = 5
"""Largest number of distances between ticks of an axis of time."""

TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Seconds between two labels in minutes or hours; a longer axis has days of 24 hours."""

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
        return cls._until(end, _step(end))

    @classmethod
    def of_time(cls, end: float) -> Axis:
        """From 0 to a time in seconds, with about four round ticks; ``labels`` says how they are written."""
        return cls._until(end, time_distance(end, MOST_TIMES, in_minutes(end, end)))

    @classmethod
    def _until(cls, end: float, step: float) -> Axis:
        return cls(0.0, end, _multiples(step, 0, math.floor(end / step * (1 + 1e-9))))

    @property
    def numbers(self) -> list[str]:
        """The ticks of an axis of numbers."""
        return [f"{tick:,g}" for tick in self.ticks]

    @property
    def labels(self) -> list[str]:
        """The ticks of an axis of time: all have the unit of the last one and the same number of digits."""
        distance = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else self.end
        return time_labels(self.ticks, self.end, distance)

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


# Times: workbench/viz/js/time_axis.js has the same rule, and a test compares both.


def in_minutes(time: float, span: float) -> bool:
    """Whether a time in seconds on an axis of a span is written in minutes."""
    return span >= 120 or (time >= 600 and span >= 8)


def time_distance(length: float, count: int, minutes: bool) -> float:
    """The distance in seconds of at most ``count`` round times within a length."""
    raw = length / max(1, count)
    if minutes and raw > 0.5:
        return next((step for step in TIME_STEPS if step >= raw), math.ceil(raw / 86400) * 86400)
    power = 10.0 ** math.floor(math.log10(raw))
    return power * next((factor for factor in (1, 2, 5) if factor * power >= raw * (1 - 1e-9)), 10)


def time_labels(times: Sequence[float], span: float, precision: float) -> list[str]:
    """The labels of the times of one axis.

    Args:
        times: In seconds; the largest one has the unit of all: "0.5 s" beside "1.0 s", "0:30 h" beside "1:00 h".
        span: Length of the axis in seconds.
        precision: The difference in seconds that two labels must show.
    """
    largest = max(times)
    if in_minutes(largest, span):
        return [_clock(time, largest >= 3600, precision) for time in times]
    name, unit = next((of for of in _UNITS if float(f"{largest / of[1]:.3g}") < 1000), _UNITS[-1])
    digits = _places(precision / unit)
    return [f"{0 if abs(time) < precision * 1e-6 else f'{time / unit:,.{digits}f}'} {name}" for time in times]


_UNITS = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))


def _places(precision: float) -> int:
    """Digits after the point that show a difference."""
    return min(12, max(0, math.ceil(-math.log10(precision) - 1e-6)))


def _clock(time: float, hours: bool, precision: float) -> str:
    """Minutes and seconds, or hours and minutes, with seconds if the precision is below a minute."""
    unit, digits = 60 if hours and precision >= 60 else 1, _places(precision)
    every = round(time / unit, digits) * unit
    whole = math.floor(every)
    minutes, seconds = whole // 60, f"{whole % 60:02}{f'{every - whole:.{digits}f}'[1:]}"
    if not hours:
        return f"{minutes}:{seconds} min"
    return f"{minutes // 60}:{minutes % 60:02}{'' if unit == 60 else f':{seconds}'} h"
