"""(d) The packed batch: query rows side by side, each sequence against its own KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.trace.records import Arm, LimitedBy, StepRecord


@dataclass(frozen=True)
class PackedRow:
    """One sequence of a packed batch.

    Its query rows are [q_start, q_end) of the batch; they sit at the positions [kv_start, kv_end) of the sequence,
    and row ``i`` sees the KV positions [first_visible(i), kv_start + i + 1).

    Attributes:
        seq: Index in the batch.
        request_id: The request.
        arm: How the chunk is handled; "decode" is drawn as a marker instead of a trapezoid.
        q_start: First query row.
        q_end: One past the last query row.
        kv_start: KV positions that were in the cache before the step.
        kv_end: KV positions after the step.
        num_recomputed: Tokens of the chunk that had been computed before a preemption.
        limited_by: Why the chunk is not longer.
        window: Sliding window of the layer, 0 for full attention.
    """

    seq: int
    request_id: str
    arm: Arm
    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    num_recomputed: int
    limited_by: LimitedBy
    window: int = 0

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
        """Rows and KV range in words."""
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        return f"q[{self.q_start}, {self.q_end})  {rows}  kv {self.kv_start} → {self.kv_end}"

    def visible(self) -> np.ndarray:
        """The exact q x kv rectangle: True where a row may attend, bool [num_rows, kv_end]."""
        rows = np.arange(self.kv_start, self.kv_end)[:, None]
        keys = np.arange(self.kv_end)[None, :]
        causal = keys <= rows
        return causal & (keys > rows - self.window) if self.window > 0 else causal


def packed_rows(record: StepRecord, window: int | None = None) -> list[PackedRow]:
    """The sequences of a step in packed order.

    Args:
        record: The step.
        window: Sliding window to draw, 0 for none; by default that of the model's first layer, where the step
            recorded a kernel launch.
    """
    if window is None:
        window = max(0, record.kernel.windows[0]) if record.kernel and record.kernel.windows else 0
    bounds = record.cu_seqlens_q
    return [
        PackedRow(
            seq=seq,
            request_id=chunk.request_id,
            arm=chunk.arm,
            q_start=bounds[seq],
            q_end=bounds[seq + 1],
            kv_start=chunk.start,
            kv_end=chunk.end,
            num_recomputed=chunk.num_recomputed_tokens,
            limited_by=chunk.limited_by,
            window=window,
        )
        for seq, chunk in enumerate(record.chunks)
    ]


def block_diagonal_mask(rows: Sequence[PackedRow]) -> np.ndarray:
    """The mask of the whole batch, bool [T, total_kv], put together from the rectangles of its sequences."""
    mask = np.zeros((sum(row.num_rows for row in rows), sum(row.kv_end for row in rows)), dtype=bool)
    column = 0
    for row in rows:
        mask[row.q_start : row.q_end, column : column + row.kv_end] = row.visible()
        column += row.kv_end
    return mask


@dataclass(frozen=True)
class Segment:
    """A piece of the readable ribbon, in pixels; ``broken`` where it is shorter than its share of the true scale."""

    x0: float
    x1: float
    broken: bool


def readable_scale(sizes: Sequence[int], width: float, least: float) -> list[Segment]:
    """Widths for segments of very different sizes, so that each can be read.

    Every segment gets ``least`` pixels (an equal share where there is no room for that); the rest is divided in
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
