"""Two pictures that a lesson needs and no view of the engine draws: a matrix, and bars to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from workbench.viz.reprs import fragment

WIDTH = 560
LEFT = 120
MAX_CELLS = 40_000
"""Cells of a matrix that is drawn, one rectangle for each run of equal cells."""


@dataclass(frozen=True)
class Picture:
    """An inline SVG with a title.

    Attributes:
        title: What it shows.
        svg: The picture.
    """

    title: str
    svg: str

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def _repr_html_(self) -> str:
        return fragment(f"<h5>{escape(self.title)}</h5>", self.svg)


def matrix(
    values: np.ndarray, title: str, *, row_labels: Sequence[str] = (), column_starts: Sequence[int] = ()
) -> Picture:
    """A matrix in shades of one ink: empty is 0, full is the largest value.

    Args:
        values: [rows, columns], bool or non-negative numbers.
        title: What it shows.
        row_labels: A label per row; empty for none.
        column_starts: Columns at which a rule is drawn, such as ``cu_seqlens``.

    Raises:
        ValueError: Not a matrix, or one of more than MAX_CELLS cells.
    """
    shades = np.asarray(values, dtype=np.float64)
    if shades.ndim != 2 or shades.size == 0 or shades.size > MAX_CELLS:
        raise ValueError(f"values must have 2 dimensions and from 1 to {MAX_CELLS} cells, got shape {shades.shape}")
    num_rows, num_columns = shades.shape
    shades = np.round(shades / (shades.max() or 1.0), 2)
    left = LEFT if len(row_labels) else 1
    cell = min(16.0, (WIDTH - LEFT) / num_columns)
    high = max(min(cell, 16.0), 9.0 if len(row_labels) else 2.0)
    parts = []
    for y, row in enumerate(shades):
        if y < len(row_labels):
            parts.append(_text(left - 6, y * high + high * 0.75, row_labels[y], "end"))
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1), num_columns]
        for start, stop in pairwise(edges):
            ink = f'class="prefill" fill-opacity="{row[start]:.2f}"' if row[start] else 'class="free"'
            parts.append(_rect(left + start * cell, y * high, (stop - start) * cell, high - 0.5, ink))
    for start in column_starts:
        x = left + start * cell
        parts.append(f'<path d="M{x:.1f} 0V{num_rows * high:.1f}" class="cursor"/>')
    return Picture(title, _svg(num_rows * high + 2, title, parts))


def bars(values: Mapping[str, float], title: str, unit: str = "") -> Picture:
    """Horizontal bars from 0, with their numbers.

    Args:
        values: Number by label, none of them negative.
        title: What it shows.
        unit: Written behind each number.
    """
    top = max(values.values(), default=0.0) or 1.0
    parts = []
    for i, (label, value) in enumerate(values.items()):
        y = i * 20
        length = value / top * (WIDTH - LEFT - 130)
        parts.append(_text(LEFT - 6, y + 12, label, "end"))
        parts.append(_rect(LEFT, y + 2, length, 13, 'class="prefill"'))
        parts.append(_text(LEFT + length + 6, y + 12, f"{value:,.4g} {unit}".rstrip()))
    return Picture(title, _svg(20 * len(values) + 4, title, parts))


def _rect(x: float, y: float, width: float, height: float, ink: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {ink}/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="number" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(label, quote=True)}" style="max-width:100%;height:auto">{"".join(parts)}</svg>'
    )
