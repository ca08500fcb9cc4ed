"""The clock of a run: its length with and without idle time, and the wait before its first step.

Every view that states a duration or a rate of a whole run takes it from here, and says which of them it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.base.text import duration

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

IDLE_SECONDS = 0.5
"""A longer time between two steps is idle time: the engine had nothing to do, or was paused.

A shorter one counts as work.
"""


def idle_words(idle: float) -> str:
    """Idle time beside a duration, with what counts as such, as " with 12 s idle (pauses over 0.5 s)"; "" for none."""
    return f" with {duration(idle)} idle (pauses over {IDLE_SECONDS:g} s)" if idle else ""


@dataclass(frozen=True)
class RunClock:
    """The length of a run. Times are in seconds since the start of the trace; in steps for a run without a clock.

    Attributes:
        begin: Beginning of the first step.
        end: End of the last step.
        idle: Sum of the times between two steps that are longer than ``IDLE_SECONDS``.
        before: Time from the first arrival to the first step; 0 if the trace lacks earlier steps.
    """

    begin: float = 0.0
    end: float = 0.0
    idle: float = 0.0
    before: float = 0.0

    @property
    def duration(self) -> float:
        """From the beginning of the first step to the end of the last, idle time included."""
        return self.end - self.begin

    @property
    def at_work(self) -> float:
        """The same without idle time."""
        return self.duration - self.idle

    @property
    def since_arrival(self) -> float:
        """From the first arrival to the end of the last step, idle time included."""
        return self.duration + self.before


class GrowingClock:
    """Adds up the clock of a run, a step at a time."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._end = self._idle = 0.0

    def add(self, begin: float, end: float) -> None:
        """Add a step in seconds, in order of the beginnings; those of several engines may overlap."""
        if self._begin is None:
            self._begin, self._end = begin, end
            return
        if begin - self._end > IDLE_SECONDS:
            self._idle += begin - self._end
        if end > self._end:
            self._end = end

    def clock(self, first_arrival: float | None = None) -> RunClock:
        """The clock of these steps; see `run_clock`."""
        if self._begin is None:
            return RunClock()
        before = 0.0 if first_arrival is None else max(0.0, self._begin - first_arrival)
        return RunClock(self._begin, self._end, self._idle, before)


def run_clock(steps: Iterable[tuple[float, float]], first_arrival: float | None = None) -> RunClock:
    """The clock of some steps.

    Args:
        steps: Beginning and end of each step in seconds, in order of their beginnings; those of several engines may
            overlap.
        first_arrival: The first arrival in seconds, for the wait before the first step; None for none.

    Example:
        >>> clock = run_clock([(1.0, 2.0), (2.25, 3.0), (9.0, 10.0)], first_arrival=0.75)
        >>> clock.duration, clock.idle, clock.at_work, clock.before
        (9.0, 6.0, 3.0, 0.25)
    """
    growing = GrowingClock()
    for start, stop in steps:
        growing.add(start, stop)
    return growing.clock(first_arrival)


def clock_of(traces: Sequence[Trace]) -> RunClock:
    """The clock of one run, or of several engines that ran side by side; their traces must have times."""
    return run_clock(sorted((step.time, step.end) for trace in traces for step in trace))
