"""Two pictures for lessons that no view of the engine draws: a matrix, and bars to compare numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from workbench.base.on_demand import np
from workbench.viz import svg
from workbench.viz.image import image
from workbench.viz.reprs import fragment

WIDTH = 560
LEFT = 120
COLUMN_LABEL_HEIGHT = 96
MAX_LABEL = 14
"""Maximum number of characters of a label."""
MAX_BAR_LABEL = 36
"""Maximum number of characters beside a bar; a character is CHARACTER wide."""
CHARACTER = 6.7
"""Maximum width of a character of the fonts of numbers in pixels; DejaVu Sans Mono has 6.6."""
MAX_CELLS = 40_000
"""Maximum number of cells of a matrix. Each run of equal cells in a row is one rectangle."""


@dataclass(frozen=True)
class Picture:
    """A drawing with a title.

    Attributes:
        title: Title of the picture.
        svg: The SVG element.
    """

    title: str
    svg: str

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def _repr_html_(self) -> str:
        return fragment(f"<h5>{escape(self.title)}</h5>", image(self.svg))


SMALLEST_WITH_LINES = 4.0
"""Width and height of cells, in pixels, from which on lines are drawn between them, in both directions."""


def matrix(
    values: np.ndarray,
    title: str,
    *,
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
    column_starts: Sequence[int] = (),
) -> Picture:
    """A matrix in shades of one colour: 0 is empty, the largest value is full.

    Args:
        values: [rows, columns], bool or non-negative numbers.
        title: Title of the picture.
        row_labels: A label per row, such as the text of its token; empty for no labels.
        column_labels: A label per column, written upwards. Narrow columns leave no room, and only some are written.
        column_starts: Columns at whose left edge a line is drawn, such as ``cu_seqlens``.

    Raises:
        ValueError: The values are not a matrix, or have no cells or more than MAX_CELLS.
    """
    shades: np.ndarray = np.asarray(values, dtype=np.float64)
    if shades.ndim != 2 or shades.size == 0 or shades.size > MAX_CELLS:
        raise ValueError(f"values must have 2 dimensions and from 1 to {MAX_CELLS} cells, got shape {shades.shape}")
    num_rows, num_columns = shades.shape
    shades = np.round(shades / (shades.max() or 1.0), 2)
    left = LEFT if len(row_labels) else 1
    cell = min(16.0, (WIDTH - LEFT) / num_columns)
    high = max(min(cell, 16.0), 11.0 if len(row_labels) else 2.0)
    top = COLUMN_LABEL_HEIGHT if len(column_labels) else 0
    every = 1 if cell >= 9 else math.ceil(20 / cell)
    parts = [
        _upwards(left + (x + 0.5) * cell, top - 4, _visible(label))
        for x, label in enumerate(column_labels[:num_columns])
        if x % every == 0
    ]
    wide, tall = num_columns * cell, num_rows * high
    parts.append(_rect(left, top, wide, tall, 'class="free"'))
    for y, row in enumerate(shades):
        if y < len(row_labels):
            parts.append(svg.text(left - 6, top + y * high + high * 0.75, _visible(row_labels[y]), "number", "end"))
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1), num_columns]
        for start, stop in pairwise(edges):
            if row[start]:
                ink = f'class="prefill" fill-opacity="{row[start]:.2f}"'
                parts.append(_rect(left + start * cell, top + y * high, (stop - start) * cell, high, ink))
    if min(cell, high) >= SMALLEST_WITH_LINES:
        across = "".join(f"M{left} {top + y * high:.1f}h{wide:.1f}" for y in range(1, num_rows))
        down = "".join(f"M{left + x * cell:.1f} {top}v{tall:.1f}" for x in range(1, num_columns))
        parts.append(f'<path d="{across}{down}" class="slack"/>')
    for start in column_starts:
        x = left + start * cell
        parts.append(f'<path d="M{x:.1f} {top}V{top + tall:.1f}" class="cursor"/>')
    return Picture(title, svg.drawing(top + tall + 2, title, parts, WIDTH))


def bars(values: Mapping[str, float], title: str, unit: str = "") -> Picture:
    """Horizontal bars from 0, each with its number.

    Args:
        values: Non-negative numbers by label.
        title: Title of the picture.
        unit: Unit, written after each number; a word in the plural, such as "steps", loses its "s" after 1.
    """
    top = max(values.values(), default=0.0) or 1.0
    labels, parts = [svg.shorten(label, MAX_BAR_LABEL) for label in values], []
    left = max(LEFT, 8 + CHARACTER * max(map(len, labels), default=0))
    for i, (label, value) in enumerate(zip(labels, values.values())):
        y = i * 20
        length = value / top * (WIDTH - left - 130)
        parts.append(svg.text(left - 6, y + 12, label, "number", "end"))
        parts.append(_rect(left, y + 2, length, 13, 'class="prefill"'))
        shown = unit.removesuffix("s") if value == 1 and len(unit) > 2 else unit
        parts.append(svg.text(left + length + 6, y + 12, f"{value:,.4g} {shown}".rstrip(), "number"))
    return Picture(title, svg.drawing(20 * len(values) + 4, title, parts, WIDTH))


def _visible(label: str) -> str:
    """A label without the blanks around a word; a token of blanks alone is named by its escapes."""
    return svg.shorten(label.strip() or repr(label)[1:-1], MAX_LABEL)


def _upwards(x: float, y: float, label: str) -> str:
    """A label that begins at a point and is written upwards."""
    return f'<g transform="translate({x + 3:.1f} {y:.1f}) rotate(-90)">{svg.text(0, 0, label, "number")}</g>'


def _rect(x: float, y: float, width: float, height: float, ink: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {ink}/>'
