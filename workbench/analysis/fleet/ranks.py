"""The data-parallel ranks of one vLLM server, as recorded: predicted together, behind vLLM's choice between them.

Each request arrives at the server, at its recorded time, and the router of the recorded version chooses its rank. So
another setting, or another number of ranks, may send it elsewhere. Ranks that wait for each other in every step, as
those of a mixture of experts do, are simulated as if they did not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from workbench.analysis.fleet.simulate import FleetRun, run_fleet
from workbench.analysis.fork import Past, hang_of, max_steps_of, recorded_config, why_not_simulated
from workbench.analysis.loops import Loops, find_loops, turns_of
from workbench.analysis.predict import NUM_DRAWS, Predictor
from workbench.analysis.rerun import Outcome
from workbench.analysis.values import Seen, latency_values, values_until
from workbench.base.field_checks import integer
from workbench.config import EngineConfig
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.step_noise import Replayed
from workbench.simulation.workload import made_up_token
from workbench.trace import Trace
from workbench.trace.readings.contents import Contents, Numbers
from workbench.trace.readings.latency import Latency
from workbench.trace.readings.metrics import RequestMetrics, TraceMetrics
from workbench.trace.readings.metrics_collector import merge_metrics
from workbench.trace.readings.metrics_collector import metrics as metrics_of
from workbench.trace.run_zero import seconds_late

RANKS = "data_parallel_size"
"""vLLM's field for the number of ranks."""

MAX_RANKS = 1024


class RanksPredictor(Predictor):
    """Predicts the run of all ranks; ``data_parallel_size`` is one more field that can be changed.

    Args:
        traces: The recordings of one run by rank, as `workbench.trace.readings.fleet.Fleet.traces` has them.
        others: More recordings to fit the cost model to.
        fit_from: Recordings to fit the cost model to instead.
        num_draws: Number of repeated simulations for intervals; 0 for none.
        counted: Requests whose latencies count; None for all.
        open_loop: Let requests arrive at their recorded times, even those that contain the answer to another one.
        measured: Values that were measured elsewhere, by name; None for those of the traces.
        rough: Accept a cost model that is only good enough to compare two predictions.

    Raises:
        ValueError: The recordings have different settings, one request, no clock or no first step, or the fit does not
            hold.
    """

    def __init__(
        self,
        traces: Mapping[str, Trace],
        *,
        others: Sequence[Trace] = (),
        fit_from: Sequence[Trace] = (),
        num_draws: int = NUM_DRAWS,
        counted: Collection[str] | None = None,
        open_loop: bool = False,
        measured: Mapping[str, float] | None = None,
        rough: bool = False,
    ) -> None:
        first, *rest = traces.values()
        fits: dict[str, Any] = {"others": [*rest, *others], "fit_from": fit_from}
        options: dict[str, Any] = {"open_loop": open_loop, "measured": measured, "rough": rough}
        super().__init__(first, **fits, num_draws=num_draws, counted=counted, **options)
        self.traces = dict(traces)
        for name, trace in self.traces.items():
            if recorded_config(trace) != recorded_config(first):
                raise ValueError(f"{name} was recorded under other settings than {next(iter(traces))}")
            if problem := why_not_simulated(trace, name):
                raise ValueError(problem)
        numbers = Numbers()
        self._late = seconds_late(self.traces)
        contents = {name: Contents(trace, numbers) for name, trace in self.traces.items()}
        self._loops = find_loops(
            turn for name, trace in self.traces.items() for turn in turns_of(trace, contents[name], self._late[name])
        )
        self._pasts = {
            name: Past(trace, contents[name], open_loop=open_loop, loops=self._loops)
            for name, trace in self.traces.items()
        }
        self._arrivals = [arrival for name in self.traces for arrival in self._arrivals_of(name)]
        self._tokens = {
            request_id: tokens for past in self._pasts.values() for request_id, tokens in past.tokens.items()
        }
        if len({arrival.request_id for arrival in self._arrivals}) < len(self._arrivals):
            raise ValueError("two ranks have a request with the same id: the folder holds more than one run")

    def _arrivals_of(self, name: str) -> Iterator[Arrival]:
        """A rank's requests, at their times on the clock of the rank that started first."""
        late = self._late[name]
        for info in self.traces[name].requests.values():
            arrival = self._pasts[name].timed_arrival(info, 0)
            seen, at = (arrival.arrives_at or 0.0) + late, info.arrival_time + late
            yield dataclasses.replace(arrival, arrives_at=seen, arrival_time=at, arrival_step=0)

    @property
    def settings(self) -> dict[str, Any]:
        """The recorded value of each field that a prediction can change, and the number of ranks."""
        return {**super().settings, RANKS: len(self.traces)}

    @property
    def loops(self) -> Loops:
        """The requests that follow the ends of others on any rank."""
        return self._loops

    @cached_property
    def _measured_here(self) -> tuple[dict[str, float], list[RequestMetrics]]:
        """The values of all ranks together, and the requests that had not ended with the recording."""
        together = {name: (metrics_of(its), self._late[name]) for name, its in self.traces.items()}
        requests = [each for its, _ in together.values() for each in its.requests.values()]
        values = latency_values(merge_metrics(together), self._counted)
        return values, [each for each in requests if each.age is not None]

    def simulate_ranks(self, changes: Mapping[str, Any], draw: int | None = None) -> FleetRun:
        """The run of all ranks under a changed configuration.

        Args:
            changes: The changed fields.
            draw: Number of a repeated simulation, with noise; None for the one without.

        Raises:
            ValueError: A field is unknown, a value is outside its range, or no schedule can serve a request.
        """
        count, config = self._setting(changes)
        model, noise = (self.model, None) if draw is None else (self._models[draw], self._noise)
        costs = [Replayed(model, self._drift, noise, (draw or 0) * MAX_RANKS + rank) for rank in range(count)]
        return run_fleet(
            self._arrivals,
            [config] * count,
            costs,
            router="vllm",
            sample_token=self._sample_token,
            max_steps=max(map(max_steps_of, self.traces.values())),
        )

    def _setting(self, changes: Mapping[str, Any]) -> tuple[int, EngineConfig]:
        """The number of ranks, and the configuration of each."""
        unknown = {rank: why for rank, past in self._pasts.items() if (why := past.why_unknown)}
        if changes and unknown:
            rank, why = next(iter(unknown.items()))
            raise ValueError(
                f"the recording of {rank} has neither token ids nor block hashes, and {why}: the prefixes that other "
                "settings would find are unknown"
            )
        count = integer(RANKS, changes.get(RANKS, len(self.traces)), 1, MAX_RANKS)
        fields = self._fields(changes)
        recorded = recorded_config(self.trace)
        # Each rank refuses what it cannot answer.
        configs = [past.changed(recorded, fields) for past in self._pasts.values()]
        return count, configs[0]

    def _fields(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return super()._fields({name: value for name, value in changes.items() if name != RANKS})

    def refuse_impossible(self, changes: Mapping[str, Any]) -> None:
        """See `Predictor.refuse_impossible`."""
        self._setting(changes)

    def _sample_token(self, request: Request) -> int:
        tokens, index = self._tokens[request.request_id], request.num_output_tokens
        return tokens[index] if index < len(tokens) else made_up_token(f"{request.request_id}:{request.num_tokens}")

    def outcomes(
        self, tasks: Sequence[tuple[Mapping[str, Any], int | None]]
    ) -> Iterator[tuple[int, Outcome | ValueError]]:
        """See `Predictor.outcomes`; one after the other."""
        for index, (changes, draw) in enumerate(tasks):
            try:
                yield index, self._if_possible(self._outcome(self.simulate_ranks(changes, draw)))
            except ValueError as problem:
                yield index, problem

    def simulate(self, **changes: Any) -> Trace:
        """Refused: every rank has a trace (`simulate_ranks`)."""
        raise ValueError(
            f"the ranks of a prediction have a trace each: predict the recording of one rank, without {RANKS}, to save "
            "its own"
        )

    def _notes(self, outcome: Outcome, changes: Mapping[str, Any]) -> tuple[str, ...]:
        notes = super()._notes(outcome, changes)
        if len({made.key_id for trace in self.traces.values() if (made := trace.meta.prefix_hashes)}) > 1:
            notes += ("the ranks' block hashes have different keys: prefixes shared across ranks are unknown",)
        return notes

    def _outcome(self, run: FleetRun) -> Outcome:
        metrics: TraceMetrics = run.metrics()
        stopped = [trace for trace in run.traces if trace.end not in ("", "done")]
        hang = hang_of(stopped[0][-1], len(stopped[0])) if stopped else ""
        ended = {
            name.partition("/")[2]: request
            for name, request in metrics.requests.items()
            if request.e2e is not None and request.e2e.seconds is not None
        }
        lasted = {name: request.e2e.seconds or 0.0 for name, request in ended.items() if request.e2e is not None}
        e2e = {name: seconds for name, seconds in lasted.items() if ended[name].finish_reason != "abort"}
        values, end = latency_values(metrics, self._counted), stopped[0].end if stopped else "done"
        spans = {name: (run.choices[name].time, run.choices[name].time + seconds) for name, seconds in lasted.items()}
        seen: dict[str, float] = {}
        if self._until is not None:
            times = {name: choice.time for name, choice in run.choices.items()}
            seen = values | values_until(map(partial(_seen, times), metrics.requests.values()), self._until)
        return Outcome(values, end, hang, e2e, seen=seen, spans=spans, idle=metrics.summary.clock.idle)

    @cached_property
    def _until(self) -> float | None:
        """The end of the last rank's recording, if requests had not ended then."""
        if not self._unended:
            return None
        ends = [trace[-1].end + self._late[name] for name, trace in self.traces.items() if len(trace)]
        return max([*ends, *(arrival.arrives_at or 0.0 for arrival in self._arrivals)])


def _seen(times: Mapping[str, float], request: RequestMetrics) -> Seen:
    """The moments of a request of a simulated rank."""
    arrival = times[request.request_id]

    def after(latency: Latency | None) -> float | None:
        return None if latency is None or latency.seconds is None else arrival + latency.seconds

    moments = after(request.queue), after(request.ttft), after(request.e2e)
    return Seen(arrival, *moments, request.token_times, request.finish_reason == "abort")
