"""Find the setting that meets a target on a recorded workload: a sweep, then a close look at the best of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.analysis.check import MAX_COMPARED_ERROR, ROUGH_DIFFERENCE, Check
from workbench.analysis.flags import Server
from workbench.analysis.fork import recorded_config
from workbench.analysis.intervals import NUM_DRAWS, Interval, Prediction, is_certain
from workbench.analysis.predict import Predictor
from workbench.analysis.rerun import Outcome
from workbench.analysis.sweep import refuse_impossible_values
from workbench.analysis.tuning import MINIMA, Candidate, Tuning, mark_front, read_slo, score
from workbench.base.progress import progress_bar
from workbench.base.text import counted, settings_text
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.trace.readings.metrics import percent
from workbench.trace.readings.two_sides import UNSERVED

NUM_FINALISTS = 4
"""Number of settings that are predicted with intervals after the sweep."""

MAX_RUNS = 2000
"""Maximum number of settings in a sweep."""

LOSES_RATIO, LOSES_SECONDS = 1.05, 0.01
"""A request loses if its end comes later by more than this factor and by more than this time."""


FULL = 0.95
"""Peak use of the KV pool from which its size may be what a target fails by."""


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


def tune(
    trace: Trace,
    slo: str | Mapping[str, float] | None = None,
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
    **more_limits: float,
) -> Tuning:
    """Find the setting that meets a target with the largest margin, on the recorded arrivals.

    Every setting of the grid is simulated once, the best ones again with noise and intervals. Settings are compared
    draw by draw, so that an error that they share does not count. A setting is not advised if it would hang, if vLLM
    refuses it, or if more requests than now have no first token, or are aborted. Of the settings that no other one
    surely beats the answer is the one with the fewest changes, so one that cannot be told from the recorded one does
    not replace it.

    Args:
        trace: A recorded run.
        slo: The target, such as "ttft_p99=1s,itl_p99=100ms"; None if all of it follows by name.
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
        **more_limits: The target, or more of it, in seconds: ``ttft_p99=1``.

    Ctrl-C during the sweep ends it: the answer is the best of the settings that were simulated.

    Raises:
        ValueError: The target, a field or a value is wrong, the grid is too large, or the fit or the check of the
            recorded setting does not hold.
    """
    limits = read_slo({**(read_slo(slo) if slo is not None else {}), **more_limits})
    server, is_default = Server.of(trace), grid is None
    now = predictor.settings if predictor is not None else recorded_config(trace).to_dict()
    grid = default_grid(trace) if grid is None else grid

    def changed(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if now.get(name) != value}

    combinations = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    if is_default:
        combinations = [settings for settings in combinations if not server.refusal(changed(settings))]
    if not grid or len(combinations) > MAX_RUNS:
        raise ValueError(f"the grid has {len(combinations) if grid else 0} settings, allowed are 1 to {MAX_RUNS}")
    predictor = predictor or Predictor(
        trace, cost_model, others=others, fit_from=fit_from, num_draws=num_draws, executor=executor, rough=True
    )
    refuse_impossible_values(grid, combinations, predictor.refuse_impossible)
    if cost_model is None and not force:
        predictor.check.require("comparison")
    rows: list[dict[str, Any]] = [dict(settings) for settings in combinations]
    scored: list[tuple[float, dict[str, Any]]] = []
    tasks: list[tuple[dict[str, Any], int | None]] = [(changed(settings), None) for settings in combinations]
    notes = list(predictor.report.notes) if predictor.report else []
    notes += [str(predictor.loops)] if predictor.loops.follow_ups and not predictor.is_open_loop else []
    unchanged = predictor.unchanged
    not_advised: Counter[str] = Counter()
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
                rows[index] |= outcome.values | {
                    "error": outcome.hang or server.refusal(tasks[index][0]),
                    "end": outcome.end,
                    "score": points,
                    "idle": outcome.idle,
                }
                if reason := _why_not(outcome, unchanged.outcome, rows[index]["error"]):
                    not_advised[reason] += 1
                else:
                    scored.append((points, tasks[index][0]))
                    bar.set_postfix_str(_so_far(min(scored, key=_order)))
        except KeyboardInterrupt:
            if not scored and not not_advised:
                raise
            notes.append(f"interrupted: {len(scored) + not_advised.total()} of {len(tasks)} settings were simulated")
            rows = [row for row in rows if "end" in row]
    if not scored and not_advised.keys() <= {_HANGS}:
        raise ValueError(f"no setting of the grid finishes all requests; the first says: {rows[0]['error'] or rows[0]}")
    notes += [f"not advised: {counted(n, 'setting')} of the sweep {reason}" for reason, n in not_advised.items()]
    scored.sort(key=_order)
    recorded = predictor.check.measured
    current = _candidate({}, unchanged, limits, server)
    current_verdict = _verdict(current.prediction, limits, predictor.check, recorded)
    # Settings that do nothing here score exactly like another one with fewer changes.
    chosen: dict[float, dict[str, Any]] = {score(current.prediction.outcome.values, limits): {}}
    for points, changes in scored:
        if len(chosen) <= NUM_FINALISTS:
            chosen.setdefault(points, changes)
    predictions = predictor.predict_all([changes for changes in chosen.values() if changes], progress=progress)
    finalists = [current, *(_candidate(one.changes, one, limits, server) for one in predictions)]
    surely_better = partial(_surely_better, slo=limits, least=ROUGH_DIFFERENCE if predictor.check.caution else 0.0)
    # A setting that meets the target is not given up for one that may miss it, or that may be no better.
    allowed = [
        c
        for c in finalists
        if c is current
        or current_verdict != "meets"
        or (_verdict(c.prediction, limits, predictor.check, {}) == "meets" and surely_better(c, current))
    ]
    peak = current.values.get("peak_kv_use", 0.0)
    if peak >= FULL and "num_blocks" not in grid and min(each.score for each in finalists) > 1:
        notes.append(
            f"the KV pool was full at times ({percent(peak)} of {recorded_config(trace).num_blocks:,} blocks), and no "
            "other size was tried: see what more num_blocks change"
        )
    # Few changes do not justify a setting that is further from the target than the recorded one.
    near = [c for c in allowed if c.score <= current.score]
    unbeaten = [c for c in near if not any(surely_better(other, c) for other in allowed)]
    best = min(unbeaten, key=lambda candidate: (len(candidate.changes), candidate.score))
    others_left = sorted((c for c in finalists if c is not best and c is not current), key=lambda c: c.score)
    differ = [surely_better(best, c) or surely_better(c, best) for c in others_left]
    return Tuning(
        slo=limits,
        best=best,
        current=current,
        runners_up=tuple(replace(c, same_as_best=not is_other) for c, is_other in zip(others_left, differ)),
        verdict=_verdict(best.prediction, limits, predictor.check, recorded if best is current else {}),
        current_verdict=current_verdict,
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


def _surely_better(one: Candidate, other: Candidate, slo: Mapping[str, float], least: float) -> bool:
    """Whether one setting scores better than another, and does so in nearly every draw.

    Args:
        one: The setting.
        other: The other one.
        slo: The limits.
        least: The relative difference of two scores up to which not even its direction counts.
    """
    pairs = [(other.score, one.score)]
    for k in range(len(next(iter(one.prediction.draws.values())))):
        of_other, of_one = (
            score({name: draws[name][k] for name in slo if name in draws}, slo)
            for draws in (other.prediction.draws, one.prediction.draws)
        )
        pairs.append((of_other, of_one))
    return one.score < other.score and is_certain(pairs, least)


def _verdict(prediction: Prediction, slo: Mapping[str, float], check: Check, recorded: Mapping[str, float]) -> str:
    """The target against a record or, without one, against an interval.

    With a caution, or for a value that cannot be relied on or is a lower bound, the target is never met by a
    prediction. With one of the first two it is missed only if the interval, moved by MAX_COMPARED_ERROR, still misses
    it.

    Args:
        prediction: The prediction.
        slo: The limits.
        check: The prediction of the recorded setting.
        recorded: The values measured under this setting; empty for another setting than the recorded one.
    """
    if recorded.keys() >= slo.keys() and not check.is_cut:
        return "meets" if score(recorded, slo) <= 1 else "misses"

    rough = slo.keys() if check.caution else check.unreliable(slo)

    def ratio(name: str, end: str) -> float:
        interval = prediction.intervals.get(name, Interval(math.nan, math.nan, math.nan))
        value = getattr(interval, {"low": "high", "high": "low"}[end] if name in MINIMA else end)
        return score({name: value}, {name: slo[name]})

    if any(ratio(name, "low") > 1 + MAX_COMPARED_ERROR * (name in rough) for name in slo):
        return "misses"
    is_open = any(ratio(name, "high") > 1 or prediction.outcome.is_bound(name) for name in slo)
    return "cannot tell" if rough or is_open else "meets"


_HANGS = "that would hang"


def _why_not(outcome: Outcome, now: Outcome, obstacle: str) -> str:
    """Why a setting is not advised, as a relative clause; "" if it can be.

    Args:
        outcome: Its run.
        now: That of the recorded setting.
        obstacle: Why it would hang, or its server does not start with it; "" for nothing.
    """
    if outcome.end != "done":
        return _HANGS
    if any(outcome.values.get(name, 0.0) > now.values.get(name, 0.0) for name in UNSERVED):
        return "with more requests than now that get no answer"  # their times can only look short
    return "that vLLM refuses" if obstacle else ""


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
    changes = settings_text(best[1]) or "the recorded setting"
    return f"best so far: {changes}, {best[0]:.2f} of the limit"
