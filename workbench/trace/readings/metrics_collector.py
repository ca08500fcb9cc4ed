"""Collect metrics while a trace grows; each record is read once."""

from __future__ import annotations

import functools
import operator
import threading
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from workbench.trace.lines import RequestInfo
from workbench.trace.readings.block_replay import BlockReplay
from workbench.trace.readings.last_tokens import last_tokens_before
from workbench.trace.readings.latency import Latency, LatencyAccumulator, RequestTimes, Timestamp, span
from workbench.trace.readings.metrics import Distribution, RequestMetrics, Summary, TraceMetrics
from workbench.trace.readings.metrics_by_request import MetricsByRequest
from workbench.trace.readings.narrate import hits_max_model_len
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.readings.preempted_before import preempted_before
from workbench.trace.readings.prefix_hits import hit_rate
from workbench.trace.readings.run_clock import RunClock, run_clock
from workbench.trace.readings.speculation_metrics import SpeculationCounter
from workbench.trace.records import StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

_COUNTS = (
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
    "owned_blocks",
)
"""Integer columns of StepMetrics that each record has."""

_OF_POOL = ("cached_blocks", "unused_slots")
"""Integer columns of StepMetrics that need a replay of the pool."""


class _PoolColumns:
    """The columns of `_OF_POOL`, made when somebody asks for them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._blocks = BlockReplay.at_start_of(trace)
        self._columns: dict[str, array[Any]] = {name: array("q") for name in _OF_POOL}

    def up_to(self, num_steps: int) -> dict[str, array[Any]]:
        """The columns of the first steps of the trace."""
        blocks, (cached, unused), is_known = self._blocks, self._columns.values(), self._trace.num_blocks
        with self._lock:
            for index in range(len(cached), num_steps):
                record = self._trace[index]
                blocks.schedule(record)
                cached.append(blocks.num_cached_free if is_known else -1)
                unused.append(blocks.num_unused_slots)
                blocks.finish(record)
            return {name: column[:num_steps] for name, column in self._columns.items()}


class _StepColumns(Mapping[str, "array[Any]"]):
    """The columns of StepMetrics by name, copies at every use; those of the pool are made at their first one."""

    def __init__(self, known: dict[str, array[Any]], pool: _PoolColumns) -> None:
        self._known = known
        self._pool = pool

    def __getitem__(self, name: str) -> array[Any]:
        if name in _OF_POOL and name not in self._known:
            self._known |= self._pool.up_to(len(self._known["step"]))
        return self._known[name][:]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._known, *_OF_POOL)))

    def __len__(self) -> int:
        return len({*self._known, *_OF_POOL})


class _StepBefore(dict[int, int]):
    """The number of the step before a step, kept once for the tokens of all requests."""

    def __missing__(self, step: int) -> int:
        self[step] = before = step - 1
        return before


class _RequestProgress:
    """The metrics of a request so far."""

    def __init__(self, info: RequestInfo, times: RequestTimes) -> None:
        self.info = info
        self.times = times
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_preemptions = 0
        self.finish_reason = ""
        self.finish_step: int | None = None
        self.hit_max_model_len = False
        self.was_scheduled_before = False
        self.had_tokens_before = False

    def metrics(self, timed: bool, now: Timestamp, step_before: Mapping[int, int]) -> RequestMetrics:
        info, times, tokens = self.info, self.times, self.times.tokens or ()

        def latency(found: Latency | None) -> Latency | None:
            return found if timed or found is None else found._replace(seconds=None)

        return RequestMetrics(
            request_id=info.request_id,
            num_prompt_tokens=info.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_preemptions=self.num_preemptions,
            finish_reason=self.finish_reason,
            arrival_step=info.arrival_step,
            first_scheduled_step=times.first_scheduled.steps if times.first_scheduled else None,
            finish_step=self.finish_step,
            hit_max_model_len=self.hit_max_model_len,
            token_steps=tuple([step_before[token.steps] for token in tokens]),  # a timestamp is the end of its step
            token_times=tuple([token.seconds for token in tokens]) if timed else (),
            queue=latency(times.queue),
            prefill=latency(times.prefill),
            ttft=latency(times.ttft),
            decode=latency(times.decode),
            e2e=latency(times.e2e),
            age=latency(span(times.arrival, now)) if times.end is None else None,
            was_scheduled_before=self.was_scheduled_before and times.first_scheduled is None,
            had_tokens_before=self.had_tokens_before
            or times.token_before is not None
            or bool(tokens and times.first_token is None),
            token_before=times.token_before,
        )


class MetricsCollector:
    """Metrics of a trace; ``collect`` reads the steps appended since the last call.

    Args:
        trace: The trace, growing or not.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._num_read = 0
        self._latest: TraceMetrics | None = None
        self._requests: dict[str, _RequestProgress] = {}
        self._latencies = LatencyAccumulator(keeps_tokens=True)
        self._speculation = SpeculationCounter()
        self._pool = _PoolColumns(trace)
        # Of a run that has forgotten its beginning, the steps that are read tell the same.
        is_part = trace.whole is not trace
        self._outputs_before = outputs_before(trace) if is_part else {}
        self._preempted_before = preempted_before(trace) if is_part else {}
        self._floats: dict[str, array[Any]] = {name: array("d") for name in ("time", "duration")}
        self._counts: dict[str, array[Any]] = {name: array("q") for name in _COUNTS}

    def collect(self) -> TraceMetrics:
        """The metrics up to the latest step."""
        with self._lock:
            num_steps = len(self._trace)  # before the requests, which then include those of every step that is read
            if self._latest and num_steps == self._num_read and len(self._trace.requests) == len(self._requests):
                return self._latest
            for request_id, info in self._trace.requests.items():
                if request_id not in self._requests:
                    self._add_request(info)
            if num_steps and not self._num_read:
                self._latencies.start_from(last_tokens_before(self._trace))
            for index in range(self._num_read, num_steps):
                self._read(self._trace[index])
                self._num_read = index + 1
            known = {name: column[:] for name, column in {**self._floats, **self._counts}.items()}
            columns = _StepColumns(known, self._pool)
            timed = self._latencies.timed
            now = self._now(timed)
            before = _StepBefore()
            requests = MetricsByRequest(
                {request_id: progress.metrics(timed, now, before) for request_id, progress in self._requests.items()}
            )
            summary = _summarise(requests, columns, timed, self._first_arrival(timed))
            speculation = self._speculation.metrics()
            block_size = self._trace.block_size
            self._latest = TraceMetrics(summary, requests, columns, block_size, speculation, self._trace)
            return self._latest

    def _now(self, timed: bool) -> Timestamp:
        """The latest moment of the trace: the end of its last step, or an arrival since."""
        arrivals = [progress.times.arrival for progress in self._requests.values()]
        step, time = 0, 0.0
        if self._num_read:
            last = self._trace[self._num_read - 1]
            step, time = last.step + 1, last.end
        steps = max((arrival.steps for arrival in arrivals), default=0)
        return Timestamp(max(step, steps), max([time, *(arrival.seconds for arrival in arrivals if timed)]))

    def _first_arrival(self, timed: bool) -> float | None:
        """Seconds at which the first request arrived; None without a clock, or if earlier steps are missing."""
        if not timed or not self._num_read or self._trace[0].step:
            return None
        return min((progress.times.arrival.seconds for progress in self._requests.values()), default=None)

    def _read(self, record: StepRecord) -> None:
        self._latencies.add(record)
        self._speculation.add(record)
        requests, chunks = self._requests, record.chunks
        num_tokens = num_decode = len(chunks)
        num_recomputed = num_cached = 0
        # A decode of one token, as most chunks are, computes nothing again and has no hit.
        for chunk in [chunk for chunk in chunks if chunk.arm != "decode" or chunk.num_tokens > 1]:
            num_tokens += chunk.num_tokens - 1
            num_decode += chunk.num_tokens - 1 if chunk.arm == "decode" else -1
            progress = requests.get(chunk.request_id) or self._unknown(chunk.request_id)
            num_recomputed += chunk.num_recomputed_tokens
            progress.num_recomputed_tokens += chunk.num_recomputed_tokens
            if chunk.num_cached_tokens:
                num_cached += chunk.num_cached_tokens
                if chunk.request_id in record.admitted:
                    progress.num_cached_tokens = chunk.num_cached_tokens
        self._floats["time"].append(record.time)
        self._floats["duration"].append(record.duration)
        num_blocks = self._trace.num_blocks
        counts = (
            record.step,
            num_tokens,
            num_decode,
            num_recomputed,
            num_cached,
            record.token_budget,
            len(record.running),
            len(record.waiting),
            len(record.preempted),
            record.free_blocks,
            num_blocks - 1 - record.free_blocks if num_blocks else -1,
        )
        for column, count in zip(self._counts.values(), counts):  # in the order of _COUNTS
            column.append(count)
        for request_id in record.preempted:
            (requests.get(request_id) or self._unknown(request_id)).num_preemptions += 1
        begun = (*record.running, *record.preempted) if record.step and not self._num_read else record.resumed
        for progress in filter(None, map(requests.get, begun)):
            progress.was_scheduled_before = True
        ended = [(request_id, "abort") for request_id in record.aborted]
        ended += [(request_id, record.finish_reasons.get(request_id, "")) for request_id in record.finished]
        for request_id, reason in ended:
            progress = requests.get(request_id) or self._unknown(request_id)
            progress.finish_reason, progress.finish_step = reason, record.step
            progress.hit_max_model_len = hits_max_model_len(record, self._trace.requests.get(request_id))

    def _add_request(self, info: RequestInfo) -> _RequestProgress:
        request_id = info.request_id
        progress = self._requests[request_id] = _RequestProgress(info, self._latencies.arrive(info))
        progress.was_scheduled_before = request_id in self._preempted_before
        progress.had_tokens_before = bool(self._outputs_before.get(request_id))
        return progress

    def _unknown(self, request_id: str) -> _RequestProgress:
        """Add a request that a record names although the trace has no line for it."""
        return self._add_request(RequestInfo(request_id, 0))


def merge_metrics(parts: Mapping[str, tuple[TraceMetrics, float]]) -> TraceMetrics:
    """The metrics of several schedulers that ran side by side, as one.

    Args:
        parts: Metrics by name, each with the time in seconds at which its clock started.

    Returns:
        Metrics with the requests of all, named ``name/request_id``, and their steps in the order of their times.
    """
    requests = MetricsByRequest(
        {
            f"{name}/{request_id}": request
            for name, (metrics, _) in parts.items()
            for request_id, request in metrics.requests.items()
        }
    )
    names = ("time", "duration", *_COUNTS, *_OF_POOL)
    rows = [
        (row[0] + start, *row[1:])
        for metrics, start in parts.values()
        for row in zip(*(metrics.columns[name] for name in names))
    ]
    rows.sort(key=itemgetter(0))
    columns = {
        name: array("d" if name in ("time", "duration") else "q", map(itemgetter(index), rows))
        for index, name in enumerate(names)
    }
    timed = all(metrics.summary.unit == "s" for metrics, _ in parts.values() if metrics.summary.num_steps)
    block_size = next(iter(parts.values()))[0].block_size
    speculation = functools.reduce(operator.add, (metrics.speculation for metrics, _ in parts.values()))
    return TraceMetrics(_summarise(requests, columns, timed), requests, columns, block_size, speculation)


def summary_in_steps(found: TraceMetrics) -> Summary:
    """The summary of a run in steps, also of one with a clock: beside a run without a clock."""
    return _summarise(dict(found.requests), found.columns, timed=False)


def _summarise(
    requests: dict[str, RequestMetrics],
    steps: Mapping[str, array[Any]],
    timed: bool,
    first_arrival: float | None = None,
) -> Summary:
    unit = "s" if timed else "steps"
    num_steps = len(steps["step"])
    clock = RunClock(end=float(num_steps))
    if timed and num_steps:
        times = steps["time"]
        clock = run_clock(zip(times, map(operator.add, times, steps["duration"])), first_arrival)
    duration = clock.duration
    num_scheduled = sum(steps["num_tokens"])
    num_output = sum(request.num_output_tokens for request in requests.values())
    budget_use = [
        tokens / budget for tokens, budget in zip(steps["num_tokens"], steps["token_budget"]) if tokens and budget
    ]
    kv_use = [
        owned / (owned + free)
        for owned, free in zip(steps["owned_blocks"], steps["free_blocks"])
        if owned >= 0 and owned + free > 0
    ]
    prefills = [one for each in requests.values() if (one := each.prefill)]
    return Summary(
        unit=unit,
        num_steps=num_steps,
        num_requests=len(requests),
        num_finished=sum(request.finish_step is not None for request in requests.values()),
        num_scheduled_tokens=num_scheduled,
        num_output_tokens=num_output,
        num_recomputed_tokens=sum(steps["num_recomputed_tokens"]),
        num_cached_tokens=sum(steps["num_cached_tokens"]),
        hit_rate=hit_rate(requests.values()),
        num_preemptions=sum(steps["num_preempted"]),
        duration=duration,
        output_throughput=num_output / duration if duration > 0 else None,
        total_throughput=num_scheduled / duration if duration > 0 else None,
        mean_budget_use=fmean(budget_use) if budget_use else None,
        mean_kv_use=fmean(kv_use) if kv_use else None,
        peak_kv_use=max(kv_use, default=None),
        ttft=latency_distribution(requests.values(), "ttft", timed),
        itl=Distribution.of(chain.from_iterable(request.gaps(unit) for request in requests.values()), unit=unit),
        queue=latency_distribution(requests.values(), "queue", timed),
        prefill=Distribution.of(_in_unit(prefills, timed), unit=unit),
        e2e=latency_distribution(requests.values(), "e2e", timed),
        first_step=steps["step"][0] if num_steps else 0,
        clock=clock,
        num_aborted=sum(request.finish_reason == "abort" for request in requests.values()),
        num_failed=sum(request.finish_reason == "error" for request in requests.values()),
        num_unknown_gaps=sum(request.lacks_gap for request in requests.values()),
    )


def latency_distribution(requests: Collection[RequestMetrics], name: str, timed: bool) -> Distribution:
    """The "ttft", "queue" or "e2e" of some requests, in seconds or steps; the times so far of the others count too."""
    known = [span for request in requests if (span := getattr(request, name)) is not None]
    more = [span for request in requests if (span := request.so_far(name)) is not None]
    return Distribution.of(_in_unit(known, timed), _in_unit(more, timed), "s" if timed else "steps")


def _in_unit(latencies: Sequence[Latency], timed: bool) -> list[float]:
    """Latencies as numbers: seconds, or steps without a clock."""
    return [(latency.seconds or 0.0) if timed else float(latency.steps) for latency in latencies]


def metrics(trace: Trace) -> TraceMetrics:
    """Latencies per request, use per step and a summary; see workbench.trace.readings.metrics for every definition.

    On a growing trace only the steps since the last call are read.
    """
    return trace.reading("metrics", MetricsCollector).collect()
