"""Replicas over time: what each runs and holds in equal parts of a time axis that all share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from workbench.trace import Trace
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.run_clock import run_clock
from workbench.trace.run_zero import clock_starts
from workbench.viz.layout.axis import Axis

BINS = 360
"""Number of parts of the axis."""


class Part(NamedTuple):
    """The most of a part of the time.

    Attributes:
        running: Running requests.
        waiting: Waiting requests; with the running ones, the most of both together at one moment.
        used: Share of the KV blocks that are in block tables.
        filled: The same with those that the prefix cache keeps.
    """

    running: int = 0
    waiting: int = 0
    used: float = 0.0
    filled: float = 0.0

    def with_step(self, step: Part) -> Part:
        """The same with another step: the most running requests, and the most running and waiting ones together."""
        running = max(self.running, step.running)
        both = max(self.running + self.waiting, step.running + step.waiting)
        return Part(running, both - running, max(self.used, step.used), max(self.filled, step.filled))


@dataclass(frozen=True)
class ReplicaRow:
    """One replica.

    Attributes:
        name: Its name.
        num_requests: Requests that it got.
        parts: Requests and blocks in `BINS` equal parts of the time.
        way: From and to of the request that was asked for, in seconds; None if no step of this replica ran it.
    """

    name: str
    num_requests: int
    parts: list[Part]
    way: tuple[float, float] | None


@dataclass(frozen=True)
class FleetRows:
    """All replicas on one axis.

    Attributes:
        end: End of the last step, in seconds since the first arrival at any replica.
        idle: Idle time on this axis, in seconds: no replica has a step.
        most: The most requests of a part, running and waiting; at least 1.
        rows: The replicas.
    """

    end: float
    idle: float
    most: int
    rows: list[ReplicaRow]

    @property
    def axis(self) -> Axis:
        """The axis of time, which ends with the last step."""
        return Axis.of_time(self.end)


def fleet_rows(traces: Mapping[str, Trace], request_id: str = "") -> FleetRows:
    """The rows of replicas.

    Args:
        traces: Runs by name. The axis begins with the first arrival at any of them.
        request_id: A request whose way is wanted; "" for none.

    Raises:
        ValueError: No trace has a step that took time, or the request is in none.
    """
    starts = clock_starts(traces)
    ends = [starts[name] + trace[-1].end for name, trace in traces.items() if len(trace) and trace[-1].end]
    if not (end := max(ends, default=0.0)):
        raise ValueError("nothing to draw: no replica has a step that took time")
    rows = [
        ReplicaRow(name, len(trace.requests), _parts(trace, starts[name], end), _way(trace, starts[name], request_id))
        for name, trace in traces.items()
    ]
    if request_id and all(row.way is None for row in rows):
        raise ValueError(f"request {request_id!r} has no step in any of the traces")
    most = max(part.running + part.waiting for row in rows for part in row.parts) or 1
    return FleetRows(end, idle_time(traces), most, rows)


def idle_time(traces: Mapping[str, Trace]) -> float:
    """Seconds of idle time of some runs side by side, by name."""
    starts = clock_starts(traces)
    steps = ((starts[name] + step.time, starts[name] + step.end) for name, trace in traces.items() for step in trace)
    return run_clock(sorted(steps)).idle


def _way(trace: Trace, start: float, request_id: str) -> tuple[float, float] | None:
    """The beginning of the first step that ran a request, and the end of the last."""
    steps = [step for step in trace if any(chunk.request_id == request_id for chunk in step.chunks)]
    return (start + steps[0].time, start + steps[-1].end) if steps else None


def _parts(trace: Trace, start: float, end: float) -> list[Part]:
    """The most of each part of the time; between two steps nothing runs, and the cache keeps what it had."""
    parts: list[Part | None] = [None] * BINS
    columns = metrics(trace).columns
    names = ("time", "duration", "num_running", "num_waiting", "owned_blocks", "cached_blocks")
    blocks = max(1, (trace.num_blocks or 1) - 1)
    for time, seconds, running, waiting, owned, kept in zip(*(columns[name] for name in names)):
        now = Part(running, waiting, max(0, owned) / blocks, max(0, owned + kept) / blocks)
        begin = start + time
        for place in range(int(BINS * begin / end), min(BINS - 1, int(BINS * (begin + seconds) / end)) + 1):
            parts[place] = (parts[place] or now).with_step(now)
    filled: list[Part] = []
    for part in parts:
        filled.append(part or Part(filled=filled[-1].filled if filled else 0.0))
    return filled
