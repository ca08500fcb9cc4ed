"""Find the setting that meets a target on a recorded workload: a sweep, then a close look at the best of it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from workbench.analysis.check import COUNTS, Check, shown
from workbench.analysis.flags import VLLM, Server
from workbench.analysis.fork import recorded_config
from workbench.analysis.intervals import NUM_DRAWS, Interval, Prediction
from workbench.analysis.predict import Predictor
from workbench.analysis.sweep import refuse_impossible_values
from workbench.analysis.values import value_names
from workbench.base.field_checks import number, suggestion
from workbench.base.on_demand import picture
from workbench.base.progress import progress_bar
from workbench.base.text import counted, duration
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace

NUM_FINALISTS = 4
"""Number of settings that are predicted with intervals after the sweep."""

MAX_RUNS = 2000
"""Maximum number of settings in a sweep."""

LOSES_RATIO, LOSES_SECONDS = 1.05, 0.01
"""A request loses if its end comes later by more than this factor and by more than this time."""

COSTS = 1.05
"""A value is named as the cost of a setting if it is worse by more than this factor."""

_PRICES = ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "tpot_mean", "e2e_mean", "output_throughput")

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}


def read_slo(slo: str | Mapping[str, float]) -> dict[str, float]:
    """A target as limits in seconds by name.

    Args:
        slo: Text such as "ttft_p99=1s,itl_p99=100ms", or a mapping of the same names to seconds. Names are those of
            ``value_names()``; "output_throughput" is a minimum, in tokens per second.

    Raises:
        ValueError: A name is unknown or given twice, or a limit is not a time.

    Example:
        >>> read_slo("ttft_p99=1s,itl_p99=100ms")
        {'ttft_p99': 1.0, 'itl_p99': 0.1}
    """
    if isinstance(slo, str):
        parsed: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in slo.split(","))):
            name, _, text = part.partition("=")
            match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(us|ms|s|min|)", text.strip())
            if match is None or name.strip() in parsed:
                raise ValueError(f"slo {part!r} must be NAME=TIME, once each, such as ttft_p99=1s or itl_p99=100ms")
            parsed[name.strip()] = float(match[1]) * UNITS[match[2]]
        slo = parsed
    known = value_names()
    for name in slo:
        if name not in known:
            raise ValueError(f"slo names {name!r}; the names are {', '.join(known)}{suggestion(name, known)}")
    if not slo:
        raise ValueError("slo is empty: give at least one limit, such as ttft_p99=1s")
    return {name: number(f"slo {name}", limit, 0.0, low_open=True) for name, limit in slo.items()}


def score(values: Mapping[str, float], slo: Mapping[str, float]) -> float:
    """The worst ratio of a value to its limit: 1 or less meets the target, and smaller is better."""
    return max(_ratio(name, values.get(name, math.nan), limit) for name, limit in slo.items())


def _ratio(name: str, value: float, limit: float) -> float:
    if math.isnan(value):
        return math.inf
    if name == "output_throughput":
        return limit / value if value else math.inf
    return value / limit


def default_grid(trace: Trace) -> dict[str, list[Any]]:
    """Settings around the recorded ones: the token budget, the number of seats, and the cap on prompt chunks."""
    config = recorded_config(trace)
    budget, seats = config.max_num_batched_tokens, config.max_num_seqs
    budgets = {max(64, round(budget * factor)) for factor in (0.25, 0.5, 1, 2, 4)} | {budget}
    floor = config.max_num_seqs  # a smaller budget than seats would starve decodes
    caps = {config.long_prefill_token_threshold, 0, max(16, budget // 4)}
    return {
        "max_num_batched_tokens": sorted(b for b in budgets if b >= min(floor, budget)),
        "max_num_seqs": sorted({max(1, seats // 2), seats, seats * 2}),
        "long_prefill_token_threshold": sorted(caps),
    }


@dataclass(frozen=True, eq=False)
class Candidate:
    """A setting with its prediction.

    Attributes:
        changes: The fields that differ from the recorded configuration.
        score: Worst ratio of a value to its limit.
        prediction: Values with intervals, and the simulated run.
        same_as_best: Whether it cannot be told from the chosen one: repeated simulations disagree about the better one.
        server: The server whose options are told.
    """

    changes: Mapping[str, Any]
    score: float
    prediction: Prediction
    same_as_best: bool = False
    server: Server = VLLM

    @property
    def flags(self) -> str:
        """The server's options for the changes; "" for none."""
        return self.server.flags(self.changes)

    def shown_values(self, names: Iterable[str]) -> dict[str, str]:
        """The predicted values of these names with their intervals, as texts."""
        return {
            name: f"{shown(name, found.value)} ({shown(name, found.low)} to {shown(name, found.high)})"
            for name in names
            if (found := self.prediction.intervals.get(name)) is not None
        }


@dataclass(frozen=True, eq=False)
class Tuning:
    """The answer of ``tune``.

    Attributes:
        slo: The limits by name, in seconds.
        best: The chosen setting.
        current: The recorded setting.
        runners_up: The next best settings.
        verdict: "meets", "misses" or "cannot tell": the target against the interval of the chosen setting.
        losers: Requests that end later than in the recorded setting, as (request, seconds before, seconds after).
        rows: Every setting of the sweep with its values; "pareto" marks those that no other one beats.
        check: The recorded setting, predicted, beside what was measured; known without any new run.
        settings: Names of the fields that the sweep changed.
        notes: Other sentences that help to read the answer.
    """

    slo: Mapping[str, float]
    best: Candidate
    current: Candidate
    runners_up: tuple[Candidate, ...]
    verdict: str
    losers: tuple[tuple[str, float, float], ...]
    rows: tuple[dict[str, Any], ...]
    check: Check
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def errors(self) -> Mapping[str, float]:
        """Relative error of the prediction of the recorded setting, by value."""
        return self.check.errors

    @property
    def misses(self) -> dict[str, float]:
        """The values of the chosen setting that miss their limits, each with its value over its limit, less 1."""
        values = {name: interval.value for name, interval in self.best.prediction.intervals.items()}
        ratios = {name: _ratio(name, values.get(name, math.nan), limit) for name, limit in self.slo.items()}
        return {name: ratio - 1 for name, ratio in ratios.items() if ratio > 1}

    @property
    def words_of_best(self) -> str:
        """The advice: nobody is told to take a setting that misses the target, or whose seconds cannot be trusted."""
        if self.check.caution:
            return "best"
        return "closest" if self.verdict == "misses" else "take"

    @property
    def costs(self) -> dict[str, tuple[float, float]]:
        """The values that the chosen setting makes worse by more than COSTS: as recorded, and with it."""
        before, after = (each.prediction.intervals for each in (self.current, self.best))
        pairs = {name: (before[name].value, after[name].value) for name in _PRICES if name in before and name in after}
        return {
            name: (old, new)
            for name, (old, new) in pairs.items()
            if (old / new if name == "output_throughput" and new else new / old if old else 1.0) > COSTS
        }

    @property
    def costs_sentence(self) -> str:
        """The same as a sentence; "" if nothing is worse."""
        worse = [f"{name} {shown(name, old)} to {shown(name, new)}" for name, (old, new) in self.costs.items()]
        return f"it costs {', '.join(worse)}" if worse else ""

    @property
    def verdict_sentence(self) -> str:
        """The verdict as a sentence."""
        if self.check.caution:
            return f"cannot tell whether it meets the target. {self.check.caution.removesuffix('.')}"
        if self.verdict == "misses":
            by = ", ".join(f"{name} by {miss:.0%}" for name, miss in self.misses.items())
            is_surely = all(other.score >= self.best.score for other in self.runners_up)
            closest = "this one is the closest" if is_surely else "none is surely closer than this one"
            return f"misses {by}; no setting of the sweep meets the target, and {closest}"
        return _VERDICTS[self.verdict]

    def _repr_html_(self) -> str | None:
        return picture("Tuning", self)

    def __repr__(self) -> str:
        lines = [f"target: {', '.join(f'{name} <= {shown(name, limit)}' for name, limit in self.slo.items())}"]
        if off := [f"{name} {self.errors[name]:+.0%}" for name in self.slo if name in self.errors]:
            lines.append(f"the prediction of the recorded setting is off by: {', '.join(off)}")
        lines += _candidate_lines(self.words_of_best, self.best, self.slo)
        if self.best.changes:
            lines.append(f"  {self.best.server.command(self.best.changes)}".rstrip())
        lines.append(f"  {self.verdict_sentence}")
        lines += [f"  {self.costs_sentence}"] if self.costs else []
        if self.losers:
            named = (f"{rid} {duration(old)} -> {duration(new)}" for rid, old, new in self.losers[:3])
            worst, ends = ", ".join(named), "ends" if len(self.losers) == 1 else "end"
            lines.append(f"  {counted(len(self.losers), 'request')} {ends} later than now: {worst}")
        if self.best.changes:
            lines += _candidate_lines("now", self.current, self.slo)
        for candidate in self.runners_up:
            words = "cannot tell from the first" if candidate.same_as_best else "next"
            lines += _candidate_lines(words, candidate, self.slo)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), str(self.check)])


_VERDICTS = {
    "meets": "meets the target with its whole interval",
    "cannot tell": "cannot tell whether it meets the target: the limit lies inside the interval",
}


def _candidate_lines(words: str, candidate: Candidate, slo: Mapping[str, float]) -> list[str]:
    changes = ", ".join(f"{name}={value}" for name, value in candidate.changes.items())
    changes = changes or "the recorded setting, predicted"
    lines = [f"{words}: {changes}"]
    lines += [f"  {name} {text}" for name, text in candidate.shown_values(slo).items()]
    intervals = candidate.prediction.intervals
    others = [name for name in ("output_throughput", *COUNTS) if name in intervals and name not in slo]
    lines.append("  " + ", ".join(f"{name} {shown(name, intervals[name].value)}" for name in others))
    return lines + [f"  {note}" for note in candidate.prediction.notes]


def tune(
    trace: Trace,
    slo: str | Mapping[str, float],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    cost_model: CostModel | None = None,
    others: Sequence[Trace] = (),
    fit_from: Sequence[Trace] = (),
    num_draws: int = NUM_DRAWS,
    force: bool = False,
    progress: bool = False,
    executor: Executor | None = None,
    predictor: Predictor | None = None,
    tell: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> Tuning:
    """Find the setting that meets a target with the largest margin, on the recorded arrivals.

    Every setting of the grid is simulated once, the best ones again with noise and intervals. Settings are compared
    draw by draw, so that an error that they share does not count. Of the settings that cannot be told from the best one
    the answer is the one with the fewest changes, so one that cannot be told from the recorded one does not replace it.

    Args:
        trace: A recorded run.
        slo: The target, such as "ttft_p99=1s,itl_p99=100ms".
        grid: Values to try by EngineConfig field; None for settings around the recorded ones.
        cost_model: Duration of a step; None to fit it to the trace.
        others: More recordings to fit the cost model to.
        fit_from: Recordings to fit the cost model to instead of the trace.
        num_draws: Number of repeated simulations for intervals.
        force: Answer even if the prediction of the recorded setting is far from what was measured.
        progress: Show a progress bar of simulations, with the best setting so far.
        executor: Runs the simulations; None for processes here. Any `concurrent.futures.Executor` will do, such as
            Dask's ``client.get_executor()``.
        predictor: Predicts the run, instead of one made from the arguments above.
        tell: Called with the number of settings that were simulated and of all; KeyboardInterrupt in it acts as Ctrl-C.

    Ctrl-C during the sweep ends it: the answer is the best of the settings that were simulated.

    Raises:
        ValueError: The target, a field or a value is wrong, the grid is too large, or the fit or the check of the
            recorded setting does not hold.
    """
    limits = read_slo(slo)
    grid = default_grid(trace) if grid is None else grid
    combinations = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    if not grid or len(combinations) > MAX_RUNS:
        raise ValueError(f"the grid has {len(combinations) if grid else 0} settings, allowed are 1 to {MAX_RUNS}")
    now = recorded_config(trace).to_dict()
    predictor = predictor or Predictor(
        trace, cost_model, others=others, fit_from=fit_from, num_draws=num_draws, executor=executor, rough=True
    )
    refuse_impossible_values(grid, combinations, predictor.refuse_impossible)
    if cost_model is None and not force:
        predictor.check.require("comparison")
    rows: list[dict[str, Any]] = [dict(settings) for settings in combinations]
    scored: list[tuple[float, dict[str, Any]]] = []
    tasks: list[tuple[dict[str, Any], int | None]] = [
        ({name: value for name, value in settings.items() if now.get(name) != value}, predictor.first_draw)
        for settings in combinations
    ]
    notes = list(predictor.report.notes) if predictor.report else []
    notes += [str(predictor.loops)] if predictor.loops.follow_ups and not predictor.is_open_loop else []
    with progress_bar(len(tasks), "sweep", "setting", shown=progress) as bar:
        try:
            tell(0, len(tasks))
            for num_done, (index, outcome) in enumerate(predictor.outcomes(tasks), 1):
                bar.update()
                tell(num_done, len(tasks))
                if isinstance(outcome, ValueError):
                    rows[index] |= {"error": str(outcome), "end": "invalid"}
                    continue
                points = score(outcome.values, limits)
                rows[index] |= outcome.values | {"error": outcome.hang, "end": outcome.end, "score": points}
                if outcome.end == "done":
                    scored.append((points, tasks[index][0]))
                    bar.set_postfix_str(_so_far(min(scored, key=_order)))
        except KeyboardInterrupt:
            if not scored:
                raise
            notes.append(f"interrupted: {len(scored)} of {len(tasks)} settings were simulated")
            rows = [row for row in rows if "end" in row]
    if not scored:
        raise ValueError(f"no setting of the grid finishes all requests; the first says: {rows[0]['error'] or rows[0]}")
    scored.sort(key=_order)
    server = Server.of(predictor.trace)
    current = _candidate({}, predictor.unchanged, limits, server)
    # Settings that do nothing here score exactly like another one with fewer changes.
    chosen: dict[float, dict[str, Any]] = {score(current.prediction.outcome.values, limits): {}}
    for points, changes in scored:
        if len(chosen) <= NUM_FINALISTS:
            chosen.setdefault(points, changes)
    predictions = predictor.predict_all([changes for changes in chosen.values() if changes], progress=progress)
    finalists = [current, *(_candidate(one.changes, one, limits, server) for one in predictions)]
    first = min(finalists, key=lambda candidate: candidate.score)
    # Few changes do not justify a setting that is further from the target than the recorded one.
    equals = [c for c in finalists if c is first or (c.score <= current.score and not _surely_better(first, c, limits))]
    best = min(equals, key=lambda candidate: (len(candidate.changes), candidate.score))
    others_left = sorted((c for c in finalists if c is not best and c is not current), key=lambda c: c.score)
    runners_up = tuple(replace(c, same_as_best=not _surely_better(best, c, limits)) for c in others_left)
    return Tuning(
        slo=limits,
        best=best,
        current=current,
        runners_up=runners_up,
        verdict="cannot tell" if predictor.check.caution else _verdict(best.prediction, limits),
        losers=_losers(current.prediction.outcome.e2e, best.prediction.outcome.e2e) if best is not current else (),
        rows=tuple(mark_front(rows, list(limits))),
        check=predictor.check,
        settings=tuple(grid),
        notes=tuple(notes),
    )


def _candidate(
    changes: Mapping[str, Any], prediction: Prediction, slo: Mapping[str, float], server: Server
) -> Candidate:
    values = {name: interval.value for name, interval in prediction.intervals.items()}
    return Candidate(changes, score(values, slo), prediction, server=server)


def _surely_better(one: Candidate, other: Candidate, slo: Mapping[str, float]) -> bool:
    """Whether one setting scores better than another in nearly every draw."""
    wins = []
    for k in range(len(next(iter(one.prediction.draws.values())))):
        of_one, of_other = (
            score({name: float(candidate.prediction.draws[name][k]) for name in slo}, slo) for candidate in (one, other)
        )
        wins.append(of_one < of_other)
    return fmean(wins) >= 0.85 if wins else one.score < other.score


def _verdict(prediction: Prediction, slo: Mapping[str, float]) -> str:
    def ratios(end: str) -> float:
        values = {}
        for name in slo:
            interval = prediction.intervals.get(name, Interval(math.nan, math.nan, math.nan))
            is_maximum = name != "output_throughput"
            values[name] = getattr(interval, end if is_maximum else {"low": "high", "high": "low"}[end])
        return score(values, slo)

    if ratios("high") <= 1:
        return "meets"
    return "misses" if ratios("low") > 1 else "cannot tell"


def _losers(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    """Requests that end later in the second run, the largest loss first."""
    losers = [
        (request_id, old, new)
        for request_id, old in before.items()
        if (new := after.get(request_id, old)) > LOSES_RATIO * old and new > old + LOSES_SECONDS
    ]
    return tuple(sorted(losers, key=lambda row: row[1] - row[2]))


def _order(scored: tuple[float, Mapping[str, Any]]) -> tuple[float, int]:
    """Sorts settings with their scores: the best first, and of equal ones the one with the fewest changes."""
    return scored[0], len(scored[1])


def _so_far(best: tuple[float, Mapping[str, Any]]) -> str:
    """The best setting so far, for the progress bar."""
    changes = ", ".join(f"{name}={value}" for name, value in best[1].items()) or "the recorded setting"
    return f"best so far: {changes}, {best[0]:.2f} of the limit"


def mark_front(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Set ``pareto`` in every row: True if no other row is as good in every value of the target and better in one.

    Args:
        rows: Rows of a sweep.
        names: The values of the target; throughput is added, which should be large.
    """
    goals = [*names, *(["output_throughput"] if "output_throughput" not in names else [])]

    def losses(row: Mapping[str, Any]) -> tuple[float, ...] | None:
        if row.get("end") != "done" or any(name not in row for name in goals):
            return None
        return tuple(-row[name] if name == "output_throughput" else row[name] for name in goals)

    points = [losses(row) for row in rows]
    known = [point for point in points if point is not None]
    return [
        row
        | {
            "pareto": point is not None
            and not any(other != point and all(o <= p for o, p in zip(other, point)) for other in known)
        }
        for row, point in zip(rows, points)
    ]
