"""The moment from which pages, commands and sentences count the times of a run: its first arrival."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


Name = TypeVar("Name", bound=Hashable)


def run_zero(trace: Trace) -> float:
    """The first arrival of a run, in seconds since the start of the trace.

    It is the first step if no arrival before it is known, or if earlier steps are missing. A part of a trace has the
    zero of the whole, also in a file.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": name, "prompt": {"len": 9}, "arrival_time": at} for name, at in (("a", 3.0), ("b", 2.0))]
        >>> run_zero(simulate({"requests": requests, "cost_model": {"fixed": 0.5}}))
        2.0
    """
    whole = trace.whole
    if not len(whole) or whole[-1].end <= 0:
        return 0.0
    if (kept := kept_zero(whole)) is not None:
        return kept
    arrivals = [] if whole[0].step else [info.arrival_time for info in whole.requests.values()]
    return min([whole[0].time, *arrivals])


def kept_zero(trace: Trace) -> float | None:
    """The zero that came with a trace which begins in the middle of a run; None without one."""
    keyframe = trace.keyframe
    return None if keyframe is None or keyframe.zero is msgspec.UNSET else keyframe.zero


def seconds_late(traces: Mapping[Name, Trace]) -> dict[Name, float]:
    """Seconds from the beginning of the first of several engines' clocks to that of each, by their wall clocks.

    A trace without a wall clock, such as a simulation, counts from its own beginning.

    Args:
        traces: The traces by name.
    """
    created = {name: trace.meta.created for name, trace in traces.items()}
    first = min(filter(None, created.values()), default=0.0)
    return {name: seconds - first if seconds else 0.0 for name, seconds in created.items()}


def clock_starts(traces: Mapping[Name, Trace]) -> dict[Name, float]:
    """When the clock of each of several engines began, in seconds since the zero that they share.

    A time of a record plus this number is a moment of the run. The zero is the earliest of the engines' zeros.

    Args:
        traces: The traces by name.
    """
    late = seconds_late(traces)
    zero = min((late[name] + run_zero(trace) for name, trace in traces.items() if len(trace)), default=0.0)
    return {name: seconds - zero for name, seconds in late.items()}
