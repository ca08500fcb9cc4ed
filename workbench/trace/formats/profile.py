"""Join a recording with a profile of torch's profiler: one time axis, by the marks of steps that the recorder set.

A mark stands in both: the profile has its time by the profiler's clock, the recording has the same moment by its own.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from workbench.base.text import counted
from workbench.trace.errors import TraceError
from workbench.trace.file import read_blocks
from workbench.trace.formats.export import ENGINE, REQUESTS, Clock, chrome_events, write_chrome_trace
from workbench.trace.formats.shared_axis import MAX_DELAY_US, Mark, SharedAxis, match_iterations
from workbench.trace.records import StepRecord
from workbench.trace.run_zero import run_zero
from workbench.trace.step_marks import OUTPUT, SCHEDULED, mark_of
from workbench.trace.trace import Trace

MAX_PROFILE_BYTES = 2**31
"""Largest profile that is read, decompressed; its events take as much memory again."""

MAX_AGE_US = 60e6
"""Greatest difference of the two times of day."""

_GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


class _Event(msgspec.Struct):
    """The fields of an event that are read; the others are passed on."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float | None = None
    dur: float = 0.0
    pid: int | str | None = None
    args: dict[str, Any] = {}

    @property
    def start(self) -> float:
        """Its time; 0 for an event without one."""
        return self.ts or 0.0


class _Profile(msgspec.Struct):
    trace_events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base_time: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)


@dataclass(frozen=True)
class Join:
    """The result of joining a profile with a recording.

    Attributes:
        num_events: Number of the profile's events.
        marked: Steps of the recording that the profile marks.
        unmarked: Those that it does not.
        unknown: Marked steps that the recording does not have.
        drift: Seconds that the profile's clock loses per second; None if the marks span too little time to tell.
        delay: Median of the marks' delays after the recorded moments, in microseconds.
        by_marks: Whether the recorder's marks told the steps, or the contents of a worker's iterations.
    """

    num_events: int
    marked: tuple[int, ...]
    unmarked: tuple[int, ...]
    unknown: tuple[int, ...]
    drift: float | None
    delay: float
    by_marks: bool

    def __str__(self) -> str:
        steps = counted(len(self.marked) + len(self.unmarked), "step")
        drift = "too short to measure a drift" if self.drift is None else f"drift {self.drift * 1e6:.1f} ppm"
        how = "marks stand" if self.by_marks else "by the contents of its iterations, which a worker begins"
        lines = [
            f"joined {len(self.marked):,} of {steps} with {counted(self.num_events, 'event')} of the profile: "
            f"{how} {self.delay:.0f} us after the scheduling of their steps (median), {drift}"
        ]
        if self.unmarked:
            lines.append(f"no profiler ran in {_spans(self.unmarked)}")
        if self.unknown:
            lines.append(f"the profile also marks {_spans(self.unknown)}, which the recording does not have")
        return "\n".join(lines)


def join_profile(trace: Trace, profile: str | os.PathLike[str], path: str | os.PathLike[str]) -> Join:
    """Write a Chrome trace of a recording and a profile.

    Args:
        trace: A recording of vLLM.
        profile: A Chrome trace of torch's profiler, plain or gzipped, made while the recorder ran.
        path: File to write, gzipped when it ends in .gz.

    Raises:
        TraceError: The profile cannot be read, has no marks, or is of another run; or the trace has no times.
        OSError: A file cannot be read or written.
    """
    records = tuple(trace)
    clock = Clock(trace)
    if not clock.is_timed:
        raise TraceError("this trace has no times, which a profile could be joined with: record a running engine")
    name = os.fspath(profile)
    content = _read(profile)
    places = {record.step: moments for record in records if (moments := _moments(record, clock))}
    if marks := _marks(name, content):
        marked = sorted({mark.step for mark in marks})
        marks = [mark for mark in marks if mark.step in places]
        if not marks:
            raise TraceError(
                f"{name} marks {_spans(marked)}, and the recording has {_spans(list(places))}: "
                "take a recording and a profile of the same time"
            )
        axis = SharedAxis(marks, places)
        if axis.delay > MAX_DELAY_US:
            raise TraceError(
                f"{name} is of another run: its marks are {axis.delay / 1000:,.1f} ms from the steps of the recording "
                f"(median of {counted(len(marks), 'mark')}), at most {MAX_DELAY_US / 1000:.0f} ms are allowed"
            )
    else:
        marks, axis = match_iterations(name, _iterations(name, content), records, places, _told_offset(trace, content))
        marked = sorted({mark.step for mark in marks})
    if (told := _told_offset(trace, content)) is not None and abs(apart := axis.offset - told) > MAX_AGE_US:
        order = "before" if apart > 0 else "after"
        raise TraceError(f"{name} was made {abs(apart) / 1e6:,.0f} s {order} the recording: it is of another run")
    write_chrome_trace(path, _joined(trace, name, content, axis, marks), trace.meta.source)
    return Join(
        num_events=len(content.trace_events),
        marked=tuple(step for step in marked if step in places),
        unmarked=tuple(step for step in places if step not in set(marked)),
        unknown=tuple(step for step in marked if step not in places),
        drift=axis.drift,
        delay=axis.delay,
        by_marks=marks[0].is_own,
    )


def _told_offset(trace: Trace, content: _Profile) -> float | None:
    """The offset that SharedAxis should find, by the two times of day; None if one of them is not known."""
    if not (content.base_time and trace.meta.created) or not len(trace):
        return None
    return content.base_time / 1e3 - (trace.meta.created + run_zero(trace)) * 1e6


def _read(path: str | os.PathLike[str]) -> _Profile:
    """A profile, whose events are not decoded yet."""
    content, total = [], 0
    for block in read_blocks(path, whole=True):
        total += len(block)
        if total > MAX_PROFILE_BYTES:
            raise TraceError(
                f"{os.fspath(path)} holds more than {MAX_PROFILE_BYTES:,} bytes: profile fewer steps "
                "(--profiler-config.max_iterations), or without stacks (torch_profiler_with_stack=false)"
            )
        content.append(block)
    try:
        return msgspec.json.decode(b"".join(content), type=_Profile)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise TraceError(f"{os.fspath(path)} is not a Chrome trace of torch's profiler: {problem}") from None


def _marks(path: str, content: _Profile) -> list[Mark]:
    """The recorder's marks, in order of their times."""
    found = [(event, mark_of(event.name)) for event in _ranges(path, content, b"workbench step ")]
    return sorted(Mark(event.start, *mark, is_own=True) for event, mark in found if mark is not None)


def _iterations(path: str, content: _Profile) -> list[_Event]:
    """The ranges that vLLM's worker sets around its iterations, in order."""
    return sorted(_ranges(path, content, b"_generation_"), key=lambda event: event.start)


def _ranges(path: str, content: _Profile, text: bytes) -> Iterator[_Event]:
    """The ranges whose text has a piece of their name; a copy on the GPU's track has the GPU's times."""
    for raw in content.trace_events:
        if text in bytes(raw):
            event = _decoded(path, raw)
            if event.ph == "X" and event.ts is not None and not event.cat.startswith("gpu"):
                yield event


def _decoded(path: str, raw: msgspec.Raw) -> _Event:
    try:
        return msgspec.json.decode(raw, type=_Event)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise TraceError(f"{path} has an event that cannot be read: {problem}") from None


def _moments(record: StepRecord, clock: Clock) -> dict[str, float]:
    """The times of a step's marks by the recording's clock."""
    found = {}
    for phase in record.phases:
        if phase.name == "schedule":
            found[SCHEDULED] = clock.since(phase.end)
        elif phase.name == "update":
            found[OUTPUT] = clock.since(phase.begin)
    return found


# -- the events ---------------------------------------------------------------------------------------------------


def _joined(
    trace: Trace, path: str, content: _Profile, axis: SharedAxis, marks: Sequence[Mark]
) -> Iterator[dict[str, Any]]:
    """The events of the recording, and below them those of the profile at the recording's times."""
    events = [_decoded(path, raw) for raw in content.trace_events]
    taken = {event.pid for event in events}
    ours = [number for number in range(1, len(taken) + 3) if number not in taken]
    processes = {ENGINE: ours[0], REQUESTS: ours[1]}
    work = _gpu_work(events, marks)
    names = {f"step {record.step}": record for record in trace}
    for process, index in ((ENGINE, -2), (REQUESTS, -1)):
        sort = {"sort_index": index}
        yield {"ph": "M", "name": "process_sort_index", "pid": processes[process], "tid": 0, "ts": 0, "args": sort}
    for event in chrome_events(trace):
        if event["pid"] == ENGINE and event["ph"] == "X" and (record := names.get(event["name"])) is not None:
            requests = [chunk.request_id for chunk in record.chunks]
            event["args"] = event["args"] | {"requests": requests} | work.get(record.step, {})
        yield event | {"pid": processes[event["pid"]]}
    for raw, read in zip(content.trace_events, events):
        event = msgspec.json.decode(raw)
        if read.ts is not None and read.ph != "M":
            event["ts"] = round(axis.recorded(read.ts), 3)
        yield event


def _gpu_work(events: Sequence[_Event], marks: Sequence[Mark]) -> dict[int, dict[str, Any]]:
    """The GPU's work for each step: all that was launched after its scheduling and before the next one's."""
    begins = sorted((mark.time, mark.step) for mark in marks if mark.moment == SCHEDULED)
    launched = {
        event.args["correlation"]: event.ts
        for event in events
        if event.cat in ("cuda_runtime", "cuda_driver") and event.ts is not None and _is_correlated(event)
    }
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.cat not in _GPU_CATEGORIES or not _is_correlated(event):
            continue
        place = bisect_right(begins, (launched.get(event.args["correlation"], -1.0), 2**63)) - 1
        if place < 0:
            continue
        work = found.setdefault(begins[place][1], {"gpu_events": 0, "gpu_us": 0.0, "longest": "", "longest_us": 0.0})
        work["gpu_events"] += 1
        work["gpu_us"] = round(work["gpu_us"] + event.dur, 3)
        if event.dur > work["longest_us"]:
            work["longest"], work["longest_us"] = event.name, event.dur
    return found


def _is_correlated(event: _Event) -> bool:
    return isinstance(event.args.get("correlation"), int)


def _spans(steps: Sequence[int]) -> str:
    """Steps in order, as ranges.

    Example:
        >>> _spans([0, 1, 2, 7])
        'steps 0-2, 7'
    """
    runs = [[step for _, step in run] for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0])]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    more = f" and {len(shown) - 8} more ranges" if len(shown) > 8 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown[:8])}{more}"
