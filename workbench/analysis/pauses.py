"""A run of this engine without the pauses in which a person stopped it: no prediction has them."""

from __future__ import annotations

from bisect import bisect_right

from msgspec.structs import replace

from workbench.trace import Trace
from workbench.trace.readings.pauses import pauses_of


def without_pauses(trace: Trace) -> Trace | None:
    """The run as it would have been without pauses; None if it has none.

    Args:
        trace: A run with a clock.
    """
    if not (pauses := pauses_of(trace)):
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
