"""Fit the coefficients of a cost model to measured steps, measure the errors, and refuse a fit that does not hold.

The fit is a regression with non-negative coefficients in which a step's variance is proportional to its duration
(quasi-Poisson with an identity link, by iterated weights). Its predictions add up to exactly the measured time, so a
simulated run is neither too short nor too long, and steps with and without prompts are each right on average.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, sub
from random import Random
from statistics import fmean, median

from workbench.costs.drift import Drift, find_drift, stretches
from workbench.costs.least_squares import Vector, dot, non_negative_least_squares, normal_equations
from workbench.costs.step_model import (
    ADDED,
    ALL_COMPUTE,
    COMPUTE,
    LINEAR,
    MEMORY,
    Features,
    columns,
    overlapped,
    predicted_seconds,
    scaled,
    slopes,
)
from workbench.ground.field_checks import counted
from workbench.readings.metrics import percentile

HELD_OUT_EVERY = 5
"""Every fifth step is held out of the fit that the errors are measured on."""

MIN_STEPS = 20
"""Minimum number of steps with a measured duration for a fit."""

MAX_MEDIAN_ERROR = 0.35
"""A fit with a larger median error on the held-out steps is refused."""

MAX_TOTAL_ERROR = 0.25
"""A fit whose held-out steps add up to a sum with a larger error is refused."""

STALL_FACTOR = 10
"""A step that took this many times its predicted duration is a stall of the machine and left out of the fit."""

MAX_STALLED = 0.02
"""Largest share of the steps that may be stalls; more of them are no exception but a cost that the model lacks."""

LEVELLINGS = 3
"""Number of fits on the way to a model and a trend, each of which corrects the other."""

OVERLAP_GAIN = 6.0
"""Overlap is taken if it lowers the misfit by this fraction divided by the number of steps, which noise alone hardly
does."""

OVERLAPS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 30.0)
"""Exponents that are tried; 30 is nearly the larger of the two times."""

MAX_ITERATIONS = 10
"""Maximum number of solutions on the way to the best coefficients with one exponent."""

CONVERGED = 1e-4
"""A change of the squared errors by a smaller fraction ends the iterations."""

EXACT = 1e-9
"""A model whose misfit is this fraction of the measured time is exact, and no other one is better."""

MAX_SEARCHED = 2_000
"""Number of steps that the exponent is searched on; the coefficients are then fitted to all steps."""

STRETCHES = 20
"""Number of stretches of a recording that a bootstrap draws from."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Measured steps.

    Attributes:
        features: Sequences, prefill tokens, KV positions and attention cells of each step.
        seconds: Duration of each step.
        places: Index of the trace, and step.
    """

    features: list[Features]
    seconds: list[float]
    places: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def rows(self) -> list[float]:
        """Rows of each step."""
        return [sequences + prefill for sequences, prefill, _, _ in self.features]

    def without(self, drift: Drift) -> StepCosts:
        """The steps as they would have been without a trend."""
        if not drift.change:
            return self
        return replace(self, seconds=[one / factor for one, factor in zip(self.seconds, drift.factors(self.rows))])

    def take(self, index: Iterable[int]) -> StepCosts:
        """Some of the steps, by their indices."""
        kept = list(index)
        return StepCosts(
            [self.features[i] for i in kept], [self.seconds[i] for i in kept], [self.places[i] for i in kept]
        )

    def thinned(self) -> StepCosts:
        """Every n-th step, so that no more than MAX_SEARCHED are left."""
        return self.take(range(0, len(self), -(-len(self) // MAX_SEARCHED)))

    def resampled(self, rng: Random) -> StepCosts:
        """As many stretches of the recording as there are, drawn with replacement."""
        parts = stretches(len(self), min(STRETCHES, len(self)))
        indices = range(len(self))
        return self.take(i for part in rng.choices(parts, k=len(parts)) for i in indices[part])


@dataclass(frozen=True)
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
        largest: Largest number of sequences, rows and KV positions of a measured step; a step beyond them is
            extrapolated.
        notes: Sentences about drift and stalls for a reader of a prediction.
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


@dataclass(frozen=True, eq=False)
class _Kind:
    """The steps with prompt rows, or those without, which lack some columns of the model.

    Attributes:
        columns: The columns by name that are neither constant nor 0, with one number per step.
        constants: Names of the columns of 1s.
        seconds: Duration of each step.
        counts: Number of equal steps.
    """

    columns: dict[str, Vector]
    constants: list[str]
    seconds: list[float]
    counts: list[int]

    def summed(self, coefficients: Mapping[str, float], names: Iterable[str]) -> list[float]:
        """The sum of some terms of the model for each step."""
        constant = sum(coefficients.get(name, 0.0) for name in names if name in self.constants)
        used = [(coefficients.get(name, 0.0), self.columns[name]) for name in names if name in self.columns]
        used = [(factor, column) for factor, column in used if factor]
        if not used:
            return [constant] * len(self.seconds)
        factor, column = used[0]
        total = [constant + factor * value for value in column]
        for factor, column in used[1:]:
            total = [so_far + factor * value for so_far, value in zip(total, column)]
        return total

    def weights(self, predicted: Vector) -> list[float]:
        """Weights of steps whose variance is proportional to their duration."""
        return [
            count / (one if one > 1e-3 * seconds else 1e-3 * seconds)
            for one, seconds, count in zip(predicted, self.seconds, self.counts)
        ]


def _kinds(steps: StepCosts) -> list[_Kind]:
    """The distinct steps of each kind: a step that a bootstrap has drawn repeatedly counts as often, and costs once."""
    kinds = []
    counts = Counter(zip(steps.features, steps.seconds))
    for has_prompt in (False, True):
        chosen = [step for step in counts if (step[0][1] > 0) == has_prompt]
        if chosen:
            found = columns([features for features, _ in chosen])
            constants = [name for name, column in found.items() if min(column) == 1 == max(column)]
            varied = {name: column for name, column in found.items() if name not in constants and any(column)}
            kinds.append(_Kind(varied, constants, [one for _, one in chosen], [counts[step] for step in chosen]))
    return kinds


def _solved(names: Sequence[str], kinds: Sequence[tuple[_Kind, dict[str, Vector], Vector]]) -> dict[str, float]:
    """The best coefficients of a linear model.

    Args:
        names: Names of the coefficients.
        kinds: Each kind of steps, the columns that it has except for the constant, and the weights of its steps.
    """
    products = [[0.0] * len(names) for _ in names]
    right = [0.0] * len(names)
    for kind, parts, weights in kinds:
        lower, target = normal_equations(list(parts.values()), kind.seconds, weights)
        places = dict.fromkeys(kind.constants, 0) | {name: place for place, name in enumerate(parts, 1)}
        present = [(i, places[name]) for i, name in enumerate(names) if name in places]
        for i, here in present:
            right[i] += target[here]
            for j, there in present:
                products[i][j] += lower[max(here, there)][min(here, there)]
    return dict(zip(names, non_negative_least_squares(products, right)))


def fit_coefficients(steps: StepCosts) -> dict[str, float]:
    """The coefficients by name, with "overlap", whose predictions add up to the measured time.

    The exponent is the one with the smallest misfit, in which a disturbed step counts by its size and not by its
    square: few steps lie near the knee, and a handful of disturbed ones elsewhere must not decide about its shape.
    """
    searched = steps.thinned()
    kinds = _kinds(searched)
    added = _fit_added(kinds)
    smallest = (1 - OVERLAP_GAIN / len(searched)) * _misfit(kinds, added)
    best, start = added, None
    for overlap in OVERLAPS:
        start = _fit_overlapped(kinds, overlap, start)
        misfit = _misfit(kinds, start) + EXACT * sum(searched.seconds)
        if misfit < smallest:
            best, smallest = start, misfit
    if len(searched) == len(steps):
        return best
    kinds = _kinds(steps)
    return _fit_added(kinds) if best is added else _fit_overlapped(kinds, best["overlap"], best)


def _misfit(kinds: Sequence[_Kind], coefficients: Mapping[str, float]) -> float:
    total = 0.0
    for kind in kinds:
        memory, compute = kind.summed(coefficients, MEMORY), kind.summed(coefficients, ALL_COMPUTE)
        joined, _, _ = overlapped(memory, compute, coefficients["overlap"])
        predicted = map(add, kind.summed(coefficients, ADDED), joined)
        total += sum(
            [
                count * abs(one - seconds) / math.sqrt(one if one > 1e-3 * seconds else 1e-3 * seconds)
                for one, seconds, count in zip(predicted, kind.seconds, kind.counts)
            ]
        )
    return total


def _solved_added(kinds: Sequence[_Kind], weights: Sequence[Vector]) -> dict[str, float]:
    """The best coefficients of a model that adds all times, with fixed weights."""
    parts = [{name: kind.columns[name] for name in LINEAR if name in kind.columns} for kind in kinds]
    return _solved(LINEAR, list(zip(kinds, parts, weights))) | {"overlap": 1.0}


def _fit_added(kinds: Sequence[_Kind]) -> dict[str, float]:
    """The best coefficients of a model that adds all times."""
    predicted = [kind.seconds for kind in kinds]
    for _ in range(4):
        coefficients = _solved_added(kinds, [kind.weights(one) for kind, one in zip(kinds, predicted)])
        predicted = [kind.summed(coefficients, LINEAR) for kind in kinds]
    return coefficients


def _fit_overlapped(kinds: Sequence[_Kind], overlap: float, start: Mapping[str, float] | None) -> dict[str, float]:
    """The best coefficients with one exponent.

    The overlapped time is homogeneous in the two times that it joins, so it is a sum of them with weights, its partial
    derivatives. With the weights fixed the model is linear; they are computed again from each solution (Gauss-Newton).

    Args:
        kinds: Measured steps.
        overlap: The exponent.
        start: Coefficients to begin with; None to begin with several guesses of the knee.
    """
    best: dict[str, float] = {}
    smallest = math.inf
    if start is not None:
        terms = [(kind.summed(start, MEMORY), kind.summed(start, COMPUTE)) for kind in kinds]
        first = [[overlapped(memory, compute, overlap)[1:] for memory, compute in terms]]
    else:
        rows = [kind.columns.get("per_row", [1.0] * len(kind.seconds)) for kind in kinds]
        first = [[_on_sides_of(knee, one) for one in rows] for knee in _knees(kinds, rows)]
    for shares in first:
        weights = [kind.weights(kind.seconds) for kind in kinds]
        error = math.inf
        for _ in range(MAX_ITERATIONS):
            shared = [_shared(kind, *share) for kind, share in zip(kinds, shares)]
            values = _solved((*ADDED, *MEMORY, *COMPUTE), list(zip(kinds, shared, weights)))
            before, error, total = error, 0.0, 0.0
            for k, kind in enumerate(kinds):
                added, memory, compute = (kind.summed(values, names) for names in (ADDED, MEMORY, COMPUTE))
                linear = [
                    one + part * share + other * rest
                    for one, part, share, other, rest in zip(added, memory, shares[k][0], compute, shares[k][1])
                ]
                weights[k] = kind.weights(linear)
                joined, memory_share, compute_share = overlapped(memory, compute, overlap)
                shares[k] = memory_share, compute_share
                # Iterations that diverge have an infinite error: another start wins.
                predicted = list(map(add, added, joined))
                differences = list(map(sub, predicted, kind.seconds))
                error += sum([weight * one * one for weight, one in zip(weights[k], differences)])
                total += dot(predicted, kind.counts)
            if abs(before - error) <= CONVERGED * error:
                break
        if error < smallest or not best:
            # The last solution belongs to the shares before it: scale it so that the sums agree.
            scale = sum(dot(kind.seconds, kind.counts) for kind in kinds) / total
            best, smallest = {name: value * scale for name, value in values.items()}, error
    return best | {"overlap": overlap}


def _shared(kind: _Kind, memory_share: Vector, compute_share: Vector) -> dict[str, Vector]:
    """The columns of the linear model that has these shares."""
    parts = {name: kind.columns[name] for name in ADDED if name in kind.columns}
    for names, share in ((MEMORY, memory_share), (COMPUTE, compute_share)):
        for name in names:
            if name in kind.columns:
                parts[name] = scaled(kind.columns[name], share)
            elif name in kind.constants:
                parts[name] = share
    return parts


def _knees(kinds: Sequence[_Kind], rows: Sequence[Vector]) -> list[float]:
    """Guesses of the number of rows above which arithmetic takes longer than reading memory."""
    ordered = sorted(
        row for kind, column in zip(kinds, rows) for row, count in zip(column, kind.counts) for _ in range(count)
    )
    return sorted({percentile(ordered, percent) for percent in (50, 75, 90)})


def _on_sides_of(knee: float, rows: Vector) -> tuple[list[float], list[float]]:
    """Shares of memory and arithmetic: memory alone up to the knee, arithmetic alone above it."""
    return [float(one <= knee) for one in rows], [float(one > knee) for one in rows]


def fit(steps: StepCosts, num_traces: int) -> tuple[dict[str, float], FitReport]:
    """Fit measured steps, with a report of the errors on every fifth step, which the measured fit has not seen.

    Args:
        steps: The measured steps of all recordings.
        num_traces: Number of recordings.

    Raises:
        ValueError: There are too few steps, or the costs do not follow from the contents of the steps; the message
            names the step that shows it most.
    """
    if len(steps) < MIN_STEPS:
        raise ValueError(
            f"a fit needs at least {MIN_STEPS} steps with timings, the traces have {len(steps)}: record more, give "
            "a cost model, or use fork(), which answers in steps"
        )
    steps, stalls = without_stalls(steps)
    unseen = steps.take(range(HELD_OUT_EVERY - 1, len(steps), HELD_OUT_EVERY))
    seen = steps.take(i for i in range(len(steps)) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1)
    predicted, actual = predicted_seconds(fit_coefficients(seen), unseen.features), unseen.seconds
    errors = sorted(abs(one - seconds) / seconds for one, seconds in zip(predicted, actual))
    mean = fmean(actual)
    spread = sum((seconds - mean) ** 2 for seconds in actual)
    missed = sum((one - seconds) ** 2 for one, seconds in zip(predicted, actual))
    median_error, total_error = median(errors), abs(sum(predicted) - sum(actual)) / sum(actual)
    coefficients, drift = _fit_level(steps) if num_traces == 1 else (fit_coefficients(steps), Drift())
    if median_error > MAX_MEDIAN_ERROR or total_error > MAX_TOTAL_ERROR:
        raise ValueError(_refusal(steps, predicted_seconds(coefficients, steps.features), median_error, total_error))
    sizes = [int(max(column)) for column in zip(*steps.features)]
    notes = []
    if drift.change:
        slower = "slower" if drift.change > 0 else "faster"
        notes.append(f"steps became {abs(drift.change):.0%} {slower} in the course of the recording, and so predicted")
    if stalls:
        notes.append(
            f"left out: {counted(len(stalls), 'stall')}, steps that took over {STALL_FACTOR} times as long as others "
            "like them"
        )
    return coefficients, FitReport(
        num_fitted=len(seen),
        num_held_out=len(unseen),
        median_error=median_error,
        p90_error=percentile(errors, 90),
        total_error=total_error,
        r_squared=1 - missed / spread if spread else 0.0,
        num_traces=num_traces,
        drift=drift,
        stalls=stalls,
        largest={"sequences": sizes[0], "rows": int(max(steps.rows)), "kv_tokens": sizes[2]},
        notes=tuple(notes),
    )


def without_stalls(steps: StepCosts) -> tuple[StepCosts, tuple[int, ...]]:
    """The steps without those that took many times as long as predicted, and the steps left out."""
    # The fit by relative errors hardly follows a stall.
    kinds = _kinds(steps)
    weights = [[count / one**2 for one, count in zip(kind.seconds, kind.counts)] for kind in kinds]
    coefficients = _solved_added(kinds, weights)
    predicted = predicted_seconds(coefficients, steps.features)
    stalled = {i for i, one in enumerate(predicted) if steps.seconds[i] > STALL_FACTOR * one}
    if len(stalled) > MAX_STALLED * len(steps):
        return steps, ()
    return steps.take(i for i in range(len(steps)) if i not in stalled), tuple(
        steps.places[i][1] for i in sorted(stalled)
    )


def _refusal(steps: StepCosts, predicted: Vector, median_error: float, total_error: float) -> str:
    worst = max(range(len(steps)), key=lambda i: abs(predicted[i] - steps.seconds[i]))
    trace, step = steps.places[worst]
    sequences, prefill, kv_tokens, _ = steps.features[worst]
    return (
        f"the durations of the steps do not follow from their contents: on steps that the fit has not seen the median "
        f"error is {median_error:.0%} (allowed {MAX_MEDIAN_ERROR:.0%}), of their sum {total_error:.0%} (allowed "
        f"{MAX_TOTAL_ERROR:.0%}). Step {step} of trace {trace} shows it most: {sequences} sequences with "
        f"{prefill} prompt tokens and {kv_tokens} KV positions took {steps.seconds[worst]:.4g} s, predicted are "
        f"{predicted[worst]:.4g} s. Record longer, on a machine that runs nothing else"
    )


def _fit_level(steps: StepCosts) -> tuple[dict[str, float], Drift]:
    """The coefficients of the steps without their trend, and the trend."""
    coefficients = level = fit_coefficients(steps)
    drift = Drift()
    for _ in range(LEVELLINGS):
        if drift.change:
            level = fit_coefficients(steps.without(drift))
        predicted = predicted_seconds(level, steps.features)
        drift = find_drift(steps.rows, steps.seconds, predicted, slopes(level, steps.features))
    return (fit_coefficients(steps.without(drift)), drift) if drift.is_certain else (coefficients, Drift())
