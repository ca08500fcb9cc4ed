"""Fit a cost model to measured steps, measure its errors, and refuse a fit that does not hold."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, truediv
from statistics import fmean, median

from workbench.base.text import counted
from workbench.simulation.costs.coefficients import SEARCHED_ON, Coefficients, Regression, relative_coefficients
from workbench.simulation.costs.drift import Drift, find_drift
from workbench.simulation.costs.least_squares import Vector
from workbench.simulation.costs.step_model import StepCosts, predicted_seconds, slopes, thinning
from workbench.trace.readings.metrics import amount, percentile

HELD_OUT_EVERY = 5
"""Every fifth step is held out of the fit that the errors are measured on."""

MIN_STEPS = 20
"""Minimum number of steps with a measured duration for a fit."""

MAX_MEDIAN_ERROR = 0.35
"""A fit with a larger median error on the held-out steps is refused."""

MAX_TOTAL_ERROR = 0.25
"""A fit whose held-out steps add up to a sum with a larger error is refused."""

MAX_COMPARED_MEDIAN_ERROR, MAX_COMPARED_TOTAL_ERROR = 0.8, 0.5
"""Up to these errors two predictions are still compared with each other: 97% of the differences of more than 10% have
the right sign (`benchmarks/bench_compared.py`), though their size can be far off."""

STALL_FACTOR = 5.0
"""A stall takes at least this many times what the contents of its step explain."""

STALL_SECONDS = 0.02
"""A stall takes at least this much longer: short steps of a busy machine are often late by a few milliseconds."""

STALL_SPREADS = 8.0
"""The logarithm of that factor is at least this many times the spread of the same of all steps."""

MAX_STALLED, MAX_STALLS = 0.02, 3
"""Largest share of the steps that may be stalls, and the number that always may. More late steps than that are no
exception but a cost that the model lacks, or a busy machine: a stall is then STALL_FACTOR times as late as these."""

NORMAL_SPREAD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""

LEVELLINGS = 3
"""Maximum number of fits on the way to a model and a trend, each of which corrects the other."""

SETTLED = 0.1
"""A change of the trend by a smaller fraction of its error ends the correction."""


@dataclass(frozen=True, repr=False)
class FitReport:
    """The errors of a cost model on steps that were held out of the fit, and what to know before it is used.

    Attributes:
        num_fitted: Number of steps used for the fit whose errors are measured; the model is fitted to all steps then.
        num_held_out: Number of steps on which the errors are measured.
        median_error: Median of |predicted - measured| / measured.
        p90_error: 90th percentile of the same.
        total_error: |sum of predicted - sum of measured| / sum of measured: the error of a simulated run.
        r_squared: Share of the variance explained, on the held-out steps.
        num_traces: Number of merged recordings.
        drift: The trend of one recording, which the model is free of; none for several recordings.
        stalls: Steps that took more than STALL_FACTOR times the predicted duration; they are left out of the fit.
        largest: Largest number of sequences, rows and KV positions of a step used for the fit; a step beyond them
            is extrapolated.
        notes: Sentences about drift and the steps left out, for a reader of a prediction.
    """

    num_fitted: int
    num_held_out: int
    median_error: float
    p90_error: float
    total_error: float
    r_squared: float
    num_traces: int = 1
    drift: Drift = field(default_factory=Drift)
    stalls: tuple[int, ...] = ()
    largest: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"FitReport({self.sentence})"

    @property
    def holds(self) -> bool:
        """Whether durations follow from the contents of steps, so that seconds can be predicted."""
        return self.median_error <= MAX_MEDIAN_ERROR and self.total_error <= MAX_TOTAL_ERROR

    @property
    def compares(self) -> bool:
        """Whether they follow well enough for a comparison of two predictions."""
        return self.median_error <= MAX_COMPARED_MEDIAN_ERROR and self.total_error <= MAX_COMPARED_TOTAL_ERROR

    @property
    def sentence(self) -> str:
        """The quality of the fit."""
        drift = f"drift {self.drift.change:+z.0%}" if self.drift.change else "no drift"
        share = len(self.stalls) / (self.num_fitted + self.num_held_out + len(self.stalls))
        return (
            f"fit of step durations: median error {self.median_error:.1%}, sum off by {self.total_error:.1%} on "
            f"{self.num_held_out} steps held out; {drift}; {share:.1%} of the steps stalled"
        )


class NoSeconds(ValueError):
    """Steps with the same contents took different times, so that no seconds can be predicted.

    Attributes:
        plain: The reason for somebody who looks at a picture.
    """

    plain = "the times of this run vary too much to predict seconds"


class Fit:
    """A fit of measured steps: its errors on every fifth one, which are known first, and the model of all.

    Args:
        steps: The measured steps of all recordings.
        num_traces: Number of recordings.
        stalled: Their stalls, if somebody has found them (`find_stalls`).

    Raises:
        ValueError: There are too few steps.
    """

    def __init__(self, steps: StepCosts, num_traces: int, stalled: Collection[int] | None = None) -> None:
        if len(steps) < MIN_STEPS:
            raise ValueError(
                f"a fit needs at least {MIN_STEPS} steps with timings, the traces have {len(steps)} (a first "
                "step, which warms up, does not count): record more, give a cost model, or use fork(), which answers "
                "in steps"
            )
        self._num_disturbed = steps.num_disturbed
        self._steps, self._stalls = without_stalls(steps, stalled)
        self._regression = Regression()
        held_out = range(HELD_OUT_EVERY - 1, len(self._steps), HELD_OUT_EVERY)
        unseen = self._steps.take(held_out)
        seen = self._steps.take(i for i in range(len(self._steps)) if i not in held_out)
        predicted, actual = predicted_seconds(self._regression.coefficients(seen), unseen.features), unseen.seconds
        errors = sorted(abs(one - seconds) / seconds for one, seconds in zip(predicted, actual))
        mean = fmean(actual)
        spread = sum((seconds - mean) ** 2 for seconds in actual)
        missed = sum((one - seconds) ** 2 for one, seconds in zip(predicted, actual))
        self._report = FitReport(
            num_fitted=len(seen),
            num_held_out=len(unseen),
            median_error=median(errors),
            p90_error=percentile(errors, 90),
            total_error=abs(sum(predicted) - sum(actual)) / sum(actual),
            r_squared=1 - missed / spread if spread else 0.0,
            num_traces=num_traces,
            stalls=self._stalls,
        )

    @property
    def holds(self) -> bool:
        """Whether durations follow from the contents of steps, so that there is a model."""
        return self._report.holds

    def model(self, *, rough: bool = False) -> tuple[Coefficients, FitReport]:
        """The coefficients of all steps, and the errors.

        Args:
            rough: Accept a fit that is only good enough to compare two predictions.

        Raises:
            NoSeconds: The fit does not hold; the message names the step that shows it most.
        """
        steps = self._steps
        coefficients, drift = self._regression.coefficients(steps), Drift()
        if self._report.num_traces == 1:
            coefficients, drift = _leveled(steps, coefficients, self._regression)
        if not (self.holds or (rough and self._report.compares)):
            predicted = predicted_seconds(coefficients, steps.features)
            raise NoSeconds(_refusal(steps, predicted, self._report))
        sizes = [int(max(column)) for column in zip(*steps.features)]
        notes = []
        if drift.change:
            notes.append(f"{drift}, and so predicted")
        if self._stalls:
            notes.append(
                f"left out: {counted(len(self._stalls), 'stall')}, steps that took over {STALL_FACTOR:g} times as long "
                "as others like them"
            )
        if self._num_disturbed:
            notes.append(f"left out: {counted(self._num_disturbed, 'step')} during which a page was loading")
        largest = {"sequences": sizes[0], "rows": int(max(steps.rows)), "kv_tokens": sizes[2]}
        return coefficients, replace(self._report, drift=drift, largest=largest, notes=tuple(notes))


def find_stalls(steps: StepCosts) -> dict[int, float]:
    """The indices of steps that took many times what their contents explain, with the seconds that these explain.

    A pause before a step counts for it here.
    """
    found: dict[int, float] = {}
    whole = list(map(add, steps.seconds, steps.pauses))
    for _ in range(2 if len(steps) >= MIN_STEPS else 0):  # the second time without those that were found
        kept = [i for i in range(len(steps)) if i not in found]
        searched = steps.take(kept[:: thinning(len(kept), SEARCHED_ON)])
        expected = predicted_seconds(relative_coefficients(searched), steps.features)
        ratios = [math.log(seconds / max(one, 1e-9)) for seconds, one in zip(whole, expected)]
        middle = median(ratios)
        spread = NORMAL_SPREAD * median([abs(ratio - middle) for ratio in ratios])
        least = max(math.log(STALL_FACTOR), STALL_SPREADS * spread)
        found = {
            i: expected[i]
            for i, ratio in enumerate(ratios)
            if ratio >= least and whole[i] - expected[i] >= STALL_SECONDS
        }
        limit = int(max(MAX_STALLS, MAX_STALLED * len(steps)))
        if len(found) > limit:  # only what stands out from the other late steps in the same way
            least = sorted([ratios[i] for i in found], reverse=True)[limit] + math.log(STALL_FACTOR)
            found = {i: seconds for i, seconds in found.items() if ratios[i] >= least}
        if not found:
            break
    usual = _usual(steps, ratios, found) if found else ()
    return {i: seconds for i, seconds in found.items() if i not in usual}


def _usual(steps: StepCosts, ratios: Sequence[float], late: Collection[int]) -> list[int]:
    """The late steps that are as late as most others with as many sequences, with prompts or without.

    Their kind costs more than the model knows, such as a batch of a size for which a machine has no fast kernel.
    """
    kinds = [(sequences, prefill > 0) for sequences, prefill, _, _ in steps.features]
    lateness: dict[tuple[float, bool], list[float]] = {kinds[i]: [] for i in late}
    for kind, ratio in zip(kinds, ratios):
        if kind in lateness:
            lateness[kind].append(ratio)
    for like_them in lateness.values():
        like_them.sort()
    usual = []
    for i in late:
        like_it = lateness[kinds[i]]
        num_others, num_as_late = len(like_it) - 1, len(like_it) - 1 - bisect_left(like_it, ratios[i] - math.log(2))
        if num_others >= 2 and 2 * num_as_late > num_others:
            usual.append(i)
    return usual


def without_stalls(steps: StepCosts, stalled: Collection[int] | None = None) -> tuple[StepCosts, tuple[int, ...]]:
    """The steps without the stalls, which are found unless they are given, and the steps left out."""
    found = find_stalls(steps) if stalled is None else stalled
    kept = steps.take(i for i in range(len(steps)) if i not in found) if found else steps
    return kept, tuple([steps.places[i][1] for i in sorted(found)])


def without_trend(steps: StepCosts, drift: Drift) -> StepCosts:
    """The steps as they would have been without a trend."""
    return (
        replace(steps, seconds=list(map(truediv, steps.seconds, drift.factors(steps.rows)))) if drift.change else steps
    )


def _refusal(steps: StepCosts, predicted: Vector, report: FitReport) -> str:
    worst = max(range(len(steps)), key=lambda i: abs(predicted[i] - steps.seconds[i]))
    trace, step = steps.places[worst]
    sequences, prefill, kv_tokens, _ = steps.features[worst]
    where = f" of recording {trace + 1}" if report.num_traces > 1 else ""
    return (
        f"the durations of the steps do not follow from their contents: steps like others took other times. A "
        f"prediction of one is off by {report.median_error:.0%} (allowed {MAX_MEDIAN_ERROR:.0%}), of the whole by "
        f"{report.total_error:.0%} (allowed {MAX_TOTAL_ERROR:.0%}). Step {step}{where} shows it most: "
        f"{counted(int(sequences), 'sequence')} with {counted(int(prefill), 'prompt token')} and "
        f"{counted(int(kv_tokens), 'KV position')} took {amount(steps.seconds[worst], 's')}, predicted are "
        f"{amount(predicted[worst], 's')}. Record longer, with less else running"
    )


def _leveled(steps: StepCosts, coefficients: Coefficients, regression: Regression) -> tuple[Coefficients, Drift]:
    """The coefficients of the steps without their trend, and the trend, each of which corrects the other."""

    def trend(level: Coefficients) -> Drift:
        predicted = predicted_seconds(level, steps.features)
        return find_drift(steps.rows, steps.seconds, predicted, slopes(level, steps.features))

    found = trend(coefficients)
    if abs(found.change) < found.least_certain / 2:  # no correction makes it certain
        return coefficients, Drift()
    for _ in range(LEVELLINGS):
        drift, level = found, regression.coefficients(without_trend(steps, found))
        found = trend(level)
        if abs(found.change - drift.change) <= SETTLED * found.error:
            break
    return (level, drift) if drift.is_certain else (coefficients, Drift())
