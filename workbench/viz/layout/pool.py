"""The KV pool as an image with a fixed cell for each physical block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from workbench.base.on_demand import np
from workbench.trace.readings.pool_state import FREE, OWNED, PoolState
from workbench.trace.records import StepRecord

FIRST_FOCUS = 4
"""Value of the cells of the request in focus slot 0; slot n has FIRST_FOCUS + n. Smaller values are block states."""


def pool_columns(num_blocks: int) -> int:
    """Number of columns of the image: a power of two that keeps the image nearly square."""
    columns = 32
    while columns * columns < num_blocks and columns < 512:
        columns *= 2
    return columns


LARGE, LEAST_SHOWN = 2048, 256
"""Blocks from which a pool is large, and the least of its blocks that a picture shows."""


def num_shown(state: PoolState) -> int:
    """Number of blocks in a picture of one moment: of a large pool those up to the last that is not free.

    The dashboard counts the used blocks of the whole run instead, because its picture keeps its size.
    """
    if state.num_blocks < LARGE:
        return state.num_blocks
    used, shown = int(np.flatnonzero(state.state != FREE).max(initial=0)), LEAST_SHOWN
    while shown <= used:
        shown *= 2
    return min(shown, state.num_blocks)


def pool_image(state: PoolState, focus: Sequence[str] = (), size: int | None = None) -> np.ndarray:
    """State of every block, row-major by block id, uint8 [rows, columns].

    Args:
        state: The pool.
        focus: Request ids that are drawn in colour, by slot.
        size: Number of blocks from the first; None for all.

    Returns:
        RESERVED, FREE, CACHED, OWNED or FIRST_FOCUS + slot; cells beyond the last block are RESERVED (0).
    """
    cells = state.state[:size].copy()
    index = {request_id: i for i, request_id in enumerate(state.request_ids)}
    for slot, request_id in enumerate(focus):
        cells[(cells == OWNED) & (state.owner[:size] == index.get(request_id, -2))] = FIRST_FOCUS + slot
    columns = pool_columns(len(cells))
    image = np.zeros(-(-len(cells) // columns) * columns, np.uint8)
    image[: len(cells)] = cells
    return image.reshape(-1, columns)


class Span(NamedTuple):
    """Neighbouring blocks in a row of the image that are in the same state.

    Attributes:
        row: Row of the image.
        column: Column of the first block.
        first: Id of the first block.
        last: Id of the last block.
        kind: "reserved", "free", "cached", "owned", or "focus" for blocks of a request in focus.
        slot: Slot of that request; -1 for none.
    """

    row: int
    column: int
    first: int
    last: int
    kind: str
    slot: int = -1


KINDS = ("reserved", "free", "cached", "owned")
"""The states of a block, by their value in the image."""


def pool_spans(state: PoolState, focus: Sequence[str] = (), size: int | None = None) -> list[Span]:
    """The blocks of the pool as spans, row by row; arguments as in `pool_image`."""
    image = pool_image(state, focus, size)
    columns, num_blocks = image.shape[1], state.num_blocks if size is None else size
    spans = []
    for y, row in enumerate(image):
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), columns]
        for start, stop in pairwise(edges):
            first, last = y * columns + start, min(y * columns + stop, num_blocks) - 1
            if first >= num_blocks:
                continue
            value = int(row[start])
            kind = KINDS[value] if value < FIRST_FOCUS else "focus"
            spans.append(Span(y, start, first, last, kind, max(value - FIRST_FOCUS, -1)))
    return spans


class BlockCell(NamedTuple):
    """A block of a table.

    Attributes:
        place: Its place in the picture, where one place stands for all that are left out.
        logical: Its index in the table.
        block: Its physical id; 0 for a place that is not held.
        filled: Share of its slots that are filled; 1 if it is not known.
        is_new: Whether this step added it.
    """

    place: int
    logical: int
    block: int
    filled: float
    is_new: bool


TAIL = 8
"""Blocks at the end of a table that is cut."""


@dataclass(frozen=True)
class BlockTableRow:
    """The block table of one sequence.

    Attributes:
        request_id: The request.
        block_ids: Physical ids in logical order, 0 for a place that is not held.
        num_kv: KV positions of the sequence; None in a group whose slots the record does not show.
        block_size: Slots per block.
        num_new: Number of blocks added in this step.
        group: Index of the KV cache group.
    """

    request_id: str
    block_ids: tuple[int, ...]
    num_kv: int | None
    block_size: int
    num_new: int
    group: int = 0

    def filled(self, logical: int) -> int | None:
        """Number of filled slots of a block, None if it is not known. Blocks for drafts that may come are empty."""
        if self.num_kv is None:
            return None
        return max(0, min(self.block_size, self.num_kv - logical * self.block_size))

    def cells(self, most: int) -> list[BlockCell]:
        """The blocks at ``most`` places. A longer table is cut in the middle, because a step changes its end."""
        num_blocks = len(self.block_ids)
        head = num_blocks if num_blocks <= most else most - TAIL - 1
        shown = [*range(head), *range(max(head, num_blocks - TAIL), num_blocks)]
        cells = []
        for place, logical in enumerate(shown):
            used = self.filled(logical)
            filled = 1.0 if used is None else used / self.block_size
            is_new = logical >= num_blocks - self.num_new
            cells.append(BlockCell(place + (place >= head), logical, self.block_ids[logical], filled, is_new))
        return cells


def block_table_rows(record: StepRecord) -> list[BlockTableRow]:
    """Block tables of the scheduled requests, in scheduling order, each with those of all KV cache groups."""
    rows = []
    shown_group, size = record.layout[:2] if record.chunks else (None, 0)
    for index, chunk in enumerate(record.chunks):
        new = [chunk.new_block_ids, *(change.new_block_ids for change in chunk.other_groups)]
        for group in range(record.num_groups):
            table = tuple(record.block_table(index, group))
            num_new = len(new[group]) if group < len(new) else 0
            num_kv = chunk.num_kv if table and group == shown_group else None
            rows.append(BlockTableRow(chunk.request_id, table, num_kv, size, num_new, group))
    return rows
