"""Millions of requests through the engine's own scheduler, in time, in bounded memory.

Nothing is kept of a step but what it adds to the summary: sums, histograms of latencies whose bins are 1 % wide, and
a time line of at most ``MAX_WINDOWS`` windows. A stretch of steps can be kept whole, as a Trace that begins with a
keyframe, so that every view can be opened on the place where it hurt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from tqdm.auto import tqdm

from workbench.engine.config import EngineConfig
from workbench.engine.cost_model import CostModel
from workbench.engine.latency_histogram import LatencyHistogram
from workbench.engine.policy import SchedulingPolicy, described
from workbench.engine.request import Request
from workbench.engine.simulated_run import SimulatedRun
from workbench.engine.trace_window import keyframe_of
from workbench.engine.workload import Arrival
from workbench.trace import RequestInfo, StepRecord, Trace, TraceMeta

MAX_WINDOWS = 512
"""Windows of a time line at most; when there are more, neighbours are joined and windows get twice as long."""

_SAMPLED = 0
"""The token that is always sampled: nothing reads it, and only ``max_tokens`` and ``max_model_len`` end a request."""


@dataclass(slots=True)
class Window:
    """Consecutive steps, added up.

    Attributes:
        start: Seconds since the start of the run.
        num_steps: Steps.
        num_tokens: Tokens scheduled.
        num_scheduled: Chunks, added up over the steps.
        num_waiting: Waiting requests, added up over the steps.
        num_free_blocks: Free KV blocks, added up over the steps.
    """

    start: float
    num_steps: int = 0
    num_tokens: int = 0
    num_scheduled: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0

    def join(self, other: Window) -> None:
        """Take in the window that follows."""
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_scheduled += other.num_scheduled
        self.num_waiting += other.num_waiting
        self.num_free_blocks += other.num_free_blocks


class TimeLine:
    """Steps in windows of equal numbers of steps, never more than MAX_WINDOWS of them."""

    def __init__(self) -> None:
        self.steps_per_window = 1
        self.windows: list[Window] = []

    def add(self, start: float, num_tokens: int, num_scheduled: int, num_waiting: int, num_free_blocks: int) -> None:
        """Add one step."""
        if not self.windows or self.windows[-1].num_steps == self.steps_per_window:
            if len(self.windows) == MAX_WINDOWS:
                for left, right in zip(self.windows[::2], self.windows[1::2]):
                    left.join(right)
                del self.windows[1::2]
                self.steps_per_window *= 2
            self.windows.append(Window(start))
        self.windows[-1].join(Window(start, 1, num_tokens, num_scheduled, num_waiting, num_free_blocks))


@dataclass(slots=True)
class SimulationSummary:
    """A simulated run in numbers. Seconds are simulated ones.

    Attributes:
        end: "done", "stuck" (requests are left that can never be scheduled) or "max_steps".
        num_steps: Steps.
        num_requests: Requests that arrived.
        num_finished: Requests that ended, aborted ones included.
        num_scheduled: Chunks of all steps: scheduled requests.
        num_tokens: Tokens of all steps.
        num_output_tokens: Tokens sampled.
        num_recomputed_tokens: Tokens computed again after preemptions.
        num_cached_tokens: Tokens found in the prefix cache.
        num_preemptions: Preemptions.
        duration: Seconds.
        ttft: Time to first token.
        itl: Time between tokens of a request that follow each other.
        e2e: From arrival to the end.
        time_line: The run in windows.
        recorded: The steps that were asked for, whole; None when none were.
    """

    end: str = "done"
    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_scheduled: int = 0
    num_tokens: int = 0
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    duration: float = 0.0
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    itl: LatencyHistogram = field(default_factory=LatencyHistogram)
    e2e: LatencyHistogram = field(default_factory=LatencyHistogram)
    time_line: TimeLine = field(default_factory=TimeLine)
    recorded: Trace | None = None

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.duration if self.duration else 0.0

    def to_row(self) -> dict[str, Any]:
        """One row of a table: every number, latencies as mean, p50, p95, p99 and max."""
        row = {name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")}
        row |= {"end": self.end, "duration": self.duration, "output_throughput": self.output_throughput}
        for name in ("ttft", "itl", "e2e"):
            row |= {f"{name}_{key}": value for key, value in asdict(getattr(self, name).distribution()).items()}
        return row

    def __repr__(self) -> str:
        def line(name: str, histogram: LatencyHistogram) -> str:
            d = histogram.distribution()
            return f"{name}: mean {d.mean:.4g} s, p50 {d.p50:.4g}, p99 {d.p99:.4g}" if d.count else f"{name}: none"

        return (
            f"SimulationSummary({self.end}: {self.num_finished} of {self.num_requests} requests in {self.num_steps} "
            f"steps, {self.duration:.6g} s, {self.output_throughput:.5g} output tokens/s; "
            f"{line('TTFT', self.ttft)}; {line('ITL', self.itl)})"
        )


def simulate_at_scale(
    config: EngineConfig,
    arrivals: Iterable[Arrival],
    cost_model: CostModel,
    *,
    policy: SchedulingPolicy | None = None,
    record_steps: range = range(0),
    max_steps: int | None = None,
    total: int | None = None,
    progress: bool = False,
) -> SimulationSummary:
    """Run requests through the scheduler and keep nothing but their summary.

    Args:
        config: Limits and policies.
        arrivals: The requests in order of ``arrival_step`` and ``arrives_at``; read one by one as the run gets there.
        cost_model: How long a step takes.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
        record_steps: Steps to keep whole, in ``recorded``.
        max_steps: Steps at most; None for no limit.
        total: Number of requests, for the progress bar.
        progress: Show a progress bar of requests that ended.

    Returns:
        The summary.
    """
    run = SimulatedRun(config, iter(arrivals), cost_model, policy)
    summing = _Summing(run, policy, record_steps)
    summary = summing.summary
    with tqdm(total=total, desc="simulation", unit="request", disable=not progress) as bar:
        while not run.over:
            if summary.num_steps == max_steps:
                summary.end = "max_steps"
                break
            record = summing.step()
            bar.update(len(record.finished) + len(record.aborted))
            if run.stuck:
                summary.end = "stuck"
                break
    summary.duration = run.now
    return summary


class _Summing:
    """Takes the steps of a run and adds them up."""

    def __init__(self, run: SimulatedRun, policy: SchedulingPolicy | None, record_steps: range) -> None:
        self.summary = SimulationSummary()
        self._run = run
        self._policy = policy
        self._record_steps = record_steps
        self._arrived_at: dict[str, float] = {}
        self._last_token_at: dict[str, float] = {}

    def step(self) -> StepRecord:
        """One step, added to the summary."""
        run, summary = self._run, self.summary
        recording = run.scheduler.step in self._record_steps
        if recording and summary.recorded is None:
            summary.recorded = self._begin_recording()
        recorded = summary.recorded if recording else None
        for request in run.arrive():
            self._arrived_at[request.request_id] = request.arrival_time
            summary.num_requests += 1
            if recorded is not None:
                recorded.add_request(_without_tokens(request))
        start = run.now
        record = run.step(lambda request: _SAMPLED)
        if recorded is not None:
            recorded.append(record)
        self._add_up(record, start)
        return record

    def _add_up(self, record: StepRecord, start: float) -> None:
        summary, now, last = self.summary, self._run.now, self._last_token_at
        chunks = record.chunks
        num_tokens = len(chunks)
        num_in_time = 0  # tokens that follow one of the step before: nearly all, and their gap is the step
        for chunk in chunks:
            if chunk.arm != "decode":
                num_tokens += chunk.num_tokens - 1
                summary.num_cached_tokens += chunk.num_cached_tokens
                summary.num_recomputed_tokens += chunk.num_recomputed_tokens
                if chunk.sampled is None:
                    continue
            request_id = chunk.request_id
            before = last.get(request_id)
            last[request_id] = now
            summary.num_output_tokens += 1
            if before == start:
                num_in_time += 1
            elif before is None:
                summary.ttft.add(now - self._arrived_at[request_id])
            else:
                summary.itl.add(now - before)
        if num_in_time:
            summary.itl.add(now - start, num_in_time)
        for ended, moment in ((record.aborted, start), (record.finished, now)):
            for request_id in ended:
                summary.e2e.add(moment - self._arrived_at.pop(request_id))
                last.pop(request_id, None)
        summary.num_steps += 1
        summary.num_scheduled += len(chunks)
        summary.num_tokens += num_tokens
        summary.num_finished += len(record.finished) + len(record.aborted)
        summary.num_preemptions += len(record.preempted)
        summary.time_line.add(start, num_tokens, len(chunks), len(record.waiting), record.free_blocks)

    def _begin_recording(self) -> Trace:
        """A trace of the requests that are there, from their state now."""
        scheduler = self._run.scheduler
        trace = Trace(TraceMeta(source="simulation", config=described(scheduler.config, self._policy)))
        for request in scheduler.requests.values():
            trace.add_request(_without_tokens(request))
        trace.start_from(keyframe_of(scheduler))
        return trace


def _without_tokens(request: Request) -> RequestInfo:
    """What a request asked for; its prompt is made of numbers that mean nothing."""
    return msgspec.structs.replace(request.info(), prompt_token_ids=())
