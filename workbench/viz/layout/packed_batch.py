"""The packed batch: the query rows of all sequences, each drawn against the KV of its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.trace.records import Arm, LimitedBy, StepRecord


@dataclass(frozen=True)
class PackedRow:
    """One sequence of a packed batch.

    Its query rows are [q_start, q_end) of the batch; they sit at the positions [kv_start, kv_end) of the sequence.

    Attributes:
        request_id: The request.
        arm: The role of the chunk; "decode" is drawn as a marker instead of a trapezoid.
        q_start: First query row.
        q_end: One past the last query row.
        kv_start: Position of the first row, without the rejected drafts that ``num_kv_computed`` still counts.
        kv_end: One past the position of the last row.
        kv_seen: The first position that any of its rows may read.
        limited_by: Why the chunk is not longer.
    """

    request_id: str
    arm: Arm
    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    kv_seen: int
    limited_by: LimitedBy

    @property
    def num_rows(self) -> int:
        """Query rows of the sequence."""
        return self.q_end - self.q_start

    @property
    def trapezoid(self) -> tuple[tuple[int, int], ...]:
        """Corners (kv position, query row of the sequence) of the new rows against the new positions."""
        return (
            (self.kv_start, 0),
            (self.kv_start + 1, 0),
            (self.kv_end, self.num_rows),
            (self.kv_start, self.num_rows),
        )

    @property
    def label(self) -> str:
        """Rows and KV range as text."""
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        return f"q[{self.q_start}, {self.q_end})  {rows}  kv {self.kv_start} → {self.kv_end}"


def packed_rows(record: StepRecord) -> list[PackedRow]:
    """The sequences of a step in packed order."""
    bounds, window = record.cu_seqlens_q, record.window
    return [
        PackedRow(
            request_id=chunk.request_id,
            arm=chunk.arm,
            q_start=bounds[seq],
            q_end=bounds[seq + 1],
            kv_start=chunk.first_position,
            kv_end=chunk.num_kv,
            kv_seen=max(0, chunk.first_position - window + 1) if window else 0,
            limited_by=chunk.limited_by,
        )
        for seq, chunk in enumerate(record.chunks)
    ]


@dataclass(frozen=True)
class Segment:
    """A piece of the readable ribbon, in pixels; ``broken`` if it is shorter than its share of the true scale."""

    x0: float
    x1: float
    broken: bool


def readable_scale(sizes: Sequence[int], width: float, least: float) -> list[Segment]:
    """Widths that keep segments of very different sizes readable.

    Every segment gets ``least`` pixels (an equal share if the width is too small for that); the rest is divided in
    proportion to the sizes. ``js/geometry.js`` has the same function; a browser test compares the two.
    """
    total = sum(sizes)
    if total <= 0:
        return []
    floor = min(least, width / len(sizes))
    rest = width - floor * len(sizes)
    segments = []
    x = 0.0
    for size in sizes:
        wide = floor + rest * size / total
        segments.append(Segment(x, x + wide, wide < width * size / total - 1e-9))
        x += wide
    return segments
