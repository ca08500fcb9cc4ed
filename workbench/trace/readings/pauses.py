"""The pauses in which a person stopped an engine, between two cells of a notebook for example."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from workbench.trace.readings.run_clock import IDLE_SECONDS

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


def pauses_of(trace: Trace) -> list[tuple[float, float]]:
    """Beginning and end of each pause in seconds: a part of the idle time in which a request was there.

    A pause is a time between two steps longer than ``IDLE_SECONDS`` in which a request was there: this engine does not
    wait by itself then. The recording of another engine has none, because nobody knows what that one waited for, and
    neither has a part without the first step: the requests of that moment are unknown.

    Args:
        trace: A run with a clock.
    """
    if trace.meta.is_of_server or not len(trace) or trace[0].step:
        return []
    arrivals = sorted(info.arrival_time for info in trace.requests.values())
    pauses: list[tuple[float, float]] = []
    num_ended = 0
    for before, after in pairwise(trace):
        num_ended += len(before.finished) + len(before.aborted)
        if after.time - before.end <= IDLE_SECONDS:
            continue
        place = bisect_right(arrivals, before.end)  # this many requests have arrived
        begin = before.end if place > num_ended else arrivals[place] if place < len(arrivals) else after.time
        if after.time - begin > IDLE_SECONDS:
            pauses.append((begin, after.time))
    return pauses
