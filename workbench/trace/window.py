"""A part of a trace, or of the traces of several ranks, chosen by time or by a request."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from operator import attrgetter

from workbench.base.text import significant
from workbench.trace.clock import is_time_of_day, seconds_at, time_of_day
from workbench.trace.errors import TraceError
from workbench.trace.find_request import UnknownRequest, find_request
from workbench.trace.run_zero import clock_starts
from workbench.trace.trace import Requests, Trace

AROUND = 30.0
"""Seconds before and after a time of day."""

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


def read_moment(name: str, text: str, traces: Mapping[str, Trace]) -> float:
    """Seconds since the zero of the run (`run_zero`), from a text such as "90s" or a time of day such as "12:08:03".

    Args:
        name: Name of the value, for messages.
        text: The text.
        traces: The traces by rank.

    Raises:
        ValueError: It is neither, or a time of day that is not in the run.
    """
    if not is_time_of_day(text):
        return read_time(name, text)
    starts = clock_starts(traces)
    ends = [trace[-1].end + starts[rank] for rank, trace in traces.items() if len(trace)]
    return seconds_at(name, text, _dated_zero(traces), max(ends, default=0.0))


def _dated_zero(traces: Mapping[str, Trace]) -> float:
    """Wall clock of the zero of the run, seconds since the epoch; 0 if a trace does not say when it began."""
    starts, dated = clock_starts(traces), all(trace.meta.created for trace in traces.values())
    return next((trace.meta.created - starts[rank] for rank, trace in traces.items() if dated), 0.0)


def window(
    trace: Trace,
    *,
    begin: float | None = None,
    end: float | None = None,
    last: float | None = None,
    around: str | None = None,
) -> Trace:
    """The steps of a stretch of time, with the requests that were in them or arrived meanwhile.

    Args:
        trace: A trace with a clock.
        begin: Seconds since the zero of the run, its first arrival (`run_zero`); None for the beginning.
        end: Seconds since the same; None for the end.
        last: Seconds before the end of the trace instead.
        around: A request, or the beginning of its id, instead: its time, and half as much before it and after it.

    Returns:
        A slice of the trace; the trace itself without a choice.

    Raises:
        ValueError: More than one choice, the end is not after the beginning, or no step lies in the window.
        TraceError: There is no such request, or the trace has no clock.
    """
    return windows({"": trace}, begin=begin, end=end, last=last, around=around)[""]


def windows(
    traces: Mapping[str, Trace],
    *,
    begin: float | None = None,
    end: float | None = None,
    last: float | None = None,
    around: str | None = None,
) -> dict[str, Trace]:
    """The same stretch of time of several ranks, whose times count from the first arrival at any of them.

    Args:
        traces: The traces by rank.
        begin: As for `window`.
        end: As for `window`.
        last: As for `window`, before the end of the rank that ends last.
        around: As for `window`; a request of any rank, or a time of day, with half a minute before it and after it.

    Returns:
        A slice of each trace; ranks without a step in that time are left out.

    Raises:
        ValueError: As for `window`; no rank has a step in the window.
        TraceError: As for `window`.
    """
    by_time = begin is not None or end is not None
    if by_time + (last is not None) + (around is not None) > 1:
        raise ValueError("a window is given by --from and --to, by --last or by --around: give one of the three")
    with_steps = {name: trace for name, trace in traces.items() if len(trace)}
    if not (by_time or last is not None or around is not None) or not with_steps:
        return dict(traces)
    if any(trace[-1].end <= 0 for trace in with_steps.values()):
        raise TraceError("a window needs times, and the trace has no clock")
    late = clock_starts(with_steps)
    whole_end = max(trace[-1].end + late[name] for name, trace in with_steps.items())
    if around is not None and is_time_of_day(around):
        moment = read_moment("--around", around, with_steps)
        begin, end = moment - AROUND, moment + AROUND
    elif around is not None:
        request_id = find_request([name for trace in with_steps.values() for name in trace.requests], around)
        rank = next(name for name, trace in with_steps.items() if request_id in trace.requests)
        begin, end = (time + late[rank] for time in _time_of(with_steps[rank], request_id))
    elif last is not None:
        begin = max(0.0, whole_end - last)
    until, dated = whole_end if end is None else end, _dated_zero(with_steps)
    if begin is not None and until <= begin:
        raise ValueError(
            f"--from, the beginning of a window, must be before its end (--to, or that of the trace, "
            f"{significant(whole_end, 6)} s), got {_moment(begin, dated)} to {_moment(until, dated)}"
        )
    since = min(0.0, until) if begin is None else begin
    parts = {name: _between(trace, since - late[name], until - late[name]) for name, trace in with_steps.items()}
    if not any(map(len, parts.values())):
        first = min(trace[0].time + late[name] for name, trace in with_steps.items())
        stretch = "before" if since >= until else f"in {_moment(since, dated)} to"
        raise ValueError(
            f"no step lies {stretch} {_moment(until, dated)}: "
            f"the trace has {_moment(first, dated)} to {_moment(whole_end, dated)}"
        )
    return {name: _with_its_requests(part, traces[name]) for name, part in parts.items() if len(part)}


def find_in(traces: Collection[Trace], name: str) -> str:
    """The request of some traces that `find_request` finds; one that is only in the rest of a run is told apart.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": name, "prompt": {"len": 9}, "arrival_step": at} for name, at in (("a", 0), ("b", 30))]
        >>> find_in([simulate({"requests": requests})[-3:]], "a")
        Traceback (most recent call last):
            ...
        workbench.trace.find_request.UnknownRequest: request 'a' of the run is not in steps 43 to 45
    """
    try:
        return find_request([request_id for trace in traces for request_id in trace.requests], name)
    except UnknownRequest:
        for trace in traces:
            if outside := [request_id for request_id in trace.whole.requests if name and request_id.startswith(name)]:
                reason = f"request {outside[0]!r} of the run is not in {trace.steps_in_words}"
                raise UnknownRequest(reason) from None
        raise


def step_around(part: Trace, around: str) -> tuple[int, str | None]:
    """The step that `window` was asked to look around, and the request.

    Args:
        part: The window, a slice of a trace.
        around: As for `window`, or a time of day.

    Returns:
        The number of the step at that time, and None; or that of the first step that ran the request, and its id. For a
        request that never ran it is the last step in which it waited.

    Raises:
        ValueError: The time of day is not in the run.
        TraceError: There is no such request.
    """
    if is_time_of_day(around):
        whole = {"": part.whole}
        moment = read_moment("--around", around, whole) - clock_starts(whole)[""]
        return next((record for record in part if record.end > moment), part[-1]).step, None
    request_id = find_request(list(part.whole.requests), around)
    ran = (record for record in part if any(chunk.request_id == request_id for chunk in record.chunks))
    waited = [record for record in part if request_id in (*record.arrived, *record.waiting)][-1:]
    return next(ran, (*waited, part[0])[0]).step, request_id


def _moment(seconds: float, created: float) -> str:
    """A moment for a message, with its time of day if that is known."""
    clock = time_of_day(created, seconds)
    return f"{significant(seconds, 6)} s" + (f" ({clock})" if clock else "")


def _between(trace: Trace, begin: float, end: float) -> Trace:
    first = bisect_right(trace, begin, key=attrgetter("end"))
    return trace[first : max(first, bisect_left(trace, end, key=attrgetter("time")))]


def _time_of(trace: Trace, request_id: str) -> tuple[float, float]:
    begin = trace.requests[request_id].arrival_time
    ends = [r.end for r in trace if request_id in r.finished or request_id in r.aborted]
    end = ends[-1] if ends else trace[-1].end
    return max(0.0, begin - (end - begin) / 2), end + (end - begin) / 2


def _with_its_requests(part: Trace, trace: Trace) -> Trace:
    """A slice with the requests that arrived in its time too, although a later step is the first that names them."""
    requests, start = Requests(), part.offset - trace.offset
    for before, info in trace.arrivals():
        if info.request_id in part.requests or part[0].time <= info.arrival_time <= part[-1].end:
            requests.add(info, min(max(0, before - start), len(part)))
    part.requests = requests
    return part
