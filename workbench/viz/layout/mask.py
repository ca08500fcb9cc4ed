"""The attention mask of a step, as one band for each sequence: the rows of its chunk against its KV."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.trace.records import StepRecord

MAX_STAIRS = 64
"""Rows of a band up to which its edge is drawn as stairs; beyond, a straight line differs by less than a pixel."""


@dataclass(frozen=True)
class MaskBand:
    """The part of the mask that belongs to one sequence. Nothing else in its rows or columns is allowed.

    Attributes:
        request_id: The request.
        is_decode: Its only row is a decode.
        rows: Its rows of the packed batch.
        columns: Its KV positions in the columns of the whole mask.
        first_position: Position of its first row; row i may read its positions 0 to ``first_position + i``.
    """

    request_id: str
    is_decode: bool
    rows: range
    columns: range
    first_position: int

    @property
    def outline(self) -> list[tuple[float, float]]:
        """Corners (column, row) of the allowed pairs, clockwise from the upper left."""
        left, top, bottom = self.columns.start, self.rows.start, self.rows.stop
        corners: list[tuple[float, float]] = [(left, top)]
        if len(self.rows) <= MAX_STAIRS:
            for place, row in enumerate(self.rows):
                end = left + self.first_position + place + 1
                corners += [(end, row), (end, row + 1)]
        else:
            corners += [(left + self.first_position + 1, top), (self.columns.stop, bottom)]
        return [*corners, (left, bottom)]


def mask_bands(record: StepRecord) -> list[MaskBand]:
    """The bands of a step's mask, in packed order."""
    bands, row, column = [], 0, 0
    for chunk in record.chunks:
        rows, columns = range(row, row + chunk.num_tokens), range(column, column + chunk.num_kv)
        bands.append(MaskBand(chunk.request_id, chunk.arm == "decode", rows, columns, chunk.first_position))
        row, column = rows.stop, columns.stop
    return bands
