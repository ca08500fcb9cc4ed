"""The measured duration of each step of a trace, with the work before it.

In a recording of another engine the time between two steps was part of its work as long as it was busy: it read
arrivals and sent outputs then. The steps of Workbench's own Engine are called for by its user, whose pauses are not the
engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from workbench.trace import StepRecord, Trace

PAUSE_FACTOR = 10
"""A time between two steps this many times longer than the usual one is a pause of the engine, not work."""

MIN_PAUSE_SECONDS = 0.02
"""A shorter time between two steps is never taken for a pause."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step with its duration.

    Attributes:
        record: The record.
        seconds: Its duration, and the time before it in which the engine was busy.
        pause: The time before it in which the engine stood still although it had work.
    """

    record: StepRecord
    seconds: float
    pause: float = 0.0


def measured_steps(trace: Trace) -> list[MeasuredStep]:
    """The steps with chunks whose duration is known, in order; the first one, which compiles and warms up, is left out.

    Args:
        trace: A trace with timings.
    """
    counts_gaps = not trace.meta.source.startswith(("engine", "simulation"))
    longest_gap = _longest_gap(trace) if counts_gaps else 0.0
    steps: list[MeasuredStep] = []
    previous_end, is_busy, is_first = 0.0, False, True
    for record in trace:
        gap = record.time - previous_end
        if record.chunks and record.duration > 0:
            is_work = is_busy and gap <= longest_gap
            seconds = record.duration + (gap if is_work else 0.0)
            if not is_first and seconds > 0:  # a damaged clock may run backwards
                pause = gap if counts_gaps and is_busy and not is_work else 0.0
                steps.append(MeasuredStep(record, seconds, pause))
            is_first = False
        previous_end, is_busy = record.end, leaves_work(record)
    return steps


def leaves_work(record: StepRecord) -> bool:
    """Whether requests are left after a step, so that the engine begins the next one at once."""
    return len(record.running) + len(record.waiting) > len(record.finished)


def _longest_gap(trace: Trace) -> float:
    """The longest time between two busy steps that counts as work, from the usual one."""
    gaps = []
    previous_end, is_busy = 0.0, False
    for record in trace:
        if is_busy:
            gaps.append(max(0.0, record.time - previous_end))
        previous_end, is_busy = record.end, leaves_work(record)
    return max(MIN_PAUSE_SECONDS, PAUSE_FACTOR * median(gaps)) if gaps else 0.0
