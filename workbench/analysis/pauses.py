"""A run of this engine without the pauses in which a person stopped it: no prediction has them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from msgspec.structs import replace

from workbench.trace import Trace
from workbench.trace.readings.run_clock import IDLE_SECONDS


def without_pauses(trace: Trace) -> Trace | None:
    """The run as it would have been without pauses; None if it has none.

    A pause is a time between two steps longer than ``IDLE_SECONDS`` in which a request was there: this engine does not
    wait by itself then. The recording of another engine has none, because nobody knows what that one waited for.

    Args:
        trace: A run with a clock.
    """
    if trace.meta.is_of_server or not len(trace):
        return None
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
    if not pauses:
        return None
    begins = [begin for begin, _ in pauses]

    def moved(moment: float) -> float:
        past = pauses[: bisect_right(begins, moment)]
        return moment - sum(min(end, moment) - begin for begin, end in past)

    run = Trace(trace.meta)
    for info in trace.requests.values():
        run.add_request(replace(info, arrival_time=moved(info.arrival_time)))
    for record in trace:
        run.append(replace(record, time=moved(record.time), end=moved(record.end)))
    return run
