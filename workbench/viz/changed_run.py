"""The run on display under another configuration, with times where they can be predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.trace.errors import TraceError
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.two_sides import LITTLE_CHANGE, NOTHING, Measure, extremes, served_by_b, unserved_of
from workbench.trace.trace import Trace

if TYPE_CHECKING:
    from workbench.analysis.check import Check
    from workbench.analysis.intervals import Prediction
    from workbench.analysis.predict import Predictor

BOTH = "Both sides are predicted from this run's own step costs, each by one simulation."

_RANGES = "The ranges come from several more, in which steps vary as those of this run did."

NOT_CERTAIN = "no measure changes for certain"
"""The verdict of two predictions of which no direction of a change is known."""

AT_WORK = "time at work"
"""The name of a value that only these views have: the duration without idle time."""

_TIMES = {"mean TTFT": "ttft_mean", "P99 TTFT": "ttft_p99", "mean ITL": "itl_mean", "P99 ITL": "itl_p99"}

_LONGEST = {"longest TTFT": "ttft_max", "longest pause": "itl_max"}


class Changed(NamedTuple):
    """A run under another configuration.

    Attributes:
        trace: The simulated run.
        facts: ``predicted``, sentences on how its times were found and how far they can be trusted; or ``no_times``,
            the reason for which there are none. Neither for a run that has none itself.
        unchanged: The run as it was, simulated too, with which the other one is compared: its prediction or, without
            times, the run to its end; None if the run has ended, whose every step a simulation would repeat.
        caution: The way to read predictions that are only good for a comparison; "" for others.
        values: The predicted values by name of the run as it was and of the changed one, those of ``trace whatif``, and
            AT_WORK; None without times.
        errors: Relative error of each value of the run as it was, none if requests had not ended.
        limits: The limits of the prediction of the changed run, as sentences; "" for none.
    """

    trace: Trace
    facts: dict[str, Any]
    unchanged: Trace | None = None
    caution: str = ""
    values: tuple[Mapping[str, float], Mapping[str, float]] | None = None
    errors: Mapping[str, float] = {}
    limits: str = ""


def terms_of_changes(trace: Trace, name: str = "") -> tuple[str, float]:
    """The unit in which `changed_run` would answer now, and the relative difference that would say nothing.

    The unit is "s", or "steps" if times cannot be predicted.

    Args:
        trace: The run.
        name: A predicted value that is to decide; "" for none.

    Raises:
        ValueError: Its prediction of the run as it was is too far off to decide anything.
    """
    from workbench.analysis.predict import comparing

    if not len(trace) or not trace[-1].end or trace[0].step:
        return "steps", 0.0
    try:
        predictor = comparing(trace)
    except (ValueError, TraceError):
        return "steps", 0.0
    check = predictor.check
    if not check.caution and check.unreliable([name]):
        off = f"{check.errors[name]:+.0%}"
        raise ValueError(f"of this run as it was, the prediction of this measure is off by {off}: choose another one")
    at_work = values_with_work(predictor.unchanged)[AT_WORK] if name == AT_WORK else None
    errors = {} if predictor.has_unended else with_work(check.errors, predictor, at_work)
    return "s", uncertainty(check.caution, errors.get(name, 0.0))


def uncertainty(caution: str, error: float) -> float:
    """The relative difference of two predictions up to which not even its direction counts.

    Args:
        caution: The way to read the predictions; "" for none.
        error: Relative error of that of the run as it was.
    """
    from workbench.analysis.check import ROUGH_DIFFERENCE

    return ROUGH_DIFFERENCE if caution else round(abs(error), 2)


def changed_run(trace: Trace, fork: Callable[..., Trace], at_step: int, changes: dict[str, Any]) -> Changed:
    """Simulate a run with changes, with times predicted from its own step costs where they can be.

    Args:
        trace: The run.
        fork: Simulates it without times, such as ``Engine.fork``.
        at_step: Number of the first step that the changes apply to.
        changes: Fields of the configuration with their new values.
    """
    from workbench.analysis.predict import comparing
    from workbench.simulation.costs.fit import NoSeconds

    timed = len(trace) > 0 and trace[-1].end > 0
    reason = "a run that is changed in its middle has no times"
    if timed and at_step <= trace[0].step:
        try:
            predictor = comparing(trace)
            (changed,) = predictor.predict_all([changes])
            pair = predictor.unchanged, changed
            values = values_with_work(pair[0]), values_with_work(pair[1])
            errors = with_work(predictor.check.errors, predictor, values[0].get(AT_WORK))
            limits = limits_of(changed, predictor)
            facts = {"predicted": _words(predictor, errors, limits), "measures": _measures(*pair, predictor.check)}
            caution = predictor.check.caution
            told = {} if predictor.has_unended else errors
            return Changed(pair[1].trace, facts, pair[0].trace, caution, values, told, limits)
        except NoSeconds as problem:
            reason = problem.plain
        except (ValueError, TraceError) as problem:
            reason = str(problem)
    has_open = sum(len(record.finished) + len(record.aborted) for record in trace) < len(trace.requests)
    unchanged = fork(at_step=at_step) if has_open else None
    changed_trace = fork(at_step=at_step, **changes)
    if unchanged is not None and unchanged.requests.keys() != changed_trace.requests.keys():
        unchanged = None  # a request has arrived in between
    return Changed(changed_trace, {"no_times": reason} if timed else {}, unchanged)


def values_with_work(prediction: Prediction) -> dict[str, float]:
    """The predicted values by name, and AT_WORK."""
    values = {name: interval.value for name, interval in prediction.intervals.items()}
    return values | {AT_WORK: metrics(prediction.trace).summary.clock.at_work}


def with_work(errors: Mapping[str, float], predictor: Predictor, at_work: float | None) -> dict[str, float]:
    """The errors of a prediction by name, with that of its time at work unless requests had not ended.

    Args:
        errors: Relative error of each value.
        predictor: Predicts the run.
        at_work: The predicted time at work.
    """
    length = metrics(predictor.trace).summary.clock.at_work
    known = at_work is not None and length and not predictor.has_unended
    return {**errors, AT_WORK: at_work / length - 1} if known and at_work is not None else dict(errors)


def _measures(before: Prediction, after: Prediction, check: Check) -> dict[str, Any]:
    """The measures of a comparison with their ranges, and its verdict, in place of those of two traces.

    A measure whose prediction of the run as it was is too far off is marked, and the verdict leaves it out, unless a
    caution says how to read all of them; so is a change whose direction is not certain, and one to the latencies of
    fewer or more requests. The longest times are among
    the measures only if the verdict names them. The mean TTFT of both runs is also that of their requests in the
    comparison.
    """
    from workbench.analysis.check import ROUGH_DIFFERENCE
    from workbench.analysis.intervals import is_certain

    rows, weighed = [], []
    unserved = unserved_of(*({name: each.value for name, each in side.intervals.items()} for side in (before, after)))
    served = served_by_b(unserved)
    rough, least = (ROUGH_DIFFERENCE, ROUGH_DIFFERENCE) if check.caution else (0.0, LITTLE_CHANGE)
    has_idle = any(each.outcome.idle for each in (before, after))
    rate = f"output tokens per s{' without idle time' if has_idle else ''}"
    for words, name in {**_TIMES, rate: "output_throughput", **_LONGEST}.items():
        if name in before.intervals and name in after.intervals:
            found = after[name]
            measure = Measure(words, before[name].value, found.value, "" if words == rate else "s")
            pairs = [(before[name].value, found.value), *zip(before.draws[name], after.draws[name])]
            is_far_off = not check.caution and bool(check.unreliable([name]))
            is_open = measure.share != 0 and not is_certain(pairs, rough)
            doubt = " (do not rely on it)" if is_far_off else " (may be no change)" if is_open else ""
            doubt = f" (of {served} requests)" if served and words != rate else doubt
            weighed += [] if is_far_off or (is_open and abs(measure.share) >= least) else [measure]
            (of_a, of_b), ends = measure.values(), Measure(words, found.low, found.high, measure.unit).values()
            rows.append([words, of_a, f"{of_b} ({ends[0]} to {ends[1]})", f"{measure.words}{doubt}"])
    nothing = next((note for note in after.notes if NOTHING in note), "" if after.changes else NOTHING)
    rows += [[each.name, *each.values(), each.words] for each in unserved]
    verdict = nothing or extremes([*weighed, *unserved], least) or NOT_CERTAIN
    rows = [row for row in rows if row[0] not in _LONGEST or row[0] in verdict]
    ttft = [side["ttft_mean"].value for side in (before, after) if "ttft_mean" in side.intervals]
    return {"measures": rows, "verdict": verdict} | ({"mean_ttft": ttft} if len(ttft) == 2 else {})


def _words(predictor: Predictor, errors: Mapping[str, float], limits: str) -> str:
    """The origin of both predictions, their limits, and the error of the unchanged one or the way to read them."""
    loops = predictor.loops.sentence
    return " ".join(filter(None, (BOTH, _RANGES, limits, trust_words(predictor, errors), loops and f"{loops}.")))


def limits_of(changed: Prediction, predictor: Predictor) -> str:
    """The limits of a prediction as sentences: steps larger than any used for the fit, and the other notes."""
    from workbench.analysis.predict import EXTRAPOLATED
    from workbench.analysis.rerun import LARGEST_FITTED, SIZES

    largest = predictor.report.largest if predictor.report is not None else {}
    larger = ", ".join(
        f"{share:.0%} have more than {largest[name]:,} {SIZES[name]} (up to {most:,})"
        for name, (share, most) in changed.outcome.extrapolated.items()
        if name in largest
    )
    elsewhere = (EXTRAPOLATED, NOTHING, str(predictor.loops))  # said above, by the verdict, and by `_words`
    others = [note for note in changed.notes if not any(each and each in note for each in elsewhere)]
    told = [*([f"B has steps beyond {LARGEST_FITTED}: {larger}"] if larger else []), *others]
    return " ".join(f"{each[0].upper()}{each[1:].removesuffix('.')}." for each in told)


def trust_words(predictor: Predictor, errors: Mapping[str, float]) -> str:
    """The trust in predictions of a run: the error of that of the run as it was, or the way to read them.

    Args:
        predictor: Predicts the run.
        errors: The relative errors by name, see `with_work`.
    """
    from workbench.analysis.check import COMPARED, LITTLE, WORDS, off_words

    if caution := predictor.check.caution:
        return caution
    words = {**{name: WORDS[name] for name in COMPARED}, AT_WORK: AT_WORK}
    far = {name: errors[name] for name in words if abs(errors.get(name, 0.0)) >= LITTLE}
    off = ", ".join(off_words(error, words[name]) for name, error in far.items())
    return f"Of the run as it was, the prediction is off by {off or 'less than 1%'}."
