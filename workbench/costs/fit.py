"""Fit the coefficients of a cost model to measured steps, measure the errors, and refuse a fit that does not hold.

The fit is a regression with non-negative coefficients in which a step's variance is proportional to its duration
(quasi-Poisson with an identity link, by iterated weights). Its predictions add up to exactly the measured time, so a
simulated run is neither too short nor too long, and steps with and without prompts are each right on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from workbench.costs.drift import Drift, find_drift
from workbench.costs.step_model import (
    ADDED,
    COMPUTE,
    LINEAR,
    MEMORY,
    columns,
    overlapped,
    predicted_seconds,
    shares,
    slopes,
    summed,
)
from workbench.ground.field_checks import counted
from workbench.ground.on_demand import np

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
        features: Sequences, prefill tokens, KV positions and attention cells of each step, float64 [steps, 4].
        seconds: Duration of each step, float64 [steps].
        places: Index of the trace, and step, int64 [steps, 2].
    """

    features: np.ndarray
    seconds: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def rows(self) -> np.ndarray:
        """Rows of each step, float64 [steps]."""
        return self.features[:, 0] + self.features[:, 1]

    def without(self, drift: Drift) -> StepCosts:
        """The steps as they would have been without a trend."""
        return replace(self, seconds=self.seconds / drift.factors(self.rows)) if drift.change else self

    def take(self, index: np.ndarray) -> StepCosts:
        """Some of the steps, by their indices or by a mask."""
        return StepCosts(self.features[index], self.seconds[index], self.places[index])

    def thinned(self) -> StepCosts:
        """Every n-th step, so that no more than MAX_SEARCHED are left."""
        return self.take(np.arange(0, len(self), -(-len(self) // MAX_SEARCHED)))

    def resampled(self, rng: np.random.Generator) -> StepCosts:
        """As many stretches of the recording as there are, drawn with replacement."""
        stretches = np.array_split(np.arange(len(self)), min(STRETCHES, len(self)))
        drawn = rng.integers(0, len(stretches), len(stretches))
        return self.take(np.concatenate([stretches[i] for i in drawn]))


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


def fit_coefficients(steps: StepCosts) -> dict[str, float]:
    """The coefficients by name, with "overlap", whose predictions add up to the measured time.

    The exponent is the one with the smallest misfit, in which a disturbed step counts by its size and not by its
    square: few steps lie near the knee, and a handful of disturbed ones elsewhere must not decide about its shape.
    """
    searched = steps.thinned()
    added = _fit_added(searched)
    smallest = (1 - OVERLAP_GAIN / len(searched)) * _misfit(searched, added)
    best, start = added, None
    for overlap in OVERLAPS:
        start = _fit_overlapped(searched, overlap, start)
        misfit = _misfit(searched, start) + EXACT * float(searched.seconds.sum())
        if misfit < smallest:
            best, smallest = start, misfit
    if len(searched) == len(steps):
        return best
    return _fit_added(steps) if best is added else _fit_overlapped(steps, best["overlap"], best)


def _misfit(steps: StepCosts, coefficients: Mapping[str, float]) -> float:
    predicted = predicted_seconds(coefficients, steps.features)
    return float((np.abs(predicted - steps.seconds) / np.sqrt(np.maximum(predicted, 1e-3 * steps.seconds))).sum())


def _fit_added(steps: StepCosts) -> dict[str, float]:
    """The best coefficients of a model that adds all times."""
    parts = columns(steps.features)
    matrix = np.column_stack([parts[name] for name in LINEAR])
    predicted = steps.seconds
    for _ in range(4):
        weights = 1 / np.maximum(predicted, 1e-3 * steps.seconds)
        coefficients = non_negative_least_squares(matrix, steps.seconds, weights)
        predicted = matrix @ coefficients
    return dict(zip(LINEAR, map(float, coefficients))) | {"overlap": 1.0}


def _fit_overlapped(steps: StepCosts, overlap: float, start: Mapping[str, float] | None) -> dict[str, float]:
    """The best coefficients with one exponent.

    The overlapped time is homogeneous in the two times that it joins, so it is a sum of them with weights, its partial
    derivatives. With the weights fixed the model is linear; they are computed again from each solution (Gauss-Newton).

    Args:
        steps: Measured steps.
        overlap: The exponent.
        start: Coefficients to begin with; None to begin with several guesses of the knee.
    """
    parts = columns(steps.features)
    rows = parts["per_row"]
    best: dict[str, float] = {}
    smallest = np.inf
    if start is not None:
        first = [shares(summed(start, parts, MEMORY), summed(start, parts, COMPUTE), overlap)]
    else:
        first = [(np.where(rows > knee, 0.0, 1.0), np.where(rows > knee, 1.0, 0.0)) for knee in _knees(rows)]
    for memory_share, compute_share in first:
        weights = 1 / steps.seconds
        error = np.inf
        for _ in range(MAX_ITERATIONS):
            shared = {name: parts[name] for name in ADDED}
            shared |= {name: parts[name] * memory_share for name in MEMORY}
            shared |= {name: parts[name] * compute_share for name in COMPUTE}
            matrix = np.column_stack(list(shared.values()))
            coefficients = non_negative_least_squares(matrix, steps.seconds, weights)
            values = dict(zip(shared, map(float, coefficients)))
            weights = 1 / np.maximum(matrix @ coefficients, 1e-3 * steps.seconds)
            memory, compute = summed(values, parts, MEMORY), summed(values, parts, COMPUTE)
            memory_share, compute_share = shares(memory, compute, overlap)
            predicted = summed(values, parts, ADDED) + overlapped(memory, compute, overlap)
            with np.errstate(over="ignore"):  # iterations that diverge have an infinite error: another start wins
                before, error = error, float(((predicted - steps.seconds) ** 2 * weights).sum())
            if abs(before - error) <= CONVERGED * error:
                break
        if error < smallest or not best:
            # The last solution belongs to the shares before it: scale it so that the sums agree.
            scale = float(steps.seconds.sum() / predicted.sum())
            best, smallest = {name: value * scale for name, value in values.items()}, error
    return best | {"overlap": overlap}


def _knees(rows: np.ndarray) -> np.ndarray:
    """Guesses of the number of rows above which arithmetic takes longer than reading memory."""
    return np.unique(np.quantile(rows, (0.5, 0.75, 0.9)))


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
    held_out = np.arange(len(steps)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    seen, unseen = steps.take(~held_out), steps.take(held_out)
    predicted, actual = predicted_seconds(fit_coefficients(seen), unseen.features), unseen.seconds
    errors = np.abs(predicted - actual) / actual
    spread = float(((actual - actual.mean()) ** 2).sum())
    median, total = float(np.median(errors)), float(abs(predicted.sum() - actual.sum()) / actual.sum())
    coefficients, drift = _fit_level(steps) if num_traces == 1 else (fit_coefficients(steps), Drift())
    if median > MAX_MEDIAN_ERROR or total > MAX_TOTAL_ERROR:
        raise ValueError(_refusal(steps, predicted_seconds(coefficients, steps.features), median, total))
    sizes = steps.features.max(axis=0).astype(int)
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
        median_error=median,
        p90_error=float(np.percentile(errors, 90)),
        total_error=total,
        r_squared=1 - float(((predicted - actual) ** 2).sum()) / spread if spread else 0.0,
        num_traces=num_traces,
        drift=drift,
        stalls=stalls,
        largest={"sequences": int(sizes[0]), "rows": int(steps.rows.max()), "kv_tokens": int(sizes[2])},
        notes=tuple(notes),
    )


def without_stalls(steps: StepCosts) -> tuple[StepCosts, tuple[int, ...]]:
    """The steps without those that took many times as long as predicted, and the steps left out."""
    # The fit by relative errors hardly follows a stall.
    parts = columns(steps.features)
    matrix = np.column_stack([parts[name] for name in LINEAR])
    predicted = matrix @ non_negative_least_squares(matrix, steps.seconds, steps.seconds**-2.0)
    stalled = steps.seconds > STALL_FACTOR * predicted
    if not stalled.any() or stalled.mean() > MAX_STALLED:
        return steps, ()
    return steps.take(~stalled), tuple(map(int, steps.places[stalled, 1]))


def _refusal(steps: StepCosts, predicted: np.ndarray, median: float, total: float) -> str:
    worst = int(np.argmax(np.abs(predicted - steps.seconds)))
    trace, step = steps.places[worst]
    sequences, prefill, kv_tokens, _ = steps.features[worst].astype(int)
    return (
        f"the durations of the steps do not follow from their contents: on steps that the fit has not seen the median "
        f"error is {median:.0%} (allowed {MAX_MEDIAN_ERROR:.0%}), of their sum {total:.0%} (allowed "
        f"{MAX_TOTAL_ERROR:.0%}). Step {step} of trace {trace} shows it most: {sequences} sequences with "
        f"{prefill} prompt tokens and {kv_tokens} KV positions took {steps.seconds[worst]:.4g} s, predicted are "
        f"{predicted[worst]:.4g} s. Record longer, on a machine that runs nothing else"
    )


def _fit_level(steps: StepCosts) -> tuple[dict[str, float], Drift]:
    """The coefficients of the steps without their trend, and the trend."""
    drift = Drift()
    for _ in range(LEVELLINGS):
        coefficients = fit_coefficients(steps.without(drift))
        predicted = predicted_seconds(coefficients, steps.features)
        drift = find_drift(steps.rows, steps.seconds, predicted, slopes(coefficients, steps.features))
    if not drift.is_certain:
        return fit_coefficients(steps), Drift()
    return fit_coefficients(steps.without(drift)), drift


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises the weighted sum of squares of matrix @ x - target.

    Lawson and Hanson's active-set method (Solving Least Squares Problems, 1974, chapter 23).

    Args:
        matrix: Columns of non-negative numbers, float64 [rows, columns].
        target: float64 [rows].
        weights: Weight of each row, float64 [rows].
    """
    roots = np.sqrt(weights)
    scaled = matrix * roots[:, None]
    scale = np.maximum(np.sqrt((scaled**2).sum(axis=0)), 1e-300)  # columns differ by ten orders of magnitude
    scaled, goal = scaled / scale, target * roots
    products, right = scaled.T @ scaled, scaled.T @ goal
    tolerance = 1e-10 * float(np.linalg.norm(goal))
    count = matrix.shape[1]
    solution, active = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        gradient = np.where(active, -np.inf, right - products @ solution)
        candidate = int(np.argmax(gradient))
        if gradient[candidate] <= tolerance:
            break
        active[candidate] = True
        while True:
            trial = np.zeros(count)
            trial[active] = np.linalg.lstsq(products[np.ix_(active, active)], right[active], rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                break
            part = float((solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300)).min())
            solution += part * (trial - solution)
            active &= solution > 1e-15 * solution.max(initial=0)
            solution[~active] = 0
        solution = trial
    if active.any():  # the products lose half of the digits
        exact = np.linalg.lstsq(scaled[:, active], goal, rcond=None)[0]
        if (exact >= 0).all():
            solution[active] = exact
    return solution / scale
