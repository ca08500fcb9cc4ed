"""Predict the latencies of a recorded run under another configuration, with an interval and the error to expect.

A prediction simulates the recorded arrivals on a clock. Its values are those of the simulation that is shown, with the
cost model of all steps and without noise. Its intervals come from several more: with cost models fitted to other
stretches of the recording, and with the noise that steps had around the model. The mean of these would be a bad value:
if few steps tell two costs apart, their models are of two kinds, and the mean belongs to neither. The unchanged
configuration is predicted first: its error against the recording, which is known, widens every other
interval.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack

from workbench.analysis.check import COUNTS, Check
from workbench.analysis.flags import BY_VLLM_RULES, Server
from workbench.analysis.fork import Past, fork, in_the_same_memory, recorded_config, why_not_simulated
from workbench.analysis.intervals import NUM_DRAWS, Prediction, interval_of, range_of, widened
from workbench.analysis.log_run import SOURCE
from workbench.analysis.loops import Loops
from workbench.analysis.pauses import without_pauses
from workbench.analysis.rerun import AT_WORST, LARGEST_FITTED, SIZES, Outcome, RecordedRun, outcome_of
from workbench.analysis.spread_out import spread_out
from workbench.analysis.values import values_of
from workbench.analysis.whatif import WhatIf
from workbench.base.keyword_fields import ConfigChanges
from workbench.base.named_fields import show_fields
from workbench.base.progress import with_progress
from workbench.base.text import counted as counted_words
from workbench.config import EngineConfig
from workbench.scheduler.policy import SchedulingPolicy
from workbench.simulation.costs.cost_model import CostModel, as_step_cost, step_costs
from workbench.simulation.costs.drift import Drift
from workbench.simulation.costs.fit import FitReport, without_stalls, without_trend
from workbench.simulation.costs.step_noise import Replayed, StepNoise
from workbench.trace import Trace, TraceError
from workbench.trace.readings.contents import Contents
from workbench.trace.readings.metrics import RequestMetrics, still_without
from workbench.trace.readings.metrics_collector import MetricsCollector
from workbench.trace.readings.metrics_collector import metrics as measured
from workbench.trace.readings.prefix_hits import hit_rate
from workbench.trace.readings.two_sides import NOTHING

WORTH_PROCESSES = 200_000
"""Output tokens of all simulations together above which they are spread over processes, whose start takes a second."""

DRAWN_TOKENS = 800_000
"""Output tokens of all repeated simulations of a setting together: a long run is repeated less often."""

EXTRAPOLATED = "extrapolated"
"""Beginning of the notes on steps that are larger than any used for the fit."""

_SHARES_OF_POOL = ("mean_kv_use", "peak_kv_use")

LONGER_STEPS = (
    "intervals allow a step with more sequences and prompt tokens than any used for the fit to take as long as several "
    "of these"
)

MIN_DRAWS = 3
"""Number of repeated simulations of a long run."""


def whose_latencies(num_requests: int) -> str:
    """The requests that count in a prediction for a part of a run (``counted``), as a sentence part."""
    whose = counted_words(num_requests, "request")
    return f"latencies are those of {whose} in the chosen part, their whole time; all else is of the whole run"


class Predictor:
    """Predicts one recorded run under any configuration.

    Args:
        trace: The run, with a clock.
        cost_model: Duration of a step; None to fit it to the trace.
        others: More recordings to fit the cost model to.
        fit_from: Recordings to fit the cost model to instead of the trace.
        num_draws: Number of repeated simulations for intervals, 0 for none; a long run has fewer, down to MIN_DRAWS.
        counted: Requests whose latencies count, such as all but a benchmark's warm-up; None for all.
        executor: Runs the simulations; None for processes here. Any `concurrent.futures.Executor` will do.
        open_loop: Let requests arrive at their recorded times, even those that contain the answer to another one.
        measured: Values that were measured elsewhere, by name, such as those of spans; None for those of the trace.
        rough: Accept a cost model that is only good enough to compare two predictions; ``check.grade`` tells it.

    Attributes:
        model: The cost model.
        report: Its errors; None if the model was given.
        is_open_loop: Whether requests arrive at their recorded times, whatever is in them.

    Raises:
        ValueError: The trace has no clock, or the fit does not hold.

    Example:
        >>> from workbench import CostModel, Predictor, simulate
        >>> requests = [{"id": f"r{i}", "prompt": {"len": 300}, "arrival_time": i / 9} for i in range(9)]
        >>> model = CostModel(fixed=0.01, per_row=1e-4)
        >>> predictor = Predictor(simulate({"requests": requests}, cost_model=model), model)
        >>> predictor.predict(max_num_batched_tokens=64).intervals["itl_p99"].value > 0
        True
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
        executor: Executor | None = None,
        open_loop: bool = False,
        measured: Mapping[str, float] | None = None,
        rough: bool = False,
    ) -> None:
        self.trace = trace
        self._measured = measured
        self.is_open_loop = open_loop
        num_tokens = sum(map(len, self._past.tokens.values()))
        num_draws = min(num_draws, max(MIN_DRAWS, DRAWN_TOKENS // max(1, num_tokens)))
        self._known: dict[tuple[str, int | None], Outcome | ValueError] = {}
        self._executor = executor
        self._unchanged: Prediction | None = None
        self._counted = counted
        self.report: FitReport | None = None
        self._drift = Drift()
        self._noise: StepNoise | None = None
        if cost_model is None:
            sources = tuple(fit_from) or (trace, *others)
            steps = step_costs(*sources)
            self.model, self.report = CostModel.fit(*sources, steps=steps, rough=rough)
            if not fit_from:
                self._drift = self.report.drift
            steps = without_trend(without_stalls(steps)[0], self.report.drift)
            self._models = CostModel.bootstrap(steps, num_draws)
            self._noise = StepNoise.of(self.model, steps)
        else:
            self.model = as_step_cost(cost_model)
            self._models = [self.model] * num_draws

    @property
    def settings(self) -> dict[str, Any]:
        """The recorded value of each field that a prediction can change."""
        return recorded_config(self.trace).to_dict()

    @cached_property
    def recorded(self) -> dict[str, float]:
        """The values of the recording; empty if it has no clock, or if nothing in it was measured."""
        if self._measured:
            return dict(self._measured)
        if self.trace.meta.source.startswith(SOURCE):
            return {}
        return self._measured_here[0]

    @cached_property
    def _measured_here(self) -> tuple[dict[str, float], list[RequestMetrics]]:
        """The values of the recording, empty without a clock, and the requests that had not ended with it."""
        found = MetricsCollector(self.trace).collect()  # with the times of all tokens: too much to keep with the trace
        unended = [each for each in found.requests.values() if each.age is not None]
        try:
            return values_of(self.trace, self._counted, found), unended
        except TraceError:
            return {}, unended

    @property
    def unchanged(self) -> Prediction:
        """The recorded configuration, predicted like any other."""
        self.predict_all([])
        assert self._unchanged is not None
        return self._unchanged

    @property
    def unchanged_values(self) -> dict[str, float]:
        """The predicted values of the recorded configuration, up to the moment at which the recording ended."""
        values = {name: interval.value for name, interval in self.unchanged.intervals.items()}
        return {**values, **self.unchanged.seen}

    @cached_property
    def check(self) -> Check:
        """The recorded setting, predicted, beside what was measured."""
        is_cut = bool(self.unchanged.seen) and self._until is not None
        return Check(
            self.report, self.recorded, self.unchanged_values, self._without_pauses, is_cut, self._common_hit_rates
        )

    @property
    def _common_hit_rates(self) -> tuple[float, float] | None:
        """Recorded and predicted hit rates of the requests that were admitted in both; None if none was aborted.

        A request that is aborted while it waits may be admitted in the prediction alone.
        """
        if self._measured or not self.recorded or not any(record.aborted for record in self.trace):
            return None
        sides = [
            {name: each for name, each in measured(run).requests.items() if each.first_scheduled_step is not None}
            for run in (self.trace, self.simulate())
        ]
        rates = [hit_rate([side[name] for name in side if all(name in other for other in sides)]) for side in sides]
        return rates[0] or 0.0, rates[1] or 0.0

    @property
    def _without_pauses(self) -> dict[str, float]:
        """The measured values without pauses; empty if there are none, or if values were measured elsewhere."""
        if self._measured or not self.recorded or (run := without_pauses(self.trace)) is None:
            return {}
        return values_of(run, self._counted)

    @cached_property
    def errors(self) -> dict[str, float]:
        """Relative error of each value of the unchanged configuration: 0.1 if the prediction is 10% too high."""
        return self.check.errors

    def predict(self, **changes: Unpack[ConfigChanges]) -> Prediction:
        """The run under a changed configuration.

        Raises:
            ValueError: A field is unknown, or a value is outside its range.
        """
        return self.predict_all([changes])[0]

    def whatif(self, *, force: bool = False, progress: bool = False, **changes: Unpack[ConfigChanges]) -> WhatIf:
        """A changed configuration beside the recorded one, as ``workbench trace whatif`` prints it.

        Args:
            force: Give seconds even if the prediction of the recorded setting is far from what was measured.
            progress: Show a progress bar of simulations.
            **changes: EngineConfig fields to change; none for the recorded setting alone.

        Raises:
            ValueError: A field is unknown, or a value is outside its range.
        """
        predictions = self.predict_all([changes] if changes else [], progress=progress)
        prediction = predictions[0] if changes else self.unchanged
        return WhatIf(prediction, self.unchanged, self.check, Server.of(self.trace), force)

    def step_cost(self) -> Replayed:
        """The duration of each step of one simulated engine, without noise."""
        return Replayed(self.model, self._drift)

    def simulate(self, **changes: Unpack[ConfigChanges]) -> Trace:
        """The run under a changed configuration, without an interval."""
        fields = self._fields(changes)
        return fork(self.trace, cost_model=self.step_cost(), open_loop=self.is_open_loop, **fields)

    def _fields(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The changed fields, with the number of blocks that follows from another size of blocks.

        Raises:
            ValueError: A field is unknown, or a value is outside its range.
        """
        plain = {name: value for name, value in changes.items() if name != "policy"}
        return {**changes, **in_the_same_memory(recorded_config(self.trace), plain)}

    @cached_property
    def _past(self) -> Past:
        return Past(self.trace, open_loop=self.is_open_loop)

    @property
    def loops(self) -> Loops:
        """The requests that follow the ends of others, and how they are known."""
        return self._past.loops

    @cached_property
    def _run(self) -> RecordedRun:
        """The recorded run, to be simulated again."""
        if problem := why_not_simulated(self.trace):
            raise ValueError(problem)
        return self._run_of(self._past)

    def _run_of(self, past: Past) -> RecordedRun:
        return RecordedRun.of(
            self.trace,
            past,
            self.model,
            draws=self._models,
            drift=self._drift,
            noise=self._noise,
            largest=self.report.largest if self.report is not None else {},
            counted=self._counted,
            until=self._until,
        )

    @cached_property
    def _unended(self) -> list[RequestMetrics]:
        """The requests that had not ended when the recording did."""
        return self._measured_here[1]

    @property
    def has_unended(self) -> bool:
        """Whether requests had not ended when the recording did."""
        return bool(self._unended)

    @cached_property
    def _until(self) -> float | None:
        """The end of the recording, if requests had not ended then."""
        if not self.recorded or not self._unended:
            return None
        return max(self.trace[-1].end, *(info.arrival_time for info in self.trace.requests.values()))

    def outcomes(
        self, tasks: Sequence[tuple[Mapping[str, Any], int | None]]
    ) -> Iterator[tuple[int, Outcome | ValueError]]:
        """Simulate the run under several settings, in other processes if it is long.

        Args:
            tasks: The changed fields of each simulation, and the number of its draw; None for no noise.

        Yields:
            The index of a task and its outcome, as they become known; a ValueError for an impossible setting.
        """
        possible, known = [], []
        keys = [(repr(sorted(changes.items())), draw) for changes, draw in tasks]
        for index, (changes, draw) in enumerate(tasks):
            if _policy_in(changes) is None and keys[index] in self._known:
                known.append((index, self._known[keys[index]]))
                continue
            try:
                possible.append((index, self._task(self._past, changes, draw)))
            except ValueError as problem:
                known.append((index, problem))
        yield from known
        for place, outcome in self._simulated(self._run, [task for _, task in possible], num_planned=len(tasks)):
            index = possible[place][0]
            self._known[keys[index]] = outcome = self._if_possible(outcome)
            yield index, outcome

    def refuse_impossible(self, changes: Mapping[str, Any]) -> None:
        """Refuse a setting that cannot be simulated.

        Raises:
            ValueError: A field is unknown, or a value is outside its range.
        """
        self._task(self._past, changes, None)

    def _task(self, past: Past, changes: Mapping[str, Any], draw: int | None) -> _Task:
        """The arguments of a simulation after the run.

        Raises:
            ValueError: The setting is impossible.
        """
        policy = _policy_in(changes)
        fields = {name: value for name, value in self._fields(changes).items() if policy is None or name != "policy"}
        return past.changed(recorded_config(self.trace), fields), draw, policy

    def _simulated(
        self, run: RecordedRun, tasks: Sequence[_Task], *, num_planned: int, apart: bool = False
    ) -> Iterator[tuple[int, Outcome | ValueError]]:
        """Simulate a run, in other processes if the simulations together are long."""
        is_long = num_planned * sum(len(outputs) for outputs in run.tokens.values()) >= WORTH_PROCESSES
        # A policy is perhaps one of a notebook, and not known in another process.
        jobs = None if is_long and all(policy is None for _, _, policy in tasks) else 1
        yield from spread_out(outcome_of, run, tasks, executor=self._executor, jobs=jobs, apart=apart)

    def _if_possible(self, outcome: Outcome | ValueError) -> Outcome | ValueError:
        """The outcome, or the reason why it cannot be: somebody asked on before the answer had come."""
        if isinstance(outcome, ValueError) or not (wrong := self.loops.num_impossible(outcome.spans)):
            return outcome
        return ValueError(
            f"open_loop=True (--open-loop) has no answer here: {wrong} of {len(self.loops.follow_ups)} follow-ups "
            "would arrive before the answer that they contain has ended; without it each waits for that answer"
        )

    def predict_all(self, settings: Sequence[Mapping[str, Any]], *, progress: bool = False) -> list[Prediction]:
        """The run under several configurations, as `predict` gives it. Ctrl-C leaves out repeated simulations.

        Raises:
            ValueError: A field is unknown, or a value is outside its range.
        """
        if self._unchanged is None:  # together with the others: it widens their intervals
            settings = [{}, *settings]
        if not settings:
            return []
        for changes in settings:
            self.refuse_impossible(changes)  # before anything is shown or simulated
        # The first simulation of each setting comes before all others: with them Ctrl-C still leaves an answer.
        tasks = [(changes, draw) for draw in (None, *range(len(self._models))) for changes in settings]
        found: dict[int, Outcome] = {}
        try:
            for index, outcome in with_progress(
                self.outcomes(tasks), "prediction", "simulation", shown=progress, total=len(tasks)
            ):
                if isinstance(outcome, ValueError):
                    raise outcome
                found[index] = outcome
        except KeyboardInterrupt:  # an answer from the simulations that are there
            missing = [index for index in range(len(settings)) if index not in found]
            if len(missing) >= len(found):
                raise
            for place, outcome in self.outcomes([tasks[index] for index in missing]):  # processes end in any order
                if isinstance(outcome, ValueError):
                    raise outcome from None
                found[missing[place]] = outcome
        for place, changes in enumerate(settings):
            if not changes and self.recorded:  # the check tells its error, on steps of every recorded size
                found[place] = replace(found[place], beyond={})
        predictions, worst, shared = [], self._at_worst(settings, found), self._sharing_most(settings)
        rounds = [range(first, first + len(settings)) for first in range(0, len(tasks), len(settings))]
        whole = [each for each in rounds[1:] if all(index in found for index in each)]
        for place, changes in enumerate(settings):
            draws = [found[each[place]] for each in whole]
            prediction = self._prediction(changes, found[place], draws, worst.get(place), shared.get(place))
            if self._unchanged is None:
                self._unchanged = prediction
            else:
                predictions.append(prediction)
        return predictions

    def _prediction(
        self,
        changes: Mapping[str, Any],
        outcome: Outcome,
        runs: Sequence[Outcome],
        worst: Outcome | None,
        shared: Outcome | None,
    ) -> Prediction:
        errors = self.errors if changes else {}
        draws = {name: [run.values.get(name, math.nan) for run in runs] for name in outcome.values}
        intervals = {
            name: range_of(value, draws[name])
            if name in COUNTS
            else interval_of(value, draws[name], errors.get(name, 0.0))
            for name, value in outcome.values.items()
        }
        obstacle = outcome.hang or Server.of(self.trace).refusal(changes)
        notes = (*filter(None, [obstacle]), *self._notes(outcome, changes))
        if shared is not None:
            intervals = widened(intervals, shared.values)
            notes += (unknown_sharing(self._past.why_unknown),)
        if worst is not None:
            intervals = widened(intervals, worst.values)
            notes += (LONGER_STEPS,)
        seen = {name: value for name, value in outcome.seen.items() if name not in COUNTS}
        return Prediction(dict(changes), outcome, intervals, draws, notes, self.simulate, seen, obstacle)

    def _sharing_most(self, settings: Sequence[Mapping[str, Any]]) -> dict[int, Outcome]:
        """If it is not known what prompts share, the run of each change, by place, if they share the most possible."""
        places = [place for place, changes in enumerate(settings) if changes]
        if not self._past.why_unknown or not places:
            return {}
        self.__dict__.pop("_run", None)  # made again if somebody asks: two runs take twice the memory
        most = Past(self.trace, Contents(self.trace, assume_shared=True), open_loop=self.is_open_loop, loops=self.loops)
        run = self._run_of(most)
        tasks = [self._task(most, settings[place], None) for place in places]
        del most  # as large as the run
        found: dict[int, Outcome] = {}
        # Apart, even if there is one: it takes memory beside that of the recording here.
        for index, outcome in self._simulated(run, tasks, num_planned=len(tasks), apart=True):
            if isinstance(outcome, ValueError):
                raise outcome
            found[places[index]] = outcome
        return found

    def _at_worst(self, settings: Sequence[Mapping[str, Any]], found: Mapping[int, Outcome]) -> dict[int, Outcome]:
        """The settings, by place, of which steps have more rows than any used for the fit, with the longest steps."""
        places = [place for place in range(len(settings)) if "rows" in found[place].extrapolated]
        outcomes = self.outcomes([(settings[place], AT_WORST) for place in places]) if places else ()
        return {places[index]: outcome for index, outcome in outcomes if isinstance(outcome, Outcome)}

    def _notes(self, outcome: Outcome, changes: Mapping[str, Any]) -> tuple[str, ...]:
        notes = list(self.report.notes) if self.report is not None else []
        notes += [f"a recording of SGLang: {BY_VLLM_RULES}"] if self.trace.meta.is_of_sglang else []
        notes += [str(self.loops)] if self.loops.follow_ups and not self.is_open_loop else []
        notes += [memory] if (memory := self._memory_words(changes)) else []
        if not changes and (num_open := sum(each.waited is not None for each in self._unended)):
            notes.append(f"{still_without(num_open)} in what was recorded; a prediction serves them to their end")
        if self.report is not None:
            notes += [
                f"{EXTRAPOLATED}: {share:.0%} of the steps have more than the {self.report.largest[name]:,} "
                f"{SIZES[name]} of {LARGEST_FITTED}, up to {largest:,}"
                for name, (share, largest) in outcome.extrapolated.items()
            ]
        if changes and (nothing := self._nothing_changes(outcome, changes)):
            notes.append(nothing)
        return tuple(notes)

    def _memory_words(self, changes: Mapping[str, Any]) -> str:
        """The number of blocks of another size, as a sentence; "" if the size stays, or the number is given."""
        recorded = recorded_config(self.trace)
        size, num_blocks = changes.get("block_size", recorded.block_size), recorded.num_blocks
        if size == recorded.block_size or "num_blocks" in changes:
            return ""
        if (resized := self._fields(changes).get("num_blocks")) is None:
            return f"with block_size={size} there are still num_blocks={num_blocks}, whose memory may be another one"
        return f"block_size={size} in the same KV memory: num_blocks={resized}, recorded are {num_blocks}"

    def _nothing_changes(self, outcome: Outcome, changes: Mapping[str, Any]) -> str:
        """A sentence if a simulated run is as without the changes, to the last digit; "" if it is not.

        As many blocks of another pool are another share of it.
        """
        sides = [
            ({name: value for name, value in each.values.items() if name not in _SHARES_OF_POOL}, each.e2e)
            for each in (outcome, self.unchanged.outcome)
        ]
        if sides[0] != sides[1]:
            return ""
        equal = len({info.priority for info in self.trace.requests.values()}) < 2
        why = "all requests have the same priority: " if "policy" in changes and equal else ""
        pool = "; another pool: the same blocks are another share of it" if "num_blocks" in changes else ""
        return f"{why}{NOTHING}{pool}"


_Task = tuple[EngineConfig, int | None, SchedulingPolicy | None]
"""A configuration, the number of a draw, and a policy."""


def _policy_in(changes: Mapping[str, Any]) -> SchedulingPolicy | None:
    """The policy among changed fields, if it is an object and not a name."""
    return policy if isinstance(policy := changes.get("policy"), SchedulingPolicy) else None


def unknown_sharing(why: str) -> str:
    """The note of a prediction that does not know all equal prefixes, and why it does not."""
    return (
        f"the recording has neither token ids nor block hashes, and {why}: intervals hold all from the prefixes that "
        "its hits show to the most that prompts may share"
    )


def comparing(trace: Trace, num_draws: int = NUM_DRAWS) -> Predictor:
    """Predicts a run under settings that are compared with each other.

    Args:
        trace: The run.
        num_draws: Number of repeated simulations of each setting; 0 for one without noise alone.

    Raises:
        NoSeconds: The times of the run vary too much for that; ``plain`` says so.
        ValueError: The trace has no clock, or not all its steps, or too few.
    """
    predictor = Predictor(trace, num_draws=num_draws, rough=True)
    predictor.check.require("comparison")
    return predictor


def whatif(
    trace: Trace,
    cost_model: CostModel | None = None,
    *,
    force: bool = False,
    open_loop: bool = False,
    **config: Unpack[ConfigChanges],
) -> Trace:
    """Simulate the recorded requests under another configuration.

    They arrive at their recorded times, and those whose prompt contains the answer to another one when it has ended.

    Args:
        trace: A recorded run.
        cost_model: Duration of a step; None to fit it to the trace.
        force: Answer even if the prediction of the recorded setting is far from what was measured, or if two
            predictions can only be compared with each other.
        open_loop: Let all requests arrive at their recorded times; refused if an answer would come too late for that.
        **config: EngineConfig fields to change; none to predict the run as it was. Blocks of another ``block_size``
            take the same memory: ``num_blocks`` follows unless it is given too.

    Returns:
        The simulated trace, whose ``timings["forward"]`` is the duration of each step. The table of the command, with
        both settings, intervals and the error of the prediction, is ``Predictor(trace).whatif(max_num_seqs=16)``.

    Raises:
        ValueError: The fit or the check of the recorded setting does not hold, a field is unknown, a value is outside
            its range, or more drafts are asked for than the recording has.

    Example:
        >>> from workbench import simulate
        >>> from workbench import CostModel
        >>> requests = [{"id": "a", "prompt": {"len": 100}, "max_tokens": 2, "arrival_time": 0.5}]
        >>> trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.1))
        >>> faster = trace.whatif(CostModel(fixed=0.05))
        >>> round(faster.metrics().requests["a"].e2e.seconds, 3)
        0.1
    """
    predictor = Predictor(trace, cost_model, num_draws=0, open_loop=open_loop, rough=True)
    predictor.refuse_impossible(config)
    if cost_model is None and not force:
        predictor.check.require()
    if open_loop:
        predictor.predict(**config)  # which refuses what cannot be
    return predictor.simulate(**config)


show_fields(EngineConfig, whatif)
