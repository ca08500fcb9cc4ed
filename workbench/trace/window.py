"""A part of a trace, chosen by time or by a request."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from operator import attrgetter

from workbench.trace.errors import TraceError
from workbench.trace.find_request import find_request
from workbench.trace.trace import Requests, Trace

UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def read_time(name: str, text: str) -> float:
    """Seconds from a text such as "90", "1.5s", "10m" or "1h".

    Args:
        name: Name of the value, for messages.
        text: A number of at least 0, with a unit or without.

    Raises:
        ValueError: It is something else.

    Example:
        >>> read_time("--last", "10m")
        600.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{name} must be a time >= 0, such as 90s, 10m or 1h (ms, s, m, h), got {text!r}")
    return float(match[1]) * UNITS[match[2]]


def window(
    trace: Trace,
    *,
    begin: float | None = None,
    end: float | None = None,
    last: float | None = None,
    around: str | None = None,
) -> Trace:
    """The steps of a stretch of time, with the requests that were in them.

    Args:
        trace: A trace with a clock.
        begin: Seconds since the start of the run; None for the beginning.
        end: Seconds since the start of the run; None for the end.
        last: Seconds before the end of the trace instead.
        around: A request, or the beginning of its id, instead: its time, and half as much before it and after it.

    Returns:
        A slice of the trace; the trace itself without a choice.

    Raises:
        ValueError: More than one choice, the end is not after the beginning, or no step lies in the window.
        TraceError: There is no such request, or the trace has no clock.
    """
    by_time = begin is not None or end is not None
    if by_time + (last is not None) + (around is not None) > 1:
        raise ValueError("a window is given by --from and --to, by --last or by --around: give one of the three")
    if not (by_time or last is not None or around is not None) or not len(trace):
        return trace
    if trace[-1].end <= 0:
        raise TraceError("a window needs times, and the trace has no clock")
    if around is not None:
        begin, end = _time_of(trace, find_request(trace.requests, around))
    elif last is not None:
        begin, end = max(0.0, trace[-1].end - last), None
    begin, end = begin or 0.0, trace[-1].end if end is None else end
    if end <= begin:
        raise ValueError(f"the end of a window must be after its beginning, got {begin:g} s to {end:g} s")
    first = bisect_right(trace, begin, key=attrgetter("end"))
    part = trace[first : max(first, bisect_left(trace, end, key=attrgetter("time")))]
    if not len(part):
        last_end = trace[-1].end
        raise ValueError(
            f"no step lies in {begin:g} s to {end:g} s: the trace has {trace[0].time:g} s to {last_end:g} s"
        )
    return _with_its_requests(part)


def _time_of(trace: Trace, request_id: str) -> tuple[float, float]:
    begin = trace.requests[request_id].arrival_time
    ends = [r.end for r in trace if request_id in r.finished or request_id in r.aborted]
    end = ends[-1] if ends else trace[-1].end
    return max(0.0, begin - (end - begin) / 2), end + (end - begin) / 2


def _with_its_requests(part: Trace) -> Trace:
    """A slice without the requests that had ended before it."""
    named: set[str] = set()
    for record in part:
        named.update(record.running, record.waiting, record.arrived, record.finished, record.aborted, record.preempted)
    requests = Requests()
    for before, info in part.arrivals():
        if info.request_id in named:
            requests.add(info, before)
    part.requests = requests
    return part
