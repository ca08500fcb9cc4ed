"""The beginning, the end and the phases of a step: one arithmetic for an engine, a simulation and a recording.

A step begins when it is scheduled, and ends when its tokens have been given to their requests: the moment at which they
exist, from which every latency is counted. An asynchronous step is scheduled while the one before it is computed, and
its tokens are taken in after the next one has been scheduled. It begins when the step before it ends. So steps never
overlap, no moment counts twice, and a run lasts as long as its steps and the pauses between them. Phases may overlap
all the same: an asynchronous step's "schedule" and "wait" lie before its beginning, in the step before it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from workbench.trace.records import StepRecord

_DIGITS = 9  # nanoseconds: without the noise of a difference, which would make a file's numbers twice as long


class StepSpan:
    """The span of one step while it is taken. Times are in seconds since the start of the run, by any clock.

    Args:
        start: When the step was scheduled.

    Attributes:
        end: The end of its latest phase.

    Example:
        >>> step = StepSpan(2.0)
        >>> step.add("schedule", 2.0, 2.5)
        >>> step.add("forward", 3.0, 4.0)
        >>> step.fields(previous_end=3.0)
        {'time': 3.0, 'end': 4.0, 'timings': {'schedule': 0.5, 'forward': 1.0}, \
'phase_starts': {'schedule': -1.0, 'forward': 0.0}}
    """

    def __init__(self, start: float) -> None:
        self.end = start
        self._start = start
        self._phases: dict[str, tuple[float, float]] = {}  # beginning and seconds

    def add(self, phase: str, begin: float, end: float) -> None:
        """Add a phase, or more of the latest one."""
        begun, seconds = self._phases.get(phase, (begin, 0.0))
        self._phases[phase] = begun, seconds + end - begin
        self.end = end

    def fields(self, previous_end: float) -> dict[str, Any]:
        """The fields of the step's record that tell times.

        Args:
            previous_end: The end of the step before.
        """
        time = round(max(self._start, previous_end), _DIGITS)
        timings, starts, follows = {}, {}, time
        for phase, (begin, seconds) in self._phases.items():
            timings[phase] = round(seconds, _DIGITS)
            if round(begin - follows, _DIGITS):
                starts[phase] = round(begin - time, _DIGITS)
            follows = begin + seconds
        end = max(time, round(self.end, _DIGITS))
        return {"time": time, "end": end, "timings": timings, "phase_starts": starts}


def with_span(record: StepRecord, previous_end: float) -> StepRecord:
    """A record of a file without ends, whose ``time`` is always that of its scheduling, in the form of today.

    Args:
        record: The record as it was read: its end is that of its phases, taken one after another.
        previous_end: The end of the step before.
    """
    if record.time >= previous_end:
        return replace(record, end=max(record.time, round(record.end, _DIGITS)))
    span, end = StepSpan(record.time), record.time
    for phase, seconds in record.timings.items():
        begin, end = end, end + seconds
        span.add(phase, previous_end if begin < previous_end < end else begin, end)
    return replace(record, **span.fields(previous_end))
