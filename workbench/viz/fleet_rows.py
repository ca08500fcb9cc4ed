"""Replicas as rows of one time axis, as an SVG: what each runs, what waits there, and what its KV pool holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.base.text import counted, duration, significant
from workbench.trace import Trace
from workbench.viz.drawing import GRID, NEUTRAL, svg_file, text
from workbench.viz.layout.axis import Axis
from workbench.viz.layout.fleet import BINS, FleetRows, fleet_rows, idle_time

WIDTH, ROW, LEFT, RIGHT = 900, 56, 110, 46
HALF = 360
"""Width of one picture of two that stand side by side."""

RUNNING, WAITING, KV, CACHED, WAY = "#0072b2", "#e69f00", NEUTRAL, "#009e73", "#d55e00"


def fleet_svg(traces: Mapping[str, Trace], request_id: str = "") -> str:
    """Draw a row for each replica; the way of one request is framed.

    Args:
        traces: Runs by name. The clock of the one that began first is the picture's.
        request_id: A request to show from its first to its last step, on each replica that ran it; "" for none.

    Raises:
        ValueError: No trace has a step, or the request is in none.
    """
    return _drawn(fleet_rows(traces, request_id), WIDTH, request_id)


def fleet_svgs(sides: Sequence[Mapping[str, Trace]], unit: str = "s") -> list[str]:
    """Draw one fleet, or several as narrow pictures with the same axes, so that they can be compared.

    Args:
        sides: The replicas of each fleet by name.
        unit: The word for a unit of the clock: "s", or "steps" if each second is a step.

    Raises:
        ValueError: No trace has a step.
    """
    marks = fleet_rows({f"{side} {name}": trace for side, each in enumerate(sides) for name, trace in each.items()})
    left = iter(marks.rows)
    named = [[replace(next(left), name=name) for name in each] for each in sides]
    return [
        _drawn(replace(marks, rows=rows, idle=idle_time(side)), WIDTH if len(sides) == 1 else HALF, unit=unit)
        for side, rows in zip(sides, named)
    ]


def _drawn(marks: FleetRows, width: int, request_id: str = "", unit: str = "s") -> str:
    axis = marks.axis if unit == "s" else Axis.until(marks.end)

    def to_x(seconds: float) -> float:
        return axis.place(seconds, LEFT, width - RIGHT)

    bottom = 20 + (ROW + 8) * len(marks.rows)
    parts = []
    labels = axis.labels if unit == "s" else [f"{label} {unit}" for label in axis.numbers]
    for tick, label in zip(axis.ticks, labels):
        parts.append(f'<path d="M{to_x(tick):.1f} 20V{bottom}" stroke="{GRID}"/>')
        parts.append(text(to_x(tick), bottom + 16, label, "middle"))
    places = [to_x(marks.end * place / BINS) for place in range(BINS + 1)]
    for number, row in enumerate(marks.rows):
        top = 20 + (ROW + 8) * number
        parts.append(text(8, top + 24, row.name))
        parts.append(text(8, top + 40, counted(row.num_requests, "request")))
        parts += [text(LEFT - 6, top + 10, f"{marks.most}", "end"), text(LEFT - 6, top + ROW, "0", "end")]
        parts += [text(width - RIGHT + 6, top + 10, "100%"), text(width - RIGHT + 6, top + ROW, "0%")]
        for colour, counts in (
            (WAITING, [part.running + part.waiting for part in row.parts]),
            (RUNNING, [part.running for part in row.parts]),
        ):
            heights = [top + ROW * (1 - count / marks.most) for count in counts]
            parts.append(_area(places, heights, top + ROW, colour))
        for colour, dashes, shares in (
            (CACHED, ' stroke-dasharray="4 3"', [part.filled for part in row.parts]),
            (KV, "", [part.used for part in row.parts]),
        ):
            line = "L".join(f"{x:.1f} {top + ROW * (1 - share):.1f}" for x, share in zip(places, shares))
            parts.append(f'<path d="M{line}" fill="none" stroke="{colour}"{dashes}/>')
        if row.way is not None:
            x, right = map(to_x, row.way)
            frame = f'x="{x:.1f}" y="{top}" width="{max(right - x, 2):.1f}" height="{ROW}"'
            parts.append(f'<rect {frame} fill="none" stroke="{WAY}" stroke-width="2"/>')
    legend = [(RUNNING, "running requests"), (WAITING, "waiting"), (KV, "KV blocks in use, %")]
    legend += [(CACHED, "with those kept in the prefix cache")]
    legend += [(WAY, f"the way of {request_id}")] if request_id else []
    x, y = LEFT, bottom + 26
    for colour, word in legend:
        if x + 18 + 6 * len(word) > width and x > LEFT:
            x, y = LEFT, y + 18
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, y + 10, word))
        x += 48 + 6 * len(word)
    if marks.idle and unit == "s":
        parts.append(text(LEFT, 12, f"time, with {duration(marks.idle)} idle"))
    length = duration(marks.end) if unit == "s" else f"{significant(marks.end, 4)} {unit}"
    label = f"{len(marks.rows)} replicas over {length}; the highest row has {marks.most} requests"
    return svg_file(width, y + 20, label, parts)


def _area(places: Sequence[float], heights: Sequence[float], base: float, colour: str) -> str:
    steps = "".join(f"V{y:.1f}H{right:.1f}" for y, right in zip(heights, places[1:]))
    return f'<path d="M{places[0]:.1f} {base}{steps}V{base}Z" fill="{colour}"/>'
