"""The Pareto plot of a sweep as an SVG: time to first token against inter-token latency and against throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from workbench.base.text import counted
from workbench.viz.image import image
from workbench.viz.reprs import fragment, table

WIDTH, HEIGHT, MARGIN = 440, 330, 58
POINT, FRONT, RING, INK, GRID = "#8a8f98", "#0072b2", "#d55e00", "#1f2328", "#d0d7de"

MOST_LINEAR = 8.0
"""Largest ratio of values on a linear scale; a wider range is on a logarithmic one, so that small values stay apart."""

_TIMES = {"ttft": "time to first token", "itl": "inter-token latency", "tpot": "time per output token"}
_COUNTS = {"output_throughput": "output tokens per second", "replicas": "replicas"}


def pareto_svg(
    rows: Sequence[Mapping[str, Any]],
    settings: Sequence[str],
    ringed: Sequence[tuple[str, Mapping[str, Any]]] = (),
    across: tuple[str, str] = ("itl_mean", "output_throughput"),
    upwards: str = "ttft_mean",
    unit: str = "ms",
) -> str:
    """Two panels side by side. Points on the Pareto front are filled, outlined, numbered and listed below.

    Args:
        rows: Rows of ``workbench.analysis.sweep.sweep``.
        settings: Names of the columns that identify the configuration of a row; none to leave numbers and list out,
            for a picture beside a table with numbers.
        ringed: Rows to draw a ring around, with a word for each; "" for none.
        across: The horizontal axes of the panels.
        upwards: The vertical axis of both.
        unit: Of all times, "ms" or "s".

    Raises:
        ValueError: No row has all three results.
    """
    needed = (upwards, *across)
    shown = [row for row in rows if all(row.get(name) is not None for name in needed)]
    if not shown:
        raise ValueError(f"nothing to plot: no row of the sweep has all of {', '.join(needed)}")
    front = [row for row in shown if row.get("pareto")]
    numbers = {id(row): str(number) if settings else "" for number, row in enumerate(front, start=1)}
    rings = {id(row): word for word, row in ringed}
    parts = [
        _panel(shown, numbers, rings, (across[0], upwards), 0, unit),
        _panel(shown, numbers, rings, (across[1], upwards), WIDTH, unit),
    ]
    for line, row in enumerate(front if settings else ()):
        label = ", ".join(f"{name}={row[name]}" for name in settings)
        parts.append(text(MARGIN, HEIGHT + 18 + 17 * line, f"{numbers[id(row)]}  {label}"))
    height = HEIGHT + (24 + 17 * len(front) if settings else 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" role="img" '
        f'aria-label="Pareto plot of {len(shown)} configurations, {len(front)} on the front" '
        f'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>"
    )


def tuning_html(tuning: Any) -> str:
    """HTML of a ``workbench.analysis.tune.Tuning``: its answer, a table of settings, and each setting as a point."""
    facts = tuning_facts(tuning)
    rows = [
        (one["words"], one["setting"], *(one["values"].get(name, "") for name in tuning.slo), one["flags"])
        for one in facts["candidates"]
    ]
    lines = [line for line in (facts["losers"], *facts["notes"]) if line]
    return fragment(
        f"<h4>{escape(facts['verdict'])}</h4>",
        table(("", "setting", *tuning.slo, "vLLM's flags"), rows),
        *(f"<p>{escape(line)}</p>" for line in dict.fromkeys(lines)),
        image(facts["picture"]),
    )


def tuning_facts(tuning: Any) -> dict[str, Any]:
    """A ``workbench.analysis.tune.Tuning`` as plain data, for the dashboard.

    Returns:
        ``verdict`` and ``losers`` as sentences, ``notes``, ``picture`` (an SVG) with its text ``alt``, and
        ``candidates``: the setting to take, the recorded one and the next ones, each with ``words``, ``setting``,
        ``values`` (by name of the target, with their intervals) and ``flags`` (of vLLM).
    """
    candidates = [
        {
            "words": words,
            "setting": ", ".join(f"{name}={value}" for name, value in candidate.changes.items()) or "as recorded",
            "values": candidate.shown_values(tuning.slo),
            "flags": candidate.flags,
        }
        for words, candidate in _named(tuning)
    ]
    losers = [f"{rid} ({before:.3g} s to {after:.3g} s)" for rid, before, after in tuning.losers[:3]]
    verdict = "; ".join(filter(None, (tuning.verdict_sentence, tuning.costs_sentence)))
    late = f"{counted(len(tuning.losers), 'request')} would end later than now: {', '.join(losers)}"
    return {
        "verdict": f"{candidates[0]['setting']}: {verdict}.",
        "losers": late if losers else "",
        "notes": [*tuning.notes, *tuning.best.prediction.notes],
        "picture": _tuning_svg(tuning),
        "alt": "Time to first token against inter-token latency and throughput, a point for each setting",
        "candidates": candidates,
    }


def _named(tuning: Any) -> list[tuple[str, Any]]:
    """The settings of an answer, with a word for each."""
    named = [(tuning.words_of_best, tuning.best)]
    if tuning.best is not tuning.current:
        named.append(("now", tuning.current))
    for number, candidate in enumerate(tuning.runners_up, start=2):
        named.append((f"{number}. (cannot tell)" if candidate.same_as_best else f"{number}.", candidate))
    return named


def _tuning_svg(tuning: Any) -> str:
    rows = [row for row in tuning.rows if not row.get("error")]
    ringed = []
    for words, candidate in _named(tuning):
        setting = {name: candidate.prediction.trace.config.get(name) for name in tuning.settings}
        row = next((row for row in rows if all(row[name] == value for name, value in setting.items())), None)
        if row is not None:
            ringed.append((words.partition(" ")[0], row))
    first, next_ = (
        next((name for name in tuning.slo if name.startswith(kinds)), other)
        for kinds, other in (("ttft", "ttft_mean"), (("itl", "tpot"), "itl_mean"))
    )
    values = [row[name] for row in rows for name in (first, next_) if row.get(name) is not None]
    return pareto_svg(
        rows,
        (),
        ringed,
        (next_, "output_throughput"),
        first,
        unit="s" if max(values, default=0.0) >= 1 else "ms",
    )


def _panel(
    rows: Sequence[Mapping[str, Any]],
    numbers: Mapping[int, str],
    rings: Mapping[int, str],
    axes: tuple[str, str],
    left: int,
    unit: str,
) -> str:
    """A point for each row, over the names of the horizontal and the vertical axis."""
    across, upwards = axes
    x_ticks, to_x = scale([_value(row, across, unit) for row in rows], left + MARGIN, left + WIDTH - 16)
    y_ticks, to_y = scale([_value(row, upwards, unit) for row in rows], HEIGHT - MARGIN, 16)
    parts = []
    for tick in x_ticks:
        parts.append(f'<path d="M{to_x(tick):.1f} 16V{HEIGHT - MARGIN}" stroke="{GRID}"/>')
        parts.append(text(to_x(tick), HEIGHT - MARGIN + 18, f"{tick:g}", "middle"))
    for tick in y_ticks:
        parts.append(f'<path d="M{left + MARGIN} {to_y(tick):.1f}H{left + WIDTH - 16}" stroke="{GRID}"/>')
        parts.append(text(left + MARGIN - 6, to_y(tick) + 4, f"{tick:g}", "end"))
    parts.append(text(left + (WIDTH + MARGIN) / 2, HEIGHT - 16, _title(across, unit), "middle"))
    middle = (HEIGHT - MARGIN) / 2
    turned = f"rotate(-90 {left + 14} {middle})"
    parts.append(f'<g transform="{turned}">{text(left + 14, middle, _title(upwards, unit), "middle")}</g>')
    taken: list[tuple[float, float, float, float]] = []
    edges = (left + MARGIN, left + WIDTH)
    for row in sorted(rows, key=lambda row: id(row) in numbers):  # the front is drawn last, on top
        x, y, number = to_x(_value(row, across, unit)), to_y(_value(row, upwards, unit)), numbers.get(id(row))
        if number is None:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="{POINT}"/>')
        else:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{FRONT}" stroke="{INK}"/>')
            parts.append(_label(x, y, number, taken, edges) if number else "")
        if (word := rings.get(id(row))) is not None:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{RING}" stroke-width="2"/>')
            parts.append(_label(x, y, word, taken, edges) if word else "")
    return "".join(parts)


def _label(
    x: float, y: float, word: str, taken: list[tuple[float, float, float, float]], edges: tuple[float, float]
) -> str:
    """A word beside a point, at the first of several places between the edges that no other word has.

    The place is added to ``taken``.
    """
    width = 7.0 * len(word)
    sides = (x + 12, x - 12 - width)
    places = [(side, y + down) for down in (-6, 14, -20, 28, 42) for side in sides]

    def free(place: tuple[float, float]) -> bool:
        left, base = place
        if not edges[0] <= left <= edges[1] - width:
            return False
        return all(left + width < x0 or left > x1 or base < y0 or base - 12 > y1 for x0, y0, x1, y1 in taken)

    left, base = next(filter(free, places), (min(places[0][0], edges[1] - width), places[0][1]))
    taken.append((left, base - 12, left + width, base))
    return text(left, base, word)


def _value(row: Mapping[str, Any], name: str, unit: str) -> float:
    return float(row[name]) * (1000.0 if name not in _COUNTS and unit == "ms" else 1.0)


def _title(name: str, unit: str) -> str:
    """The title of an axis, such as "P99 time to first token (s)"."""
    if name in _COUNTS:
        return _COUNTS[name]
    kind, _, which = name.rpartition("_")
    return f"{which.replace('p', 'P') if which != 'mean' else which} {_TIMES[kind]} ({unit})"


def scale(values: Sequence[float], begin: float, end: float) -> tuple[list[float], Callable[[float], float]]:
    """Round ticks around the values, and the function from a value to its coordinate."""
    low, high = min(values), max(values)
    if low > 0 and high / low > MOST_LINEAR:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        shown = [mark for mark in marks if low / 2.6 < mark < high * 2.6]
        span = math.log(shown[-1] / shown[0])
        return shown, lambda value: begin + math.log(value / shown[0]) / span * (end - begin)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - max(abs(low), 1.0) * 0.5, high + max(abs(high), 1.0) * 0.5
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    tick = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / tick), math.ceil(high / tick)
    ticks = [round(number * tick, 12) for number in range(first, last + 1)]
    return ticks, lambda value: begin + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (end - begin)


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """A text of an SVG; ``anchor`` says which part of it is at the place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(content)}</text>'
