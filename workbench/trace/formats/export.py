"""Traces for other tools: pandas, and the Chrome trace format that Perfetto opens."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.base.on_demand import extra_for
from workbench.base.whole_file import replaced_when_complete
from workbench.trace.readings.narrate import shown
from workbench.trace.records import Chunk, StepRecord
from workbench.trace.run_zero import run_zero

if TYPE_CHECKING:
    import pandas as pd

    from workbench.trace.trace import Trace

STEP_MICROSECONDS = 1000.0
"""Length of a step in a trace without a clock."""

ENGINE, REQUESTS = 1, 2  # the two "processes" of the Chrome trace


def to_pandas(trace: Trace) -> pd.DataFrame:
    """One row per chunk, in scheduling order.

    Raises:
        ModuleNotFoundError: pandas is not installed.
    """
    with extra_for("to_pandas()"):
        import pandas as pd
    names = [name for name in Chunk.__struct_fields__ if name != "new_block_ids"]
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "time", *names, "end", "num_new_blocks")}
    for record in trace:
        for chunk in record.chunks:
            columns["step"].append(record.step)
            columns["time"].append(record.time)
            for name in names:
                columns[name].append(getattr(chunk, name))
            columns["end"].append(chunk.end)
            columns["num_new_blocks"].append(len(chunk.new_block_ids))
    frame = pd.DataFrame(columns)
    frame["sampled"] = frame["sampled"].astype("Int64")
    return frame


def to_chrome_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a Chrome trace: a track of steps with their phases, counters, and a track per request with its chunks.

    A trace without a clock is drawn with one millisecond per step.

    Args:
        trace: The trace.
        path: File to write, gzipped when it ends in .gz; replaced when the new one is complete.

    Raises:
        OSError: The file cannot be written.
    """
    write_chrome_trace(path, chrome_events(trace), trace.meta.source)


def write_chrome_trace(path: str | os.PathLike[str], events: Iterator[dict[str, Any]], source: str) -> None:
    """Write the events of a Chrome trace; ``path`` and errors as in `to_chrome_trace`."""
    opener = gzip.open if os.fspath(path).endswith(".gz") else open
    encode = msgspec.json.Encoder(enc_hook=repr).encode
    with replaced_when_complete(path) as unfinished, opener(unfinished, "wb") as file:
        about = encode({"source": source})
        file.write(b'{"displayTimeUnit":"ms","otherData":' + about + b',"traceEvents":[')
        for index, event in enumerate(events):
            file.write((b",\n" if index else b"\n") + encode(event))
        file.write(b"\n]}\n")


def chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace. Times are in microseconds since the run's first arrival."""
    records = tuple(trace)
    tracks = {request_id: number for number, request_id in enumerate(trace.requests, start=1)}
    yield _named("process_name", ENGINE, 0, f"engine ({trace.meta.source})")
    yield _named("process_name", REQUESTS, 0, "requests")
    yield _named("thread_name", ENGINE, 1, "steps")
    if any(record.phase_starts for record in records):
        yield _named("thread_name", ENGINE, 2, "asynchronous scheduling")
    for request_id, track in tracks.items():
        yield _named("thread_name", REQUESTS, track, request_id)
        yield _event("M", "thread_sort_index", REQUESTS, track, args={"sort_index": track})
    clock = Clock(trace)
    running = trace.keyframe.block_tables if trace.keyframe is not None else {}  # before the first step
    waits_since = {
        request_id: ("waiting", clock.arrival(info))
        for request_id, info in trace.requests.items()
        if request_id not in running
    }
    for record in records:
        start, duration = clock.span(record)
        yield from _engine_events(record, start, duration, trace.num_blocks)
        yield from _phase_events(record, clock)
        for chunk in record.chunks:
            track = tracks.get(chunk.request_id, 0)
            if chunk.request_id in waits_since:
                state, since = waits_since.pop(chunk.request_id)
                if since < start:
                    yield _event("X", state, REQUESTS, track, since, dur=round(start - since, 3))
            yield _event("X", _title(chunk), REQUESTS, track, start, dur=duration, args=_arguments(record, chunk))
        for event in record.events:
            if event.kind in ("preempt", "finish", "abort"):
                moment = start + duration if event.kind == "finish" else start
                track = tracks.get(event.request_id, 0)
                yield _event("i", event.kind, REQUESTS, track, moment, s="t", args={"reason": event.reason})
        for request_id in record.preempted:
            waits_since[request_id] = ("preempted", start)


class Clock:
    """Start and duration of each step, in microseconds since the run's first arrival, or first step without times.

    Args:
        trace: The trace, or a part of one.

    Attributes:
        is_timed: Whether the steps have times; otherwise each takes a millisecond.
    """

    def __init__(self, trace: Trace) -> None:
        self.is_timed = any(record.end or record.timings for record in trace)
        self._zero = run_zero(trace)
        self._first_step = trace[0].step if len(trace) else 0

    def span(self, record: StepRecord) -> tuple[float, float]:
        """Start and duration of a step."""
        if not self.is_timed:
            return (record.step - self._first_step) * STEP_MICROSECONDS, STEP_MICROSECONDS
        return self.since(record.time), round(record.duration * 1e6, 3)

    def arrival(self, info: Any) -> float:
        """Arrival of a request."""
        if not self.is_timed:
            return (info.arrival_step - self._first_step) * STEP_MICROSECONDS
        return self.since(info.arrival_time)

    def since(self, seconds: float) -> float:
        """A moment of the trace, which is in seconds."""
        return round((seconds - self._zero) * 1e6, 3)


def _engine_events(
    record: StepRecord, start: float, duration: float, num_blocks: int | None
) -> Iterator[dict[str, Any]]:
    facts = {
        "tokens": record.num_tokens,
        "budget": record.token_budget,
        "chunks": len(record.chunks),
        "running": len(record.running),
        "waiting": len(record.waiting),
        "waiting_reason": shown(record.waiting_reason),
    }
    yield _event("X", f"step {record.step}", ENGINE, 1, start, dur=duration, args=facts)
    tokens = {"decode": record.num_decode_tokens, "prefill": record.num_prefill_tokens}
    yield _event("C", "scheduled tokens", ENGINE, 0, start, args=tokens)
    yield _event("C", "token budget", ENGINE, 0, start, args={"tokens": record.token_budget})
    blocks = {"free": record.free_blocks}
    if num_blocks is not None:
        blocks["owned"] = num_blocks - 1 - record.free_blocks
    yield _event("C", "KV blocks", ENGINE, 0, start, args=blocks)


def _phase_events(record: StepRecord, clock: Clock) -> Iterator[dict[str, Any]]:
    """The phases of a step: in its own track, but those before its beginning, during another step, in one beside it."""
    last = clock.since(record.end)
    for phase in record.phases:
        begin, end = clock.since(phase.begin), min(last, clock.since(phase.end))
        track = 1 if phase.begin >= record.time else 2
        yield _event("X", phase.name, ENGINE, track, begin, dur=max(0.0, round(end - begin, 3)))


def _title(chunk: Chunk) -> str:
    if chunk.is_decode:
        return "decode"
    return f"{'recompute' if chunk.num_recomputed_tokens else 'prefill'} {chunk.num_tokens}"


def _arguments(record: StepRecord, chunk: Chunk) -> dict[str, Any]:
    return {
        "step": record.step,
        "tokens": f"[{chunk.start}, {chunk.end})",
        "arm": chunk.arm,
        "limited_by": chunk.limited_by,
        "sampled": chunk.sampled,
        "text": chunk.text,
        "cached_tokens": chunk.num_cached_tokens,
        "recomputed_tokens": chunk.num_recomputed_tokens,
        "new_blocks": list(chunk.new_block_ids),
    }


def _named(name: str, process: int, track: int, value: str) -> dict[str, Any]:
    return _event("M", name, process, track, args={"name": value})


def _event(phase: str, name: str, process: int, track: int, time: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": track, "ts": time, **more}
