"""The norms of the heads of packed rows, as shades of a picture."""

from __future__ import annotations

from typing import NamedTuple

from workbench.base.on_demand import np

MOST_COLUMNS = 256
"""Maximum number of columns of a picture of norms. When rows share a column, it shows the largest of their norms."""


class NormMarks(NamedTuple):
    """A picture of norms.

    Attributes:
        num_rows: Number of packed rows.
        least: The smallest norm.
        most: The largest norm.
        shades: uint8 [heads, columns], 0 for ``least`` and 255 for ``most``, with a column for each row or for
            neighbouring rows. NaN and infinity count as 0.
    """

    num_rows: int
    least: float
    most: float
    shades: np.ndarray


def norm_marks(norms: np.ndarray) -> NormMarks:
    """The picture of norms [num_rows, heads]."""
    num_rows = len(norms)
    columns = min(num_rows, MOST_COLUMNS)
    norms = np.nan_to_num(norms, nan=0.0, posinf=0.0)
    shown = np.maximum.reduceat(norms, np.arange(columns) * num_rows // columns, axis=0)
    least, most = float(norms.min()), float(norms.max())
    return NormMarks(
        num_rows, least, most, np.round(255 * (shown.T - least) / ((most - least) or 1.0)).astype(np.uint8)
    )
