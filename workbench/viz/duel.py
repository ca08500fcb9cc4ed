"""A duel of two configurations over the same arrivals: the class bets first, then one run is simulated and measured.

A is the run itself, B the same requests under another configuration. Both are measured on the same clock, seconds
where both have times and steps otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median_high
from typing import TYPE_CHECKING, Any

from workbench.base.field_checks import choice
from workbench.viz.layout.comparison import time_words

if TYPE_CHECKING:
    from workbench.trace.readings.compare import Comparison

SIDES = ("A", "B", "neither")
"""The bets: this run, the other configuration, or both within TIE of each other."""

TIE = 0.01
"""Relative difference up to which neither side wins."""


def _first_tokens(found: Comparison) -> tuple[float | None, float | None]:
    pairs = [(each.ttft_a, each.ttft_b) for each in found.requests]
    values = [[value for value in side if value is not None] for side in zip(*pairs, strict=True)] or [[], []]
    return tuple(median_high(side) if side else None for side in values)  # type: ignore[return-value]


def _longest_pauses(found: Comparison) -> tuple[float | None, float | None]:
    sides = ([each.a for each in found.requests], [each.b for each in found.requests])
    pauses = [max((gap for each in side for gap in each.gaps(found.unit)), default=None) for side in sides]
    return pauses[0], pauses[1]


def _ends(found: Comparison) -> tuple[float | None, float | None]:
    if found.unit == "steps":
        return float(len(found.a)), float(len(found.b))
    return found.a[-1].end - found.a[0].time, found.b[-1].end - found.b[0].time


MEASURES: dict[str, Callable[[Comparison], tuple[float | None, float | None]]] = {
    "median time to first token": _first_tokens,
    "longest pause between two tokens": _longest_pauses,
    "time until all are finished": _ends,
}
"""The measures of a duel, each a function that gives its value for A and for B."""


def question(changes: Mapping[str, Any], measure: str) -> str:
    """The question to the class.

    Raises:
        ValueError: There is no change, or no such measure.
    """
    choice("measure", measure, tuple(MEASURES))
    if not changes:
        raise ValueError("a duel needs a setting that differs: move a slider first")
    what = ", ".join(f"{name} {value}" for name, value in changes.items())
    return f"A is this run. B has the same requests with {what}. Which has the shorter {measure}?"


def outcome(found: Comparison, measure: str) -> tuple[str, str]:
    """The winner, one of SIDES, and the sentence with both values.

    Raises:
        ValueError: A run lacks the measure, such as a time to first token before any token.
    """
    a, b = MEASURES[measure](found)
    if a is None or b is None:
        raise ValueError(f"the runs have no {measure} yet: let the engine run on")
    winner = "neither" if abs(a - b) <= TIE * max(a, b) else SIDES[b < a]
    told = f"{measure}: A {time_words(a, found.unit)}, B {time_words(b, found.unit)}"
    return winner, f"{told[0].upper()}{told[1:]}. {'Neither wins' if winner == 'neither' else f'{winner} wins'}."
