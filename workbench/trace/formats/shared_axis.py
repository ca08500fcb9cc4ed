"""The clocks of a recording and of a profile: which steps the profile shows, and when they were by the recording.

The recorder marks steps in the process of the scheduler. Workers in other processes have no such marks; vLLM names each
of their iterations by its numbers of requests and tokens, and the sequence of these numbers tells the steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from workbench.base.text import counted
from workbench.trace.errors import TraceError
from workbench.trace.records import StepRecord
from workbench.trace.step_marks import OUTPUT, SCHEDULED

MAX_DELAY_US = 1000.0
"""Greatest median delay of the marks of one run."""

MAX_DRIFT = 6e-4
"""Greatest difference in speed of two clocks of one machine: NTP slows one down, or speeds it up, by up to 5e-4."""

MAX_DRIFT_ERROR = 20e-6
"""Greatest error of a drift that is used: delays that differ look like one, the more so the shorter the profile is."""

_ITERATION = re.compile(
    r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)(?:sk\d+sqsq\d+sqsk\d+)?\)"
    r"_generation_(\d+)\((?:sq)?(\d+)(?:sk\d+sqsq\d+sqsk\d+)?\)"
)

Places = Mapping[int, Mapping[str, float]]
"""The recorded times of each step's moments, in microseconds."""


class Range(Protocol):
    """A range of a profile."""

    name: str
    dur: float

    @property
    def start(self) -> float:
        """Its time in microseconds."""


@dataclass(frozen=True, order=True)
class Mark:
    """A moment of a step in a profile.

    Attributes:
        time: The time by the profile's clock, in microseconds.
        step: The step.
        moment: SCHEDULED or OUTPUT.
        is_own: Whether the recorder set it.
    """

    time: float
    step: int
    moment: str
    is_own: bool


class SharedAxis:
    """The recording's time of a moment of a profile; both in microseconds.

    A mark comes after the moment of its scheduling, never before. The one with the least delay tells how far the clocks
    are apart, and the least delays of both halves tell how that changes.

    Args:
        marks: Marks of steps, in order.
        places: Their times in the recording.

    Attributes:
        drift: Seconds that the profile's clock loses per second; None if the marks span too little time to tell.
        delay: Median of the delays.
        offset: The recording's time at 0 of the profile's clock.
    """

    def __init__(self, marks: Sequence[Mark], places: Places) -> None:
        gaps = [
            (mark.time, places[mark.step][SCHEDULED] - mark.time)
            for mark in marks
            if mark.moment == SCHEDULED and SCHEDULED in places[mark.step]
        ] or [(mark.time, places[mark.step][mark.moment] - mark.time) for mark in marks]
        half, self._first = len(gaps) // 2, gaps[0][0]
        self.drift: float | None = None
        delay = max(gap for _, gap in gaps) - median([gap for _, gap in gaps])
        if half >= (1 if marks[0].is_own else 4) and gaps[-1][0] - gaps[0][0] >= 1e6:
            (time, gap), (later, other) = (max(part, key=lambda point: point[1]) for part in (gaps[:half], gaps[half:]))
            drift = (other - gap) / (later - time) if later > time else 0.0
            if abs(drift) <= MAX_DRIFT and delay - abs(other - gap) <= MAX_DRIFT_ERROR * (later - time):
                self.drift = drift
        apart = [gap - (self.drift or 0.0) * (time - self._first) for time, gap in gaps]
        self.offset = max(apart)
        self.delay = self.offset - median(apart)

    def recorded(self, time: float) -> float:
        """The recording's time."""
        return time + self.offset + (self.drift or 0.0) * (time - self._first)


def match_iterations(
    path: str, ranges: Sequence[Range], records: Sequence[StepRecord], places: Places, told: float | None
) -> tuple[list[Mark], SharedAxis]:
    """Find the steps that a worker's iterations are, by their numbers of requests and tokens.

    Args:
        path: The profile, for messages.
        ranges: Ranges of the profile, in order.
        records: The steps.
        places: Their times.
        told: The offset of the clocks by their times of day, to choose among several places that fit.

    Raises:
        TraceError: There are no iterations, no steps like them, or several places for them.
    """
    iterations = [
        (found, (int(name[1]) + int(name[3]), int(name[2]) + int(name[4])))
        for found in ranges
        if (name := _ITERATION.fullmatch(found.name)) and (int(name[1]) or int(name[3]))
    ]
    if not iterations:
        raise TraceError(
            f"{path} has no marks of steps, such as 'workbench step 12: scheduled', and no iterations of vLLM's "
            "worker, such as 'execute_context_1(64)_generation_0(0)': profile a vLLM that is recorded meanwhile"
        )
    steps = [record for record in records if record.chunks and record.step in places]
    contents = [(len(record.chunks), record.num_tokens) for record in steps]
    wanted, number = [content for _, content in iterations], len(iterations)
    fitting: list[tuple[list[Mark], SharedAxis]] = []
    for first in range(len(steps) - number + 1):
        if contents[first : first + number] == wanted:
            pairs = zip(steps[first : first + number], (found for found, _ in iterations))
            marks = [mark for record, found in pairs for mark in _marks_of(record.step, found)]
            axis = SharedAxis(marks, places)
            if all(_is_before_output(mark, axis, places) for mark in marks):
                fitting.append((marks, axis))
    if told is not None and len(fitting) > 1:
        fitting = [min(fitting, key=lambda found: abs(found[1].offset - told))]
    if len(fitting) != 1:
        where = "fit no steps" if not fitting else f"fit at {len(fitting):,} places"
        raise TraceError(
            f"{path} has no marks of steps, and its {counted(number, 'iteration')} of vLLM's worker {where} of the "
            "recording: take a recording and a profile of the same time"
        )
    return fitting[0]


def _marks_of(step: int, found: Range) -> list[Mark]:
    return [
        Mark(found.start, step, SCHEDULED, is_own=False),
        Mark(found.start + found.dur, step, OUTPUT, is_own=False),
    ]


def _is_before_output(mark: Mark, axis: SharedAxis, places: Places) -> bool:
    """Whether an iteration's end comes before its step's output is processed."""
    place = places[mark.step].get(OUTPUT)
    return mark.moment != OUTPUT or place is None or axis.recorded(mark.time) <= place + MAX_DELAY_US
