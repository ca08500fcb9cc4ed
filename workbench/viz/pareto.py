"""The Pareto plot of a sweep as an SVG: time to first token against inter-token latency and against throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from textwrap import wrap
from typing import Any

from workbench.base.text import settings_text
from workbench.viz.drawing import GRID, INK, svg_file, text
from workbench.viz.image import image
from workbench.viz.layout.pareto import ParetoMarks, ParetoPanel, pareto_marks, tuning_marks
from workbench.viz.reprs import fragment, table

WIDTH, HEIGHT, MARGIN = 440, 330, 58
RIGHT = 26
"""Room right of the last tick: half of a label such as "100,000"."""

KEY_CHARACTERS = 56
"""Maximum number of characters of a line below a panel."""

POINT, FRONT, RING = "#8a8f98", "#0072b2", "#d55e00"


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
        rows: Rows of ``workbench.analysis.sweep.sweep``; "idle" is the idle time that "output_throughput" leaves out.
        settings: Names of the columns that identify the configuration of a row; none to leave numbers and list out,
            for a picture beside a table with numbers.
        ringed: Rows to draw a ring around, with a word for each; "" for none.
        across: The horizontal axes of the panels.
        upwards: The vertical axis of both.
        unit: Of all times, "ms" or "s".

    Raises:
        ValueError: No row has all three results.
    """
    return _paint(pareto_marks(rows, settings, ringed, across, upwards, unit))


def _paint(marks: ParetoMarks, *notes: str) -> str:
    parts = [_panel(panel, WIDTH * place) for place, panel in enumerate(marks.panels)]
    lines = [*(f"{number}  {label}" for number, label in marks.front), *filter(None, notes)]
    parts += [text(MARGIN, HEIGHT + 18 + 17 * place, line) for place, line in enumerate(lines)]
    height = HEIGHT + (24 + 17 * len(lines) if lines else 0)
    label = f"Pareto plot of {marks.num_points} configurations, {marks.num_front} on the front"
    return svg_file(len(marks.panels) * WIDTH, height, label, parts)


def tuning_html(tuning: Any) -> str:
    """HTML of a ``workbench.analysis.tuning.Tuning``: its answer, and a table and a picture of its settings."""
    facts, marks = tuning_facts(tuning), tuning_marks(tuning)
    rows = [
        (one["words"], one["setting"], *(one["values"].get(name, "") for name in tuning.slo), one["flags"])
        for one in facts["candidates"]
    ]
    lines = [line for line in (facts["losers"], *facts["notes"]) if line]
    return fragment(
        f"<h4>{escape(facts['verdict'])}</h4>",
        f"<p>{escape(facts['costs'])}</p>" if facts["costs"] else "",
        table(("", "setting", *tuning.slo, "vLLM's flags"), rows),
        *(f"<p>{escape(line)}</p>" for line in dict.fromkeys(lines)),
        image(_paint(marks, *wrap(facts["key"], KEY_CHARACTERS * len(marks.panels)))),
    )


def tuning_facts(tuning: Any) -> dict[str, Any]:
    """A ``workbench.analysis.tuning.Tuning`` as plain data, for the dashboard.

    Returns:
        ``verdict``, ``costs`` and ``losers`` as sentences, ``notes`` (the error of the predictions first), ``pictures``
        (an SVG for each panel) with their text ``alt`` and the ``key`` of their marks, and ``candidates``: the setting
        to take, the recorded one and the next ones, each with ``words``, ``setting``, ``values`` (by name of the
        target, with their intervals) and ``flags`` (of vLLM). The pictures have these settings, with the same values.
    """
    candidates = [
        {
            "words": f"{words} (cannot tell from the first)" if candidate.same_as_best else words,
            "setting": settings_text(candidate.changes) or "as recorded, predicted",
            "values": tuning.shown_values(candidate),
            "flags": candidate.flags,
        }
        for words, candidate in tuning.named
    ]
    marks = tuning_marks(tuning)
    goals = [*(name for name in tuning.slo if name != "output_throughput"), "output_throughput"]
    listed = " and ".join(filter(None, (", ".join(goals[:-1]), goals[-1])))
    key = f"Filled: no other setting here is at least as good in {listed}."
    key += " Dashed: the target." if any({*panel.limits} != {None} for panel in marks.panels) else ""
    return {
        "verdict": f"{settings_text(tuning.best.changes) or 'The recorded setting'}: {tuning.verdict_sentence}.",
        "costs": _sentence(tuning.costs_sentence),
        "losers": tuning.losers_sentence,
        "notes": [
            _sentence(note) for note in (tuning.errors_sentence, *tuning.notes, *tuning.notes_of_candidates) if note
        ],
        "pictures": [_paint(replace(marks, panels=[panel])) for panel in marks.panels],
        "key": key,
        "alt": f"The target against throughput, of the settings of the table. {key}",
        "candidates": candidates,
    }


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}".removesuffix(".") + "." if text else ""


def _panel(panel: ParetoPanel, left: int) -> str:
    """One panel, ``left`` units from the left edge of the picture."""
    across, upwards = panel.axes

    def to_x(value: float) -> float:
        return across.place(value, left + MARGIN, left + WIDTH - RIGHT)

    def to_y(value: float) -> float:
        return upwards.place(value, HEIGHT - MARGIN, 16)

    parts = []
    for tick, label in zip(across.ticks, across.numbers):
        parts.append(f'<path d="M{to_x(tick):.1f} 16V{HEIGHT - MARGIN}" stroke="{GRID}"/>')
        parts.append(text(to_x(tick), HEIGHT - MARGIN + 18, label, "middle"))
    for tick, label in zip(upwards.ticks, upwards.numbers):
        parts.append(f'<path d="M{left + MARGIN} {to_y(tick):.1f}H{left + WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(text(left + MARGIN - 6, to_y(tick) + 4, label, "end"))
    parts.append(text(left + (WIDTH + MARGIN) / 2, HEIGHT - 16, panel.titles[0], "middle"))
    of_x, of_y = panel.limits
    lines = [f"M{to_x(of_x):.1f} 16V{HEIGHT - MARGIN}"] if of_x is not None else []
    lines += [f"M{left + MARGIN} {to_y(of_y):.1f}H{left + WIDTH - RIGHT}"] if of_y is not None else []
    parts += [f'<path d="{line}" stroke="{INK}" stroke-dasharray="5 3"/>' for line in lines]
    middle = (HEIGHT - MARGIN) / 2
    turned = f"rotate(-90 {left + 12} {middle})"
    parts.append(f'<g transform="{turned}">{text(left + 12, middle, panel.titles[1], "middle")}</g>')
    # A word lies over no point and over no other word.
    taken = [
        (to_x(point.x) - radius, to_y(point.y) - radius, to_x(point.x) + radius, to_y(point.y) + radius)
        for point in panel.points
        for radius in (9 if point.ring is not None else 4,)
    ]
    edges = (left + MARGIN, left + WIDTH)
    sets_apart = any(point.ring is None for point in panel.points)  # a ring around every point says nothing
    for point in panel.points:
        x, y = to_x(point.x), to_y(point.y)
        if point.number is None:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="{POINT}"/>')
        else:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{FRONT}" stroke="{INK}"/>')
        if point.ring is not None and sets_apart:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{RING}" stroke-width="2"/>')
        parts += [_label(x, y, word, taken, edges) for word in (point.number, point.ring) if word]
    return "".join(parts)


def _label(
    x: float, y: float, word: str, taken: list[tuple[float, float, float, float]], edges: tuple[float, float]
) -> str:
    """A word beside a point, at the first of several places between the edges that no other word has.

    The place is added to ``taken``.
    """
    width = 7.0 * len(word)
    sides = (x + 12, x - 12 - width)
    places = [(side, y + down) for down in (-6, 14, -20, 28, -34, 42, -48, 56) for side in sides]

    def free(place: tuple[float, float]) -> bool:
        left, base = place
        if not edges[0] <= left <= edges[1] - width or not 12 <= base <= HEIGHT - MARGIN:
            return False
        return all(left + width < x0 or left > x1 or base < y0 or base - 12 > y1 for x0, y0, x1, y1 in taken)

    left, base = next(filter(free, places), (min(places[0][0], edges[1] - width), places[0][1]))
    taken.append((left, base - 12, left + width, base))
    return text(left, base, word)
