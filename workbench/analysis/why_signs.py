"""Signs of trouble at the end of a record: its pace, steps that schedule nothing, and requests that begin again."""

from __future__ import annotations

from workbench.trace import Trace
from workbench.trace.readings.metrics import percentile

RECENT_STEPS = 200
"""Latest steps whose durations are the usual ones."""


def usual_step(trace: Trace) -> tuple[float | None, float]:
    """The median and a high percentile of the durations of the latest steps; None without a clock."""
    durations = sorted(record.duration for record in trace.steps[-RECENT_STEPS:] if record.chunks)
    if not durations or not durations[-1]:
        return None, 0.0
    return percentile(durations, 50), percentile(durations, 99)


def still_steps(trace: Trace) -> int:
    """Number of last steps that schedule nothing."""
    count = 0
    for record in reversed(trace.steps):
        if record.chunks:
            break
        count += 1
    return count


def circling_requests(trace: Trace) -> tuple[str, ...]:
    """Requests that begin again and again at the end of a trace, while no request gets a token or ends."""
    starts: dict[str, int] = {}
    before: dict[str, int] = {}
    for record in reversed(trace.steps):
        if record.finished or any(chunk.sampled is not None for chunk in record.chunks):
            break
        for chunk in record.chunks:  # in reverse: a start beyond a later one
            if before.get(chunk.request_id, chunk.start) < chunk.start:
                starts[chunk.request_id] = starts.get(chunk.request_id, 0) + 1
            before[chunk.request_id] = chunk.start
    return tuple([request_id for request_id, count in starts.items() if count >= 2])
