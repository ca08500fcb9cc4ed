"""Simulate millions of requests with the engine's scheduler, in simulated time and in bounded memory.

A step is only added to the summary: sums, histograms of latencies whose bins are 1% wide, and
a time line of at most ``MAX_WINDOWS`` windows. A range of steps can be kept in full, as a Trace that begins with a
keyframe, so that every view can show the interesting part of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from workbench.base.progress import progress_bar
from workbench.base.tables import terminal_width, wrapped_text
from workbench.base.text import counted
from workbench.config import EngineConfig
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.policy import SchedulingPolicy, described
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.run import SimulatedRun
from workbench.trace import RequestInfo, Trace, TraceMeta
from workbench.trace.readings.latency import LatencyAccumulator
from workbench.trace.readings.metrics import Distribution, ended_words, latency_lines, number, run_length
from workbench.trace.readings.run_clock import GrowingClock, idle_words

MAX_WINDOWS = 512
"""Maximum number of windows in a time line; beyond it, neighbours are joined and windows get twice as long."""

BIN_WIDTH = 0.01
"""Relative width of a bin: percentiles are accurate to half of this, mean and maximum are exact."""

_SCALE = 1 / math.log1p(BIN_WIDTH)

_SAMPLED = 0
"""The sampled token of every request: nothing reads it; only ``max_tokens`` and ``max_model_len`` end a request."""


@dataclass(slots=True)
class Window:
    """The sums over consecutive steps.

    Attributes:
        start: Seconds since the start of the run.
        num_steps: Number of steps.
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
        """Add the next window to this one."""
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_scheduled += other.num_scheduled
        self.num_waiting += other.num_waiting
        self.num_free_blocks += other.num_free_blocks


class TimeLine:
    """The steps of a run in at most MAX_WINDOWS windows with equal numbers of steps."""

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
        window = self.windows[-1]
        window.num_steps += 1
        window.num_tokens += num_tokens
        window.num_scheduled += num_scheduled
        window.num_waiting += num_waiting
        window.num_free_blocks += num_free_blocks


class LatencyHistogram:
    """Counts of latencies in bins that are 1% wide.

    Attributes:
        count: Number of events.
        total: Sum of the latencies in seconds.
        max: Largest latency in seconds.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._bins: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        """Add one event, or several equal events."""
        bin_ = round(math.log(max(seconds, 1e-9)) * _SCALE)
        self._bins[bin_] = self._bins.get(bin_, 0) + times
        self.count += times
        self.total += seconds * times
        if seconds > self.max:
            self.max = seconds

    def join(self, other: LatencyHistogram) -> None:
        """Add the events of another histogram."""
        self.count += other.count
        self.total += other.total
        self.max = max(self.max, other.max)
        for bin_, times in other._bins.items():
            self._bins[bin_] = self._bins.get(bin_, 0) + times

    def percentile(self, percent: float) -> float | None:
        """The latency in seconds that this percentage of events does not exceed; None without events."""
        wanted, seen = self.count * percent / 100, 0
        for bin_, times in sorted(self._bins.items()):
            seen += times
            if seen >= wanted:
                return min(math.exp(bin_ / _SCALE), self.max)
        return None

    def distribution(self) -> Distribution:
        """Mean, percentiles and maximum."""
        if not self.count:
            return Distribution(0)
        p50, p95, p99 = (self.percentile(percent) for percent in (50, 95, 99))
        return Distribution(self.count, self.total / self.count, p50, p95, p99, self.max)


@dataclass(slots=True)
class SimulationSummary:
    """The numbers of a simulated run; all times are simulated seconds.

    Attributes:
        end: "done", "stuck" (requests are left that can never be scheduled) or "max_steps".
        num_steps: Number of steps.
        num_requests: Requests that arrived.
        num_finished: Requests that ended, aborted ones included.
        num_aborted: Requests that were aborted.
        num_scheduled: Scheduled requests (chunks) of all steps.
        num_tokens: Tokens of all steps.
        num_output_tokens: Tokens sampled.
        num_recomputed_tokens: Tokens recomputed after preemptions.
        num_cached_tokens: Tokens found in the prefix cache.
        num_loaded_tokens: Those of them that came from the second tier.
        num_preemptions: Number of preemptions.
        duration: Seconds from the start of the first step to the end of the last, with idle time.
        idle: Seconds of idle time (`workbench.trace.readings.run_clock`).
        at_work: ``duration`` without idle time.
        ttft: Time to first token.
        itl: Time between consecutive tokens of a request.
        e2e: Time from arrival to the end.
        time_line: The run in windows.
        recorded: The steps in ``record_steps``, in full; None without any.
    """

    end: str = "done"
    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_scheduled: int = 0
    num_tokens: int = 0
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_preemptions: int = 0
    duration: float = 0.0
    idle: float = 0.0
    at_work: float = 0.0
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    itl: LatencyHistogram = field(default_factory=LatencyHistogram)
    e2e: LatencyHistogram = field(default_factory=LatencyHistogram)
    time_line: TimeLine = field(default_factory=TimeLine)
    recorded: Trace | None = None

    @property
    def output_throughput(self) -> float:
        """Output tokens per second, without idle time."""
        return self.num_output_tokens / self.at_work if self.at_work else 0.0

    @property
    def total_throughput(self) -> float:
        """Scheduled tokens per second, without idle time."""
        return self.num_tokens / self.at_work if self.at_work else 0.0

    def to_row(self) -> dict[str, Any]:
        """One row of a table: every number, latencies as mean, p50, p95, p99 and max."""
        row = {name: getattr(self, name) for name in self.__slots__ if name.startswith("num_")}
        row |= {"end": self.end, "duration": self.duration, "idle": self.idle}
        row["output_throughput"] = self.output_throughput
        for name in ("ttft", "itl", "e2e"):
            found = getattr(self, name).distribution()
            row |= {f"{name}_{key}": getattr(found, key) for key in ("count", "mean", "p50", "p95", "p99", "max")}
        return row

    def __str__(self) -> str:
        """The run as `workbench.metrics` shows one of listed requests."""
        rate = (
            f"{number(self.output_throughput)} output and {number(self.total_throughput)} scheduled tokens per second"
        )
        without = " without idle time" if self.idle else ""
        width = terminal_width()
        heading = [
            f"{ended_words(self.num_finished, self.num_requests, self.num_aborted)} in "
            f"{counted(self.num_steps, 'step')}, {run_length(self.duration)}{idle_words(self.idle)}",
            *([] if self.end == "done" else [f"ended: {self.end}"]),
            f"tokens: {self.num_tokens:,} scheduled, {self.num_output_tokens:,} sampled, {self.num_cached_tokens:,} "
            f"found in the prefix cache, {self.num_recomputed_tokens:,} recomputed "
            f"({counted(self.num_preemptions, 'preemption')})",
            f"throughput: {rate}{without}",
        ]
        found = {name: getattr(self, name).distribution() for name in ("ttft", "itl", "e2e")}
        return "\n".join([wrapped_text("\n".join(heading), width), "", *latency_lines(found, width)])

    def __repr__(self) -> str:
        def line(name: str, histogram: LatencyHistogram) -> str:
            d = histogram.distribution()
            statistics = ", ".join(f"{key} {d.amount(key)}" for key in ("mean", "p50", "p99"))
            return f"{name}: {statistics}" if d.count else f"{name}: none"

        idle = " without idle time" if self.idle else ""
        return (
            f"SimulationSummary({self.end}: {self.num_finished:,} of {counted(self.num_requests, 'request')} in "
            f"{counted(self.num_steps, 'step')}, {run_length(self.duration)}, "
            f"{number(self.output_throughput)} output tokens/s{idle}; "
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
    """Run requests through the scheduler and keep only their summary.

    Args:
        config: Limits and policies.
        arrivals: The requests in order of ``arrival_step`` and ``arrives_at``; each is read when the run reaches it,
            unless the eviction is "belady", which needs all of them first.
        cost_model: Gives the duration of a step.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
        record_steps: Steps to keep in full, in ``recorded``.
        max_steps: Maximum number of steps; None for no limit.
        total: Number of requests, for the progress bar.
        progress: Show a progress bar of finished and aborted requests.

    Returns:
        The summary.

    Raises:
        ValueError: No schedule can serve a request.

    Example:
        >>> from workbench import CostModel, EngineConfig, read_generated, simulate_at_scale
        >>> at_once = {"process": "at_once"}
        >>> arrivals = read_generated({"num_requests": 500, "prompt": 50, "output": 4, "arrivals": at_once})
        >>> simulate_at_scale(EngineConfig(), arrivals, CostModel(fixed=0.01)).num_finished
        500
    """
    future = list(arrivals) if config.eviction == "belady" else ()
    run = SimulatedRun(config, servable(future or arrivals, config), cost_model, policy)
    run.scheduler.kv_cache.foresee(arrival.to_request() for arrival in future)
    summing = SummedRun(run, policy, record_steps)
    summary = summing.summary
    with progress_bar(total, "simulation", "request", shown=progress) as bar:
        while not run.over:
            if summary.num_steps == max_steps:
                summary.end = "max_steps"
                break
            if (batch := summing.step()) is not None:
                bar.update(len(batch.finished) + len(batch.aborted))
            if run.stuck:
                summary.end = "stuck"
                break
        summing.rest()
    return summary


def servable(arrivals: Iterable[Arrival], config: EngineConfig) -> Iterator[Arrival]:
    """The arrivals, each checked when it is reached: a ValueError if no schedule can serve it."""
    for arrival in arrivals:
        check_servable(arrival, config)
        yield arrival


def check_servable(arrival: Arrival, config: EngineConfig) -> None:
    """Raise a ValueError if no schedule can serve an arrival."""
    arrival.check_servable(config, _sample)


class SummedRun:
    """Take the steps of a run and add them to a summary.

    Args:
        run: The run.
        policy: Its policy, for the head of the steps that are kept.
        record_steps: Steps to keep in full.
    """

    def __init__(
        self, run: SimulatedRun, policy: SchedulingPolicy | None = None, record_steps: range = range(0)
    ) -> None:
        self.summary = SimulationSummary()
        self._run = run
        self._policy = policy
        self._record_steps = record_steps
        self._latencies = LatencyAccumulator()
        self._clock = GrowingClock()

    def step(self) -> ScheduledBatch | None:
        """Take one step and add it to the summary once it is complete; a record would take longer than the sums."""
        run, summary = self._run, self.summary
        recording = run.scheduler.step in self._record_steps
        if recording and summary.recorded is None:
            summary.recorded = self._begin_recording()
        recorded = summary.recorded if recording else None
        for request in run.arrive():
            self._latencies.arrive(request)
            summary.num_requests += 1
            if recorded is not None:
                recorded.add_request(_without_tokens(request))
        batch = run.advance(_sample)
        if batch is not None:
            self._add(batch)
        return batch

    def rest(self) -> None:
        """Add the steps whose output is still in flight when the run ends, and complete the summary."""
        for batch in self._run.remaining(_sample):
            self._add(batch)
        summary = self.summary
        clock = self._clock.clock()
        summary.duration, summary.idle, summary.at_work = clock.duration, clock.idle, clock.at_work
        summary.num_output_tokens = summary.ttft.count + summary.itl.count

    def _add(self, batch: ScheduledBatch) -> None:
        summary, chunks = self.summary, batch.chunks
        if summary.recorded is not None and batch.step in self._record_steps:
            summary.recorded.append(batch.to_record(timings=batch.timings))
        self._clock.add(batch.time, batch.end)
        times = self._latencies.add(batch)
        times.add_to(summary.ttft, summary.itl, summary.e2e)
        num_tokens = len(chunks)
        for chunk in chunks:
            if chunk.arm != "decode" or chunk.drafts:
                num_tokens += chunk.num_tokens - 1
                summary.num_cached_tokens += chunk.num_cached_tokens
                summary.num_recomputed_tokens += chunk.num_recomputed_tokens
        for load in batch.loads:
            summary.num_loaded_tokens += len(load.block_ids) * batch.block_size
        summary.num_steps += 1
        summary.num_scheduled += len(chunks)
        summary.num_tokens += num_tokens
        summary.num_finished += len(times.ended)
        summary.num_aborted += len(batch.aborted)
        summary.num_preemptions += len(batch.preempted)
        summary.time_line.add(batch.time, num_tokens, len(chunks), len(batch.waiting), batch.free_blocks)

    def _begin_recording(self) -> Trace:
        """A trace that begins with the current requests and their state."""
        scheduler = self._run.scheduler
        trace = Trace(TraceMeta(source="simulation", config=described(scheduler.config, self._policy)))
        for request in scheduler.requests.values():
            trace.add_request(_without_tokens(request))
        last_tokens = self._latencies.last_tokens(scheduler.step)
        trace.start_from(msgspec.structs.replace(scheduler.keyframe(), last_tokens=last_tokens))
        return trace


def _sample(request: Request) -> int:
    return _SAMPLED


def _without_tokens(request: Request) -> RequestInfo:
    """The facts about a request, without its prompt of meaningless numbers."""
    return msgspec.structs.replace(request.info(), prompt_token_ids=())
