"""Predict the latencies of a recorded run under another configuration, with an interval and the error to expect.

A prediction simulates the recorded arrivals on a clock, several times: with cost models fitted to other stretches of
the recording, and with the noise that steps had around the model. Its value is the mean, its interval comes from the
range. Without noise waits would be too short: an arrival meets a long step more often than a short one, and waits for
its rest. The unchanged configuration is predicted first: its error against the recording, which is known, widens every
other interval.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from workbench.analysis.check import COUNTS, Check
from workbench.analysis.fork import fork, why_hung
from workbench.config import EngineConfig
from workbench.costs.cost_model import CostModel, StepCost, step_costs
from workbench.costs.drift import Drift
from workbench.costs.fit import FitReport, without_stalls, without_trend
from workbench.costs.step_noise import Replayed, StepNoise
from workbench.formats.access_log import read_access_log
from workbench.readings.metrics import TraceMetrics, percentile
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival
from workbench.simulation.simulate import simulate_requests
from workbench.trace import Trace, TraceError, TraceMeta

SOURCE = "access log"
"""Beginning of the source of a trace that was simulated from a log: nothing in it was measured."""

NUM_DRAWS = 8
"""Number of repeated simulations that an interval comes from."""

MIN_SPREAD = 0.02
"""Smallest relative half-width of an interval: two runs of one server differ by that much."""

VALUES = ("ttft", "itl", "tpot", "queue", "e2e")
"""Latencies that are predicted, each as mean, p50, p90, p95, p99 and max; and "duration" and "output_throughput"."""

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def value_names() -> tuple[str, ...]:
    """Names of all predicted values."""
    return (*(f"{value}_{statistic}" for value in VALUES for statistic in STATISTICS), "duration", "output_throughput")


def values_of(trace: Trace, request_ids: Collection[str] | None = None) -> dict[str, float]:
    """The latencies of a run in seconds, by name: "ttft_mean", "itl_p99", "duration" and so on.

    Args:
        trace: A trace with a clock.
        request_ids: Requests to count; None for all.

    Raises:
        TraceError: The trace has no clock.
    """
    return latency_values(trace.metrics(), request_ids)


def latency_values(metrics: TraceMetrics, request_ids: Collection[str] | None = None) -> dict[str, float]:
    """The values of ``values_of``, for the metrics of one trace or of several.

    Raises:
        TraceError: The run has no clock.
    """
    if metrics.summary.unit != "s":
        raise TraceError("the trace has no clock: it holds steps, but not their times")
    columns = _latencies(metrics, request_ids)
    values: dict[str, float] = {}
    for name in VALUES:
        seconds = columns[name]
        if seconds:
            percentiles = [percentile(sorted(seconds), percent) for percent in (50, 90, 95, 99, 100)]
            values |= {f"{name}_{key}": value for key, value in zip(STATISTICS, (fmean(seconds), *percentiles))}
    values["duration"] = metrics.summary.duration
    values["output_throughput"] = metrics.summary.output_throughput or 0.0
    return values | counts_of(metrics)


def counts_of(metrics: TraceMetrics) -> dict[str, float]:
    """The values of a run that are no times, by name: steps, preemptions, hit rate, and use of KV blocks."""
    summary, columns = metrics.summary, metrics.columns
    computed = sum(columns["num_tokens"]) - sum(columns["num_decode_tokens"])
    counts = {
        "num_steps": float(summary.num_steps),
        "num_preemptions": float(summary.num_preemptions),
        "hit_rate": summary.num_cached_tokens / ((computed + summary.num_cached_tokens) or 1),
    }
    uses = {"mean_kv_use": summary.mean_kv_use, "peak_kv_use": summary.peak_kv_use}
    return counts | {name: use for name, use in uses.items() if use is not None and math.isfinite(use)}


def _latencies(metrics: TraceMetrics, request_ids: Collection[str] | None) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {name: [] for name in VALUES}
    for request in metrics.requests.values():
        if request_ids is not None and request.request_id not in request_ids:
            continue
        for name in ("ttft", "queue", "e2e"):
            latency = getattr(request, name)
            if latency is not None:
                columns[name].append(latency.seconds)
        if request.decode is not None and request.num_output_tokens > 1:
            assert request.decode.seconds is not None  # the trace has a clock
            columns["tpot"].append(request.decode.seconds / (request.num_output_tokens - 1))
        columns["itl"] += request.gaps("s")
    return columns


@dataclass(frozen=True)
class Interval:
    """A predicted value, with the range that the measured one is expected in.

    Attributes:
        value: The prediction in seconds; tokens per second for "output_throughput".
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Prediction:
    """A run under one configuration.

    Attributes:
        changes: The changed fields; empty for the unchanged configuration.
        trace: The simulated run, without noise.
        intervals: Every value by name, with its interval.
        draws: Every value by name in each of the repeated simulations; the k-th of all predictions share one draw.
        notes: Sentences that limit its use, such as a note on an extrapolation.
    """

    changes: Mapping[str, Any]
    trace: Trace
    intervals: Mapping[str, Interval]
    draws: Mapping[str, list[float]]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Interval:
        return self.intervals[name]


class Predictor:
    """Predicts one recorded run under any configuration.

    Args:
        trace: The run, with a clock.
        cost_model: Duration of a step; None to fit it to the trace.
        others: More recordings to fit the cost model to.
        fit_from: Recordings to fit the cost model to instead of the trace.
        num_draws: Number of repeated simulations for intervals; 0 for none.
        counted: Requests whose latencies count, such as all but a benchmark's warm-up; None for all.

    Attributes:
        model: The cost model.
        report: Its errors; None if the model was given.

    Raises:
        ValueError: The trace has no clock, or the fit does not hold.
    """

    def __init__(
        self,
        trace: Trace,
        cost_model: CostModel | None = None,
        *,
        others: Sequence[Trace] = (),
        fit_from: Sequence[Trace] = (),
        num_draws: int = NUM_DRAWS,
        counted: Collection[str] | None = None,
    ) -> None:
        self.trace = trace
        self._counted = counted
        self.report: FitReport | None = None
        self._drift = Drift()
        self._noise: StepNoise | None = None
        if cost_model is None:
            sources = tuple(fit_from) or (trace, *others)
            self.model, self.report = CostModel.fit(*sources)
            if not fit_from:
                self._drift = self.report.drift
            steps = without_trend(without_stalls(step_costs(*sources))[0], self.report.drift)
            self._models = CostModel.bootstrap(steps, num_draws)
            self._noise = StepNoise.of(self.model, steps)
        else:
            self.model = cost_model
            self._models = [cost_model] * num_draws

    @cached_property
    def recorded(self) -> dict[str, float]:
        """The values of the recording; empty if it has no clock, or if nothing in it was measured."""
        if self.trace.meta.source.startswith(SOURCE):
            return {}
        try:
            return values_of(self.trace, self._counted)
        except TraceError:
            return {}

    @cached_property
    def unchanged(self) -> Prediction:
        """The recorded configuration, predicted like any other."""
        return self._predict({}, {})

    @property
    def unchanged_values(self) -> dict[str, float]:
        """The predicted values of the recorded configuration."""
        return {name: interval.value for name, interval in self.unchanged.intervals.items()}

    @cached_property
    def check(self) -> Check:
        """The recorded setting, predicted, beside what was measured."""
        return Check(self.report, self.recorded, self.unchanged_values)

    @cached_property
    def errors(self) -> dict[str, float]:
        """Relative error of each value of the unchanged configuration: 0.1 if the prediction is 10 % too high."""
        return self.check.errors

    def predict(self, **changes: Any) -> Prediction:
        """The run under a changed configuration.

        Raises:
            ValueError: A field is unknown, or a value is outside its range.
        """
        return self._predict(changes, self.errors)

    def simulate(self, **changes: Any) -> Trace:
        """The run under a changed configuration, without an interval."""
        return fork(self.trace, cost_model=Replayed(self.model, self._drift), **changes)

    def _predict(self, changes: Mapping[str, Any], errors: Mapping[str, float]) -> Prediction:
        trace = self.simulate(**changes)
        values = values_of(trace, self._counted)
        costs = [Replayed(model, self._drift, self._noise, seed) for seed, model in enumerate(self._models)]
        runs = [values_of(fork(self.trace, cost_model=cost, **changes), self._counted) for cost in costs]
        draws = {name: [run.get(name, math.nan) for run in runs] for name in values}
        intervals = {
            name: _range(value, draws[name]) if name in COUNTS else _interval(value, draws[name], errors.get(name, 0.0))
            for name, value in values.items()
        }
        return Prediction(dict(changes), trace, intervals, draws, self._notes(trace, changes))

    def _notes(self, trace: Trace, changes: Mapping[str, Any]) -> tuple[str, ...]:
        notes = list(self.report.notes) if self.report is not None and not changes else []
        if hang := why_hung(trace):
            notes.append(hang)
        if self.report is not None:
            notes += _extrapolations(trace, self.report.largest)
        if changes and (nothing := self._nothing_changes(trace, changes)):
            notes.append(nothing)
        return tuple(notes)

    def _nothing_changes(self, trace: Trace, changes: Mapping[str, Any]) -> str:
        """A sentence if every step of a simulated run is as without the changes; "" if one is not."""
        unchanged = self.unchanged.trace
        if [record.chunks for record in trace] != [record.chunks for record in unchanged]:
            return ""
        equal = len({info.priority for info in self.trace.requests.values()}) < 2
        why = "all requests have the same priority: " if "policy" in changes and equal else ""
        return f"{why}nothing changes, every step of the simulation is as before"


def _interval(value: float, draws: Sequence[float], error: float) -> Interval:
    """The mean of the draws and their range, wide enough for the error that the unchanged prediction has.

    Args:
        value: The prediction without draws.
        draws: The value in each draw.
        error: Relative error of the unchanged prediction.
    """
    known = [one for one in draws if math.isfinite(one)]
    if known:
        value = fmean(known)
    corrected = value / (1 + error) if error > -0.9 else value
    values = (value, corrected, *known)
    return Interval(value, min(values) * (1 - MIN_SPREAD), max(values) * (1 + MIN_SPREAD))


def _range(value: float, draws: Sequence[float]) -> Interval:
    """A value that is no time, and its range in the draws."""
    return Interval(value, min(value, *draws), max(value, *draws)) if draws else Interval(value, value, value)


def _extrapolations(trace: Trace, largest: Mapping[str, int]) -> list[str]:
    """One sentence for each kind of size in which steps go far beyond every measured step."""
    steps = step_costs(trace)
    if not len(steps):
        return []
    sequences, _, kv_tokens, _ = zip(*steps.features)
    sizes = {"sequences": sequences, "rows": steps.rows, "kv_tokens": kv_tokens}
    names = {"sequences": "sequences", "rows": "rows", "kv_tokens": "KV positions"}
    return [
        f"extrapolated: {beyond:.0%} of the steps have more than the {largest[name]} {names[name]} of the largest "
        f"measured step, up to {int(max(values))}"
        for name, values in sizes.items()
        if (beyond := fmean(value > 1.05 * largest[name] for value in values)) >= 0.01
    ]


def whatif(trace: Trace, cost_model: CostModel | None = None, *, force: bool = False, **config: Any) -> Trace:
    """Simulate the recorded arrivals, at their recorded times, under another configuration.

    Args:
        trace: A recorded run.
        cost_model: Duration of a step; None to fit it to the trace.
        force: Answer even if the prediction of the recorded setting is far from what was measured.
        **config: EngineConfig fields to change; none to predict the run as it was.

    Returns:
        The simulated trace, whose ``timings["forward"]`` is the duration of each step.

    Raises:
        ValueError: The fit or the check of the recorded setting does not hold, a field is unknown, a value is outside
            its range, or more drafts are asked for than the recording has.

    Example:
        >>> from workbench import simulate
        >>> from workbench.costs.cost_model import CostModel
        >>> requests = [{"id": "a", "prompt": {"len": 100}, "max_tokens": 2, "arrival_time": 0.5}]
        >>> trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.1))
        >>> faster = trace.whatif(CostModel(fixed=0.05))
        >>> round(faster.metrics().requests["a"].e2e.seconds, 3)
        0.1
    """
    predictor = Predictor(trace, cost_model, num_draws=0)
    if cost_model is None and not force:
        predictor.check.require()
    return predictor.simulate(**config)


def simulate_log(path: str | os.PathLike[str], config: EngineConfig, cost_model: StepCost, speed: float = 1.0) -> Trace:
    """The run that a server with this configuration and these costs would make of a log.

    Args:
        path: The access log.
        config: Configuration of the server.
        cost_model: Duration of a step, from a recording of such a server.
        speed: Factor by which requests arrive faster than in the log.
    """
    arrivals = read_access_log(path, speed=speed)
    meta = TraceMeta(source=f"{SOURCE} {Path(path).name}, simulated", config=config.to_dict())

    def sample_token(request: Request) -> int:
        return 3

    return simulate_requests(
        config, arrivals, sample_token, cost_model=cost_model, meta=meta, max_steps=100 * sum(map(_size, arrivals))
    )


def _size(arrival: Arrival) -> int:
    return arrival.sampling.max_tokens + len(arrival.prompt_token_ids)
