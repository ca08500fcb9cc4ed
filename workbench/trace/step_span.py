"""The beginning, the end and the phases of a step: one arithmetic for an engine, a simulation and a recording.

A step begins when it is scheduled, and ends when its tokens have been given to their requests: the moment at which they
exist, from which every latency is counted. An asynchronous step is scheduled while the one before it is computed, and
its tokens are taken in after the next one has been scheduled. It begins when the step before it ends. So steps never
overlap, no moment counts twice, and a run lasts as long as its steps and the pauses between them. Phases may overlap
all the same: an asynchronous step's "schedule" and "wait" lie before its beginning, in the step before it.
"""

from __future__ import annotations

from typing import Any

from workbench.trace.fields import EMPTY

_PER_SECOND = 1e9
"""Whole nanoseconds: without the noise of a difference, which would make a file's numbers twice as long."""


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
'phase_starts': {'schedule': -1.0}}
    """

    def __init__(self, start: float) -> None:
        self.end = start
        self._start = start
        self._phases: list[tuple[str, float, float]] = []

    def add(self, phase: str, begin: float, end: float) -> None:
        """Add a phase, or more of the latest one."""
        self._phases.append((phase, begin, end))
        self.end = end

    def fields(self, previous_end: float) -> dict[str, Any]:
        """The fields of the step's record that tell times.

        Args:
            previous_end: The end of the step before.
        """
        scale, moment = _PER_SECOND, self._start
        last = int(moment * scale + 0.5)  # a fifth of the time of round()
        time = max(last / scale, previous_end)
        zero = follows = int(time * scale + 0.5)
        timings: dict[str, float] = {}
        starts: dict[str, float] = {}
        for phase, begin, end in self._phases:
            first = last if begin == moment else int(begin * scale + 0.5)
            last, moment = int(end * scale + 0.5), end
            length = last - first
            if phase in timings:
                length += int(timings[phase] * scale + 0.5)
            elif not -1 <= first - follows <= 1:
                starts[phase] = (first - zero) / scale
            timings[phase] = length / scale
            follows = last if last > zero else zero
        # Without gaps the default of the record, which its file leaves out.
        stop = max(time, last / scale) if starts else time + sum(timings.values())
        return {"time": time, "end": stop, "timings": timings, "phase_starts": starts or EMPTY}
