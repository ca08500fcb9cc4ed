"""The load of a fleet, and the make of one of its replicas, from a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from workbench.analysis.assumed_hits import AssumedHits
from workbench.analysis.check import Check
from workbench.analysis.fleet.fleet_row import FleetRow
from workbench.analysis.fleet.fleet_run import FleetRun
from workbench.analysis.fleet.load import CopiedTokens, scale_load
from workbench.analysis.fleet.router import Router
from workbench.analysis.fleet.sessions import Sessions
from workbench.analysis.fleet.simulate import MAX_REPLICAS, read_fleet, run_fleet
from workbench.analysis.fork import recorded_config, recorded_requests
from workbench.analysis.log_run import SOURCE
from workbench.analysis.loops import loops_of
from workbench.analysis.pauses import without_pauses
from workbench.analysis.values import values_of
from workbench.config import EngineConfig
from workbench.scheduler.request import Request
from workbench.simulation.access_log import is_access_log, read_log, refuse_units
from workbench.simulation.arrivals import Arrival, read_generated
from workbench.simulation.costs.cost_model import CostModel, StepCost, step_costs
from workbench.simulation.costs.drift import Drift
from workbench.simulation.costs.fit import FitReport, without_stalls, without_trend
from workbench.simulation.costs.step_noise import Replayed, StepNoise
from workbench.simulation.limits import MAX_STEPS
from workbench.simulation.log_units import UnitOfTime
from workbench.simulation.simulate import next_token
from workbench.simulation.summary import arrival_rate, arrival_times, summary_of
from workbench.simulation.workload import read_json_workload
from workbench.trace import Trace
from workbench.trace.readings.metrics_collector import metrics

NUM_MODELS = 8
"""Number of fits to parts of a recording."""

NUM_DRAWS = 4
"""Number of runs whose mean is the value of a layout."""


@dataclass(frozen=True, eq=False)
class Demand:
    """The load of a fleet, and the make of one replica.

    Attributes:
        arrivals: The requests, with times.
        config: Configuration of a replica.
        cost_model: Duration of a replica's step.
        source: The origin of the durations: they hold for that hardware alone.
        sample_token: Gives the tokens of a request.
        models: Cost models of fits to parts of the recording, whose spread is the fit's uncertainty; empty without one.
        sessions: Closed loops, which send requests beside the arrivals.
        load: Multiple of the load of the file.
        given: The requests of the file.
        how: The way to another load, see `workbench.analysis.fleet.load.scale_load`.
        seed: Seed of the requests that are left out, or of other users.
        summary: The requests of the file in a few words, as they were understood.
        noise: Deviations of recorded steps from the cost model; None without a recording.
        generate: The description of generated requests, which another seed draws again; None for others.
        recorded: The measured values of the recording that the requests are of, by name; empty without one.
        recorded_config: The configuration of that recording; None without one.
        fit: The errors of the cost model on steps of the recording that it was fitted to; None without one.
        scaled_from: The demand that `times` made this one of; None for one that was read.

    Example:
        >>> from workbench import Demand
        >>> requests = [{"id": f"r{i}", "prompt": {"len": 60}, "arrival_time": i / 20} for i in range(40)]
        >>> demand = Demand.read({"requests": requests, "cost_model": {"fixed": 0.02}})
        >>> [demand.times(load).run(2, "least_loaded").metrics().summary.num_requests for load in (1, 2)]
        [40, 80]
    """

    arrivals: list[Arrival]
    config: EngineConfig
    cost_model: CostModel
    source: str
    sample_token: Callable[[Request], int] = next_token
    models: Sequence[CostModel] = ()
    sessions: Sessions | None = None
    load: float = 1.0
    given: Sequence[Arrival] = ()
    how: str = "repeated"
    seed: int = 0
    generate: Mapping[str, Any] | None = None
    summary: str = ""
    noise: StepNoise | None = None
    recorded: Mapping[str, float] = field(default_factory=dict)
    recorded_config: EngineConfig | None = None
    fit: FitReport | None = None
    scaled_from: Demand | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls,
        source: Mapping[str, Any] | str | os.PathLike[str],
        *,
        cost_from: Trace | None = None,
        config: Mapping[str, Any] | None = None,
        load: float = 1.0,
        how: str = "repeated",
        seed: int = 0,
        time_unit: UnitOfTime | None = None,
        block_size: int | None = None,
        ignore_columns: Collection[str] = (),
        open_loop: bool = False,
        hit_rate: float | None = None,
    ) -> Demand:
        """The demand that a file describes.

        Args:
            source: A workload, a recording, or an access log or public trace (`workbench.simulation.access_log`).
            cost_from: Recording to fit the duration of a step to, instead of the workload's cost model; a recording
                that is the source is fitted to itself.
            config: Changes of the configuration.
            load: See `workbench.analysis.fleet.load.scale_load`, like the arguments below.
            how: "repeated" or "compressed".
            seed: Seed of the requests that are left out or come once more.
            time_unit: Unit of the times of a log, see `workbench.simulation.access_log.read_access_log`.
            block_size: Tokens of a block of a log.
            ignore_columns: Columns of a log to leave out.
            open_loop: Let follow-ups of a recording arrive at their recorded times.
            hit_rate: Hit rate of a log that does not say which prompts are alike; None for that of ``cost_from``.

        Raises:
            ValueError: The file is malformed, or nothing says how long a step takes.
        """
        sample_token: Callable[[Request], int] = next_token
        told = "the workload's cost_model"
        sessions, models, generate, summary, noise, loops = None, [], None, "", None, ""
        recorded: dict[str, float] = {}
        report: FitReport | None = None
        if isinstance(source, Mapping) or (not is_access_log(source) and Path(source).suffix == ".json"):
            refuse_units(source, time_unit, block_size, ignore_columns)
            content = read_json_workload(source)
            generate = content.get("generate")
            base, given, model, sessions = read_fleet(content, CostModel.fit(cost_from)[0] if cost_from else None, load)
        elif is_access_log(source):
            log = read_log(source, time_unit, block_size, ignore_columns=ignore_columns)
            base, given, model, summary = EngineConfig(), log.arrivals, None, str(log)
            if log.block_size is None and cost_from is not None:
                hits = AssumedHits.of(cost_from, hit_rate)
                given, loops = hits.apply(given, base.block_size), str(hits)
        else:
            refuse_units(source, time_unit, block_size, ignore_columns)
            trace = Trace.load(source)
            cost_from = cost_from or trace
            base, model = recorded_config(trace), None
            given, sample_token = recorded_requests(trace, open_loop=open_loop)
            loops = "" if open_loop else str(loops_of(trace))
            recorded = _measured(trace)
        if cost_from is not None:
            model, report = CostModel.fit(cost_from)
            steps = without_trend(without_stalls(step_costs(cost_from))[0], report.drift)
            models, noise = CostModel.bootstrap(steps, NUM_MODELS, seed), StepNoise.of(model, steps)
            told = f"a fit to {cost_from.meta.source}; on held-out steps the median error is {report.median_error:.1%}"
        if model is None:
            raise ValueError(
                "nothing says how long a step takes: give a recording of such a server to fit it to (--cost-from), or "
                'a workload with a cost_model, such as {"fixed": 0.01}'
            )
        given = list(given)
        summary = summary or f"{_name(source)}: {summary_of(given, base.block_size)}"
        summary = "\n".join(filter(None, [summary, loops]))
        return cls(
            arrivals=scale_load(given, load, how, seed),
            config=base.replace(**(config or {})),
            cost_model=model,
            source=told,
            sample_token=sample_token,
            models=models,
            sessions=sessions,
            load=load,
            given=given,
            how=how,
            seed=seed,
            generate=generate,
            summary=summary,
            noise=noise,
            recorded=recorded,
            recorded_config=base if recorded else None,
            fit=report,
        )

    @property
    def rate(self) -> float | None:
        """Arrivals per second, see `workbench.simulation.summary.arrival_rate`; None for sessions."""
        return arrival_rate(arrival_times(self.arrivals)) if self.sessions is None else None

    @cached_property
    def check(self) -> Check | None:
        """The recording, predicted with one replica under its own configuration and load; None without one."""
        if self.recorded_config is None:
            return None
        if self.scaled_from is not None:  # another load does not change it
            return self.scaled_from.check
        alone = self if self.load == 1 else self.times(1 / self.load)
        row = replace(alone, config=self.recorded_config).row(1, "round_robin", {})
        return Check(self.fit, self.recorded, row.values)

    def row(
        self,
        replicas: int,
        router: str | Router,
        slo: Mapping[str, float],
        seed: int = 0,
        model: CostModel | None = None,
    ) -> FleetRow:
        """The numbers of one layout: of one run with a seed, or the mean of several without one.

        Args:
            replicas: The number of replicas.
            router: The router.
            slo: A target by name; empty for none.
            seed: See `run`.
            model: See `run`.
        """
        models = self.models or [self.cost_model]
        draws = [(seed, model)] if seed else [(draw, models[draw % len(models)]) for draw in range(self.num_draws)]
        runs = (self.run(replicas, router, *draw) for draw in draws)
        return FleetRow.mean([FleetRow.of(run, slo, self.load, self.rate) for run in runs], slo)

    @property
    def num_draws(self) -> int:
        """Number of runs of a layout, which differ in the noise of steps and the times of other users."""
        varies = self.noise is not None or (self.load > 1 and self.how == "repeated" and self.generate is None)
        return NUM_DRAWS if varies else 1

    def times(self, factor: float) -> Demand:
        """The demand at so many times its load."""
        load = self.load * factor
        arrivals = scale_load(self.given, load, self.how, self.seed)
        sessions = self.sessions.with_load(load) if self.sessions else None
        return replace(self, arrivals=arrivals, sessions=sessions, load=load, scaled_from=self.scaled_from or self)

    def run(self, replicas: int, router: str | Router, seed: int = 0, model: CostModel | None = None) -> FleetRun:
        """The demand, served by so many replicas.

        Args:
            replicas: Their number.
            router: The router.
            seed: Seed of the router's random choices, and added to those of sessions, of generated requests, and of the
                requests that another load leaves out or repeats.
            model: Another cost model than the demand's.
        """
        arrivals, cost = self._drawn(seed) if seed else self.arrivals, model or self.cost_model
        costs: list[StepCost] = [cost] * replicas
        if self.noise is not None:
            costs = [Replayed(cost, Drift(), self.noise, seed * MAX_REPLICAS + index) for index in range(replicas)]
        return run_fleet(
            arrivals,
            [self.config] * replicas,
            costs,
            router=router,
            sample_token=CopiedTokens(self.sample_token, arrivals),
            seed=seed,
            sessions=self.sessions.with_seed(seed) if self.sessions else None,
            max_steps=100 * MAX_STEPS,
        )

    def _drawn(self, seed: int) -> list[Arrival]:
        """The requests of another seed."""
        generate = self.generate
        own = {**generate, "seed": generate.get("seed", 0) + seed} if generate is not None else None
        given = read_generated(own) if own is not None else self.given
        return scale_load(given, self.load, self.how, self.seed + seed)

    def fingerprint(self) -> str:
        """A text that is the same for the same demand alone."""
        digest = sha256(repr((self.config, self.cost_model, self.sessions)).encode())
        for arrival in self.arrivals:
            digest.update(repr((arrival.request_id, arrival.arrives_at, arrival.sampling.max_tokens)).encode())
            digest.update(repr(list(arrival.prompt_token_ids)).encode())
        return digest.hexdigest()[:16]


def _measured(trace: Trace) -> dict[str, float]:
    """The measured values of a recording without pauses; empty without any, or if requests had not ended with it."""
    if trace.meta.source.startswith(SOURCE) or any(each.age is not None for each in metrics(trace).requests.values()):
        return {}
    return values_of(without_pauses(trace) or trace)


def _name(source: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    return "the workload" if isinstance(source, Mapping) else Path(source).name
