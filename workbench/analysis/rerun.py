"""A recorded run, simulated again for its values alone: no record is kept, and it may take place in another process."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from workbench.analysis.fork import Past, hang_of, max_steps_of
from workbench.analysis.values import Seen, length_values, values_until
from workbench.config import EngineConfig
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival, arrival_order
from workbench.simulation.costs.at_worst import TOLERANCE, AtWorst
from workbench.simulation.costs.cost_model import CostModel, step_features
from workbench.simulation.costs.drift import Drift
from workbench.simulation.costs.step_model import Features
from workbench.simulation.costs.step_noise import Replayed, StepNoise
from workbench.simulation.follow_ups import FollowUps
from workbench.simulation.leap import FeatureCost, Leap, LeapingRun
from workbench.simulation.workload import made_up_token
from workbench.trace import Trace
from workbench.trace.readings.latency import LatencyAccumulator, RequestTimes, Timestamp
from workbench.trace.readings.prefix_hits import PrefixHits
from workbench.trace.readings.run_clock import GrowingClock, RunClock

SIZES = {"sequences": "sequences", "rows": "sequences and prompt tokens", "kv_tokens": "KV positions"}
"""Sizes of a step, as they are shown; a cost model is extrapolated to steps beyond the largest ones used for the fit.
"rows" are those of the model, which counts each request that prefills once beside its rows."""

LARGEST_FITTED = "the largest step used for the fit"
"""The step that the sizes of another one are compared with: warm-up, stalls and disturbed steps may be larger."""

WORTH_SAYING = 0.01
"""Share of extrapolated steps from which on a prediction says so."""

AT_WORST = -1
"""Number of the simulation in which a step with more rows than the fit has seen takes as long as it can (`AtWorst`)."""


@dataclass(frozen=True)
class Outcome:
    """The values of a simulated run.

    Attributes:
        values: Latencies in seconds and counts, by name, as `workbench.analysis.predict.values_of` gives them.
        end: "done", "stuck" or "max_steps".
        hang: Why it did not end; "" if it did.
        e2e: Seconds from arrival to the end, of each request that ended, and was not aborted.
        beyond: For each of ``SIZES`` the share of steps that are beyond the largest fitted ones, and the largest.
        spans: Arrival and end of each request; None for no end.
        seen: The values as the recording would show them, which may end before its requests do; empty for the same.
        idle: Seconds of idle time, which "duration" includes and "output_throughput" does not.
    """

    values: dict[str, float]
    end: str
    hang: str = ""
    e2e: dict[str, float] = field(default_factory=dict)
    beyond: dict[str, tuple[float, int]] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    spans: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    idle: float = 0.0

    @property
    def extrapolated(self) -> dict[str, tuple[float, int]]:
        """The sizes of ``beyond`` of which enough steps are beyond the fitted ones to be spoken of."""
        return {name: (share, largest) for name, (share, largest) in self.beyond.items() if share >= WORTH_SAYING}

    def is_bound(self, name: str) -> bool:
        """Whether a value is a lower bound: an aborted request had lasted longer than any that ended."""
        return name.startswith("e2e_") and self.values.get(name, 0.0) > max(self.e2e.values(), default=0.0)


@dataclass
class RecordedRun:
    """All that a simulation of a recorded run needs, without its records.

    Attributes:
        arrivals: The requests, at their recorded times.
        tokens: The output of each request.
        as_vllm: Let requests wait forever where vLLM does.
        max_steps: Maximum number of steps.
        model: Duration of a step.
        draws: Models of the repeated simulations.
        drift: The trend of the recording.
        noise: Deviations of its steps, for the repeated simulations.
        largest: Largest sizes of a step used for the fit, by the names of ``SIZES``.
        counted: Requests whose latencies count; None for all.
        until: The end of a recording in which requests had not ended; None if all had.
    """

    arrivals: list[Arrival]
    tokens: Mapping[str, Sequence[int]]
    as_vllm: bool
    max_steps: int
    model: CostModel
    draws: list[CostModel] = field(default_factory=list)
    drift: Drift = field(default_factory=Drift)
    noise: StepNoise | None = None
    largest: Mapping[str, int] = field(default_factory=dict)
    counted: Collection[str] | None = None
    until: float | None = None

    @classmethod
    def of(cls, trace: Trace, past: Past, model: CostModel, **fields: Any) -> RecordedRun:
        """The run of a trace, from its first step on, with its requests; fields that are not given have defaults."""
        all_arrivals = (past.timed_arrival(info, 0) for info in trace.requests.values())
        arrivals = [replace(each, prompt_token_ids=array("i", each.prompt_token_ids)) for each in all_arrivals]
        tokens = {each.request_id: past.tokens[each.request_id] for each in arrivals}
        return cls(arrivals, tokens, trace.meta.is_of_vllm, max_steps_of(trace), model, **fields)

    def without(self, request_ids: Collection[str]) -> RecordedRun:
        """The same run without some of its requests."""
        return replace(self, arrivals=[each for each in self.arrivals if each.request_id not in request_ids])

    def sample_token(self, request: Request) -> int:
        """The recorded token, or a made-up one after the end of the recording."""
        tokens, index = self.tokens[request.request_id], len(request.token_ids) - request.num_prompt_tokens
        return tokens[index] if index < len(tokens) else made_up_token(f"{request.request_id}:{request.num_tokens}")

    def next_tokens(self, request: Request, count: int) -> list[int]:
        """The tokens that ``sample_token`` will give."""
        index, length = len(request.token_ids) - request.num_prompt_tokens, request.num_tokens
        recorded = self.tokens[request.request_id][index : index + count]
        made_up = range(length + len(recorded), length + count)
        return [*recorded, *(made_up_token(f"{request.request_id}:{place}") for place in made_up)]

    def outcome(self, config: EngineConfig, draw: int | None = None, policy: SchedulingPolicy | None = None) -> Outcome:
        """Simulate the run.

        Args:
            config: The configuration.
            draw: Number of a repeated simulation, with noise; None and AT_WORST have none.
            policy: Decides order, chunk sizes and victims; None for vLLM's rules.

        Raises:
            ValueError: No schedule can serve a request, or vLLM's engine would end.
        """
        if draw is None or draw == AT_WORST:
            replayed = Replayed(self.model if draw is None else AtWorst(self.model, self.largest["rows"]), self.drift)
        else:
            replayed = Replayed(self.draws[draw], self.drift, self.noise, draw)
        cost = _Measuring(replayed, self.largest)
        summed, end = self._summed(config, cost, policy)
        values = summed.values(self.counted)
        seen = values if self.until is None else values | summed.latencies(self.counted, self.until)
        spans = {
            name: (times.arrival.seconds, times.end.seconds if times.end is not None else None)
            for name, times in summed.requests.items()
        }
        e2e = {
            name: end - begin for name, (begin, end) in spans.items() if end is not None and name not in summed.aborted
        }
        hang = summed.hang if end != "done" else ""
        return Outcome(values, end, hang, e2e, cost.beyond, seen, spans, summed.clock.idle)

    def times_of(self, request_id: str, config: EngineConfig) -> RequestTimes | None:
        """Simulate the run until a request has ended: its times, None if the run hangs before it arrives.

        Raises:
            ValueError: No schedule can serve a request, or vLLM's engine would end.
        """
        return self._summed(config, self.model, until=request_id)[0].requests.get(request_id)

    def _summed(
        self, config: EngineConfig, cost: FeatureCost, policy: SchedulingPolicy | None = None, until: str | None = None
    ) -> tuple[_Summed, str]:
        """The sums of a simulation, and how it ended."""
        pending = sorted(self.arrivals, key=arrival_order)
        if not self.as_vllm:
            for arrival in pending:
                arrival.check_servable(config, self.sample_token)
        loops = FollowUps(pending)
        run = LeapingRun(
            config,
            iter(loops.first()),
            cost,
            self.next_tokens,
            policy,
            as_vllm=self.as_vllm,
            follow=loops.ended if loops.depends else None,
        )
        run.scheduler.kv_cache.foresee(arrival.to_request() for arrival in pending)
        summed = _Summed(run.scheduler.kv_cache.block_pool.num_blocks)
        try:
            return summed, summed.run(run, self, until)
        except RuntimeError as assertion:
            raise ValueError(f"this setting would hang: vLLM's engine ends with {assertion}") from None


def outcome_of(
    run: RecordedRun, config: EngineConfig, draw: int | None, policy: SchedulingPolicy | None
) -> Outcome | ValueError:
    """One simulation, for a worker; the error of a setting that cannot be simulated is its result."""
    try:
        return run.outcome(config, draw, policy)
    except ValueError as problem:
        return problem


class _Arrived(NamedTuple):
    """The facts of a request that latencies depend on: the scheduler's request has its tokens, too many to keep.

    Attributes:
        prompt_token_ids: The first of them: a latency depends on whether they are known.
    """

    request_id: str
    num_prompt_tokens: int
    prompt_token_ids: Sequence[int]
    arrival_step: int
    arrival_time: float

    @classmethod
    def of(cls, request: Request) -> _Arrived:
        """A request that has just arrived."""
        first = request.token_ids[:1]
        return cls(request.request_id, request.num_prompt_tokens, first, request.arrival_step, request.arrival_time)


class _Summed:
    """Adds the steps of a run up."""

    def __init__(self, num_blocks: int) -> None:
        self._latencies = LatencyAccumulator(keeps_tokens=True)
        self.requests: dict[str, RequestTimes] = {}
        self.aborted: set[str] = set()
        self.hang = ""
        self._usable = num_blocks - 1
        self._kv_use: list[float] = []
        self._num_steps = self._num_preemptions = 0
        self._hits = PrefixHits()
        self._clock = GrowingClock()

    @property
    def clock(self) -> RunClock:
        """The clock of the steps so far."""
        return self._clock.clock()

    def run(self, run: LeapingRun, recorded: RecordedRun, until: str | None = None) -> str:
        """Take all steps, or those until a request has ended; how the run ended."""
        batch: ScheduledBatch | None = None
        end = "done"
        while not run.over:
            if run.scheduler.step == recorded.max_steps:
                end = "max_steps"
                break
            for request in run.arrive():
                self.requests[request.request_id] = self._latencies.arrive(_Arrived.of(request))
            if (done := run.advance(recorded.sample_token)) is not None:
                batch = done
                self._add(done, run.leaps.pop(done.step, None))
            if run.stuck:
                end = "stuck"
                break
            if until in self.requests and self.requests[until].end is not None:
                return end
        for batch in run.remaining(recorded.sample_token):
            self._add(batch, run.leaps.pop(batch.step, None))
        if end != "done" and batch is not None:
            self.hang = hang_of(batch.to_record(), self._num_steps)
        return end

    def _add(self, batch: ScheduledBatch, leap: Leap | None) -> None:
        if leap is None:
            self._kv_use.append(1.0 - batch.free_blocks / self._usable)
            self._num_steps += 1
        else:
            self._latencies.add_decodes(batch, leap.ends[:-1])
            self._kv_use += [1.0 - free / self._usable for free in leap.free_blocks]
            self._num_steps += len(leap.ends)
        self._latencies.add(batch)
        self._num_preemptions += len(batch.preempted)
        self.aborted.update(batch.aborted)
        self._hits.add_step(batch, lambda request_id: self.requests[request_id].request.num_prompt_tokens)
        self._clock.add(batch.time, batch.end)

    def latencies(self, counted: Collection[str] | None, until: float = math.inf) -> dict[str, float]:
        """Latencies by name, of what had happened up to a time."""

        def seconds(moment: Timestamp | None) -> float | None:
            return None if moment is None else moment.seconds

        return values_until(
            (
                Seen(
                    times.arrival.seconds,
                    seconds(times.first_scheduled),
                    seconds(times.first_token),
                    seconds(times.end),
                    [token.seconds for token in times.tokens or ()],
                    request_id in self.aborted,
                )
                for request_id, times in self.requests.items()
                if counted is None or request_id in counted
            ),
            until,
        )

    def values(self, counted: Collection[str] | None) -> dict[str, float]:
        """Latencies and counts, by name."""
        values = self.latencies(counted)
        num_output = sum(len(times.tokens or ()) for times in self.requests.values())
        values |= length_values(self.clock, num_output)
        values["num_steps"] = float(self._num_steps)
        values["num_preemptions"] = float(self._num_preemptions)
        values["num_no_first_token"] = float(sum(times.first_token is None for times in self.requests.values()))
        values["num_aborted"] = float(len(self.aborted))
        values["hit_rate"] = self._hits.rate or 0.0
        if self._kv_use:
            values["mean_kv_use"], values["peak_kv_use"] = fmean(self._kv_use), max(self._kv_use)
        return values


class _Measuring:
    """A cost of steps that compares their sizes with the largest ones used for the fit.

    Args:
        cost: The cost.
        largest: The largest sizes used for the fit, by the names of ``SIZES``.
    """

    def __init__(self, cost: Replayed, largest: Mapping[str, int]) -> None:
        self._cost = cost
        self._limits = [TOLERANCE * largest.get(name, math.inf) for name in SIZES]
        self._known = [name in largest for name in SIZES]
        self._num_steps = 0
        self._num_beyond, self._largest = [0] * len(SIZES), [0.0] * len(SIZES)

    def step_seconds(self, chunks: Sequence[Any]) -> float:
        """Duration of the next step, by its chunks."""
        return self.seconds(step_features(chunks))

    def seconds(self, features: Features) -> float:
        """Duration of the next step, by its features."""
        sequences, prefill_tokens, kv_tokens, _ = features
        self._num_steps += 1
        for index, size in enumerate((sequences, sequences + prefill_tokens, kv_tokens)):
            if size > self._largest[index]:
                self._largest[index] = size
            if size > self._limits[index]:
                self._num_beyond[index] += 1
        return self._cost.seconds(features)

    @property
    def beyond(self) -> dict[str, tuple[float, int]]:
        """For each size with a known largest value the share of steps far beyond it, and the largest size."""
        if not self._num_steps:
            return {}
        return {
            name: (count / self._num_steps, int(largest))
            for name, is_known, count, largest in zip(SIZES, self._known, self._num_beyond, self._largest)
            if is_known
        }
