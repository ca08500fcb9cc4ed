"""The measured duration of each step of a trace, with the work before it.

In a recording of another engine the time between two steps was part of its work as long as it was busy: it read
arrivals and sent outputs then. The steps of Workbench's own Engine are called for by its user, whose pauses are not the
engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from workbench.trace import StepRecord, Trace
from workbench.trace.readings.compare import is_simulated

PAUSE_FACTOR = 10
"""A time between two steps this many times longer than the usual one is a pause of the engine, not work."""

MIN_PAUSE_SECONDS = 0.02
"""A shorter time between two steps is never taken for a pause."""


class MeasuredStep(NamedTuple):
    """A step with its duration.

    Attributes:
        record: The record.
        seconds: Its duration, and the time before it in which the engine was busy.
        pause: The time before it in which the engine stood still although it had work.
    """

    record: StepRecord
    seconds: float
    pause: float = 0.0


def measured_steps(trace: Trace) -> Iterator[MeasuredStep]:
    """The steps with chunks whose duration is known, in order.

    The first one, which compiles and warms up, is left out, unless the run was simulated.

    Args:
        trace: A trace with timings.
    """
    records = tuple(trace)
    gaps = [record.time - before.end if leaves_work(before) else None for before, record in pairwise(records)]
    counts_gaps = not trace.meta.source.startswith(("engine", "simulation"))
    longest_gap = _longest_gap(gaps) if counts_gaps else 0.0
    is_first = not is_simulated(trace)
    for record, gap in zip(records, [None, *gaps]):
        if record.chunks and (seconds := record.duration) > 0:
            pause = 0.0
            if gap is not None and gap <= longest_gap:
                seconds += gap
            elif gap is not None and counts_gaps:
                pause = gap
            if not is_first and seconds > 0:  # a damaged clock may run backwards
                yield MeasuredStep(record, seconds, pause)
            is_first = False


def leaves_work(record: StepRecord) -> bool:
    """Whether requests are left after a step, so that the engine begins the next one at once."""
    return len(record.running) + len(record.waiting) > len(record.finished)


def _longest_gap(gaps: Sequence[float | None]) -> float:
    """The longest time between two busy steps that counts as work, from the usual one."""
    busy = [max(0.0, gap) for gap in gaps if gap is not None]
    return max(MIN_PAUSE_SECONDS, PAUSE_FACTOR * median(busy)) if busy else 0.0
