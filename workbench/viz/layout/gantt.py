"""(b) Chunks of every request over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


@dataclass(frozen=True)
class GanttCell:
    """One chunk: a cell of height 1 in the row of its request, over [step, step + 1)."""

    row: int
    step: int
    num_tokens: int
    is_decode: bool
    num_recomputed: int


@dataclass(frozen=True)
class IdleSpan:
    """Steps [start, stop) in which a request was there but not running: a line in its row."""

    row: int
    start: int
    stop: int
    kind: Literal["waiting", "preempted"]


@dataclass(frozen=True)
class Gantt:
    """Rows are requests in order of arrival."""

    request_ids: tuple[str, ...]
    cells: tuple[GanttCell, ...]
    idle: tuple[IdleSpan, ...]


def gantt(trace: Trace) -> Gantt:
    """Cells and idle spans of all steps of a trace (or of a slice of one)."""
    row_of = {request_id: row for row, request_id in enumerate(trace.requests)}
    cells: list[GanttCell] = []
    idle: list[IdleSpan] = []
    idle_since: dict[str, tuple[int, Literal["waiting", "preempted"]]] = {}

    def close(request_id: str, step: int) -> None:
        start, kind = idle_since.pop(request_id, (step, "waiting"))
        if start < step:
            idle.append(IdleSpan(row_of[request_id], start, step, kind))

    for record in trace:
        for request_id in record.arrived:
            idle_since[request_id] = record.step, "waiting"
        for request_id in record.preempted:
            idle_since[request_id] = record.step, "preempted"
        for request_id in (*record.admitted, *record.resumed, *record.aborted):
            close(request_id, record.step)
        cells.extend(
            GanttCell(
                row_of[chunk.request_id], record.step, chunk.num_tokens, chunk.is_decode, chunk.num_recomputed_tokens
            )
            for chunk in record.chunks
        )
    if len(trace):
        for request_id in tuple(idle_since):
            close(request_id, trace[-1].step + 1)
    return Gantt(tuple(row_of), tuple(cells), tuple(idle))
