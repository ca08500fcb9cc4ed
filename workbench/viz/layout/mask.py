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
        first_position: Position of its first row; row i may read up to position ``first_position + i``.
        window: Number of positions that a row may read, the last one included; 0 for all.
    """

    request_id: str
    is_decode: bool
    rows: range
    columns: range
    first_position: int
    window: int = 0

    @property
    def outline(self) -> list[tuple[float, float]]:
        """Corners (column, row) of the allowed pairs, clockwise from the upper left."""
        ends = [self.first_position + place + 1 for place in range(len(self.rows))]
        upper, *lower = self._edge([max(0, end - self.window) if self.window else 0 for end in ends])
        return [upper, *self._edge(ends), *reversed(lower)]

    def _edge(self, places: list[int]) -> list[tuple[float, float]]:
        """Corners (column, row) of an edge that has these places in its rows, downwards."""
        left, top, bottom = self.columns.start, self.rows.start, self.rows.stop
        if not any(places):
            return [(left, top), (left, bottom)]
        if len(places) <= MAX_STAIRS:
            return [(left + place, y) for row, place in zip(self.rows, places) for y in (row, row + 1)]
        straight = [(left, top + num)] if (num := places.count(0)) else []
        return [(left + places[0], top), *straight, (left + places[-1], bottom)]


def mask_bands(record: StepRecord) -> list[MaskBand]:
    """The bands of a step's mask, in packed order."""
    bands, row, column = [], 0, 0
    for chunk in record.chunks:
        rows, columns = range(row, row + chunk.num_tokens), range(column, column + chunk.num_kv)
        is_decode = chunk.arm == "decode"
        bands.append(MaskBand(chunk.request_id, is_decode, rows, columns, chunk.first_position, record.window))
        row, column = rows.stop, columns.stop
    return bands
