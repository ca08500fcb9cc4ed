"""Collects metrics while a trace grows: each record is read once."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from workbench.trace.metrics import Distribution, Latency, RequestMetrics, StepMetrics, Summary, TraceMetrics
from workbench.trace.pool_replay import PoolReplay
from workbench.trace.records import Chunk, RequestInfo, StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

_FLOAT_COLUMNS = ("time", "duration")
_INT_COLUMNS = (
    "step",
    "num_tokens",
    "num_decode_tokens",
    "num_recomputed_tokens",
    "num_cached_tokens",
    "token_budget",
    "num_running",
    "num_waiting",
    "num_preempted",
    "free_blocks",
    "cached_blocks",
    "owned_blocks",
    "unused_slots",
)


class _RequestProgress:
    """What is known of a request so far."""

    def __init__(self, info: RequestInfo) -> None:
        self.info = info
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_preemptions = 0
        self.finish_reason = ""
        self.first_scheduled: tuple[int, float] | None = None
        self.finished: tuple[int, float] | None = None
        self.saw_first_token = False
        self.token_steps = array("q")
        self.token_times = array("d")

    def metrics(self, timed: bool) -> RequestMetrics:
        info = self.info
        arrival = (info.arrival_step, info.arrival_time)
        first = last = None
        if self.token_steps:
            last = (self.token_steps[-1], self.token_times[-1])
            first = (self.token_steps[0], self.token_times[0]) if self.saw_first_token else None

        def span(begin: tuple[int, float] | None, end: tuple[int, float] | None, extra: int) -> Latency | None:
            if begin is None or end is None:
                return None
            return Latency(end[0] - begin[0] + extra, end[1] - begin[1] if timed else None)

        return RequestMetrics(
            request_id=info.request_id,
            num_prompt_tokens=info.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_preemptions=self.num_preemptions,
            finish_reason=self.finish_reason,
            arrival_step=info.arrival_step,
            first_scheduled_step=self.first_scheduled[0] if self.first_scheduled else None,
            finish_step=self.finished[0] if self.finished else None,
            token_steps=tuple(self.token_steps),
            token_times=tuple(self.token_times) if timed else (),
            queue=span(arrival, self.first_scheduled, 0),
            prefill=span(self.first_scheduled, first, 1),
            ttft=span(arrival, first, 1),
            decode=span(first, last, 0),
            # An aborted request ended before its step was scheduled.
            e2e=span(arrival, self.finished, 0 if self.finish_reason == "abort" else 1),
        )


class MetricsCollector:
    """Metrics of a trace; ``collect`` reads the steps that came since it was last called.

    Args:
        trace: The trace, growing or not.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._num_read = 0
        self._timed = False
        self._requests: dict[str, _RequestProgress] = {}
        self._columns = {name: array("d") for name in _FLOAT_COLUMNS} | {name: array("q") for name in _INT_COLUMNS}
        self._unused_slots: dict[str, int] = {}
        self._num_unused_slots = 0
        self._pool = PoolReplay.at_start_of(trace)
        if trace.keyframe is not None:
            for request_id, table in trace.keyframe.block_tables.items():
                self._set_unused(request_id, len(table), trace.keyframe.num_kv_computed.get(request_id, 0))

    def collect(self) -> TraceMetrics:
        """The metrics up to the newest step."""
        for request_id in self._trace.requests:
            if request_id not in self._requests:
                self._requests[request_id] = _RequestProgress(self._trace.requests[request_id])
        for index in range(self._num_read, len(self._trace)):
            self._read(self._trace[index])
            self._num_read = index + 1
        steps = StepMetrics(
            **{name: np.array(column) for name, column in self._columns.items()}, block_size=self._trace.block_size
        )
        requests = {request_id: progress.metrics(self._timed) for request_id, progress in self._requests.items()}
        return TraceMetrics(_summarise(requests, steps, self._timed), requests, steps)

    def _read(self, record: StepRecord) -> None:
        self._timed = self._timed or bool(record.timings) or record.time > 0
        start, end = record.time, record.time + sum(record.timings.values())
        for request_id in record.aborted:
            self._end(request_id, "abort", record.step, start)
        for request_id in record.preempted:
            self._progress(request_id).num_preemptions += 1
            self._drop_unused(request_id)
        self._pool.schedule(record)
        num_tokens = num_decode = num_recomputed = num_cached = 0
        for chunk in record.chunks:
            num_tokens += chunk.num_tokens
            num_decode += chunk.num_tokens if chunk.arm == "decode" else 0
            num_recomputed += chunk.num_recomputed_tokens
            num_cached += chunk.num_cached_tokens
            self._read_chunk(chunk, record, start, end)
        size, free = self._trace.num_blocks, record.free_blocks
        values = {
            "time": start,
            "duration": end - start,
            "step": record.step,
            "num_tokens": num_tokens,
            "num_decode_tokens": num_decode,
            "num_recomputed_tokens": num_recomputed,
            "num_cached_tokens": num_cached,
            "token_budget": record.token_budget,
            "num_running": len(record.running),
            "num_waiting": len(record.waiting),
            "num_preempted": len(record.preempted),
            "free_blocks": free,
            "cached_blocks": self._pool.num_cached_free if size else -1,
            "owned_blocks": size - 1 - free if size else -1,
            "unused_slots": self._num_unused_slots,
        }
        for name, column in self._columns.items():
            column.append(values[name])
        self._pool.finish(record)
        for request_id in record.finished:
            self._end(request_id, record.finish_reasons.get(request_id, ""), record.step, end)

    def _read_chunk(self, chunk: Chunk, record: StepRecord, start: float, end: float) -> None:
        request_id = chunk.request_id
        progress = self._progress(request_id)
        if progress.first_scheduled is None and request_id in record.admitted:
            progress.first_scheduled = (record.step, start)
            progress.num_cached_tokens = chunk.num_cached_tokens
        progress.num_recomputed_tokens += chunk.num_recomputed_tokens
        self._set_unused(request_id, len(self._pool.tables.get(request_id, ())), chunk.end)
        if has_token(chunk, record, progress.info):
            progress.saw_first_token |= chunk.end == progress.info.num_prompt_tokens
            progress.token_steps.append(record.step)
            progress.token_times.append(end)

    def _progress(self, request_id: str) -> _RequestProgress:
        progress = self._requests.get(request_id)
        if progress is None:  # added to the trace since collect() looked at its requests
            info = self._trace.requests.get(request_id) or RequestInfo(request_id, 0)
            progress = self._requests[request_id] = _RequestProgress(info)
        return progress

    def _end(self, request_id: str, reason: str, step: int, time: float) -> None:
        progress = self._progress(request_id)
        progress.finish_reason, progress.finished = reason, (step, time)
        self._drop_unused(request_id)

    def _set_unused(self, request_id: str, num_blocks: int, num_computed: int) -> None:
        unused = num_blocks * self._trace.block_size - num_computed
        self._num_unused_slots += unused - self._unused_slots.get(request_id, 0)
        self._unused_slots[request_id] = unused

    def _drop_unused(self, request_id: str) -> None:
        self._num_unused_slots -= self._unused_slots.pop(request_id, 0)


def has_token(chunk: Chunk, record: StepRecord, info: RequestInfo) -> bool:
    """Whether a chunk gave its request an output token, whose id a recording may have left out."""
    if chunk.sampled is not None:
        return True
    leaves_tokens_out = not info.prompt_token_ids
    failed = record.finish_reasons.get(chunk.request_id) in ("error", "abort")
    return leaves_tokens_out and not chunk.is_partial_prefill and not failed


def _summarise(requests: dict[str, RequestMetrics], steps: StepMetrics, timed: bool) -> Summary:
    def latencies(name: str) -> Distribution:
        spans = [span for request in requests.values() if (span := getattr(request, name)) is not None]
        return Distribution.of([span.seconds if timed else span.steps for span in spans])

    gaps = [request.itl_seconds if timed else request.itl_steps for request in requests.values()]
    num_steps = len(steps.step)
    duration = float(steps.time[-1] + steps.duration[-1] - steps.time[0]) if timed and num_steps else float(num_steps)
    num_scheduled = int(steps.num_tokens.sum())
    num_output = sum(request.num_output_tokens for request in requests.values())
    busy = steps.num_tokens > 0
    return Summary(
        unit="s" if timed else "steps",
        num_steps=num_steps,
        num_requests=len(requests),
        num_finished=sum(request.finish_step is not None for request in requests.values()),
        num_scheduled_tokens=num_scheduled,
        num_output_tokens=num_output,
        num_recomputed_tokens=int(steps.num_recomputed_tokens.sum()),
        num_cached_tokens=int(steps.num_cached_tokens.sum()),
        num_preemptions=int(steps.num_preempted.sum()),
        duration=duration,
        output_throughput=num_output / duration if duration > 0 else None,
        total_throughput=num_scheduled / duration if duration > 0 else None,
        mean_budget_use=_mean(steps.budget_use[busy]),
        mean_kv_use=_mean(steps.kv_use),
        peak_kv_use=max(_known(steps.kv_use).tolist(), default=None),
        ttft=latencies("ttft"),
        itl=Distribution.of(np.concatenate(gaps) if gaps else []),
        queue=latencies("queue"),
        prefill=latencies("prefill"),
        e2e=latencies("e2e"),
        first_step=int(steps.step[0]) if num_steps else 0,
    )


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _mean(values: np.ndarray) -> float | None:
    known = _known(values)
    return float(known.mean()) if len(known) else None
