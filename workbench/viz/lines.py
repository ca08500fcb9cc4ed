"""Lines over one horizontal axis, as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.viz.drawing import GRID, INK, svg_file, text
from workbench.viz.layout.axis import Axis
from workbench.viz.pareto import HEIGHT, MARGIN, RIGHT, WIDTH

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def lines_svg(
    across: Sequence[float], lines: Mapping[str, Sequence[float]], titles: tuple[str, str], level: float | None = None
) -> str:
    """Draw lines with a point at each value, and their names at their ends.

    Args:
        across: Values on the horizontal axis, in order.
        lines: For each name as many values on the vertical axis.
        titles: Titles of the horizontal and the vertical axis.
        level: Value of a dashed line; None for none.
    """
    every = [value for line in lines.values() for value in line] + ([level] if level is not None else [])
    horizontal, vertical = Axis.around(across), Axis.around(every)

    def to_x(value: float) -> float:
        return horizontal.place(value, MARGIN, WIDTH - RIGHT)

    def to_y(value: float) -> float:
        return vertical.place(value, HEIGHT - MARGIN, 16)

    parts = []
    for tick, label in zip(horizontal.ticks, horizontal.numbers):
        parts.append(f'<path d="M{to_x(tick):.1f} 16V{HEIGHT - MARGIN}" stroke="{GRID}"/>')
        parts.append(text(to_x(tick), HEIGHT - MARGIN + 18, label, "middle"))
    for tick, label in zip(vertical.ticks, vertical.numbers):
        parts.append(f'<path d="M{MARGIN} {to_y(tick):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(text(MARGIN - 6, to_y(tick) + 4, label, "end"))
    if level is not None:
        parts.append(f'<path d="M{MARGIN} {to_y(level):.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="5 4"/>')
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in zip(across, line)]
        parts.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in points:
            x, y = point.split()
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
        at = HEIGHT + 18 + 17 * number
        parts.append(f'<path d="M{MARGIN} {at - 4}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(MARGIN + 32, at, name))
    parts.append(text((WIDTH + MARGIN) / 2, HEIGHT - 16, titles[0], "middle"))
    middle = (HEIGHT - MARGIN) / 2
    parts.append(f'<g transform="rotate(-90 14 {middle})">{text(14, middle, titles[1], "middle")}</g>')
    return svg_file(WIDTH, HEIGHT + 8 + 17 * len(lines), f"{titles[1]} over {titles[0]}: {', '.join(lines)}", parts)
