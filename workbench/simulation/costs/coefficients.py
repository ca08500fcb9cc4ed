"""The coefficients of a cost model whose predictions are closest to the measured durations of steps.

The fit is a regression with non-negative coefficients in which a step's variance is proportional to its duration
(quasi-Poisson with an identity link, by iterated weights). Its predictions add up to exactly the measured time, so a
simulated run is neither too short nor too long, and steps with and without prompts are each right on average.

The weights and the shares of overlapped times depend on the coefficients, so every iteration is a pass over the steps:
no matrix of products can be kept. The passes are few instead: exponents are compared on some hundred steps first, and
each set of steps is searched from the coefficients of the one before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub

from workbench.simulation.costs.least_squares import Vector, dot, non_negative_least_squares, normal_equations
from workbench.simulation.costs.step_model import (
    ADDED,
    COMPUTE,
    LINEAR,
    MEMORY,
    StepCosts,
    columns,
    overlapped,
    scaled,
)
from workbench.trace.readings.metrics import percentile

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

COMPARED_ON, SEARCHED_ON = 500, 2_000
"""Number of steps that all exponents are tried on, and of those that the best one's neighbours are tried on. The
coefficients are then fitted to all steps."""

Coefficients = dict[str, float]


class Regression:
    """Fits coefficients to several sets of steps of one machine, such as a part of a recording and all of it."""

    def __init__(self) -> None:
        self._last: Coefficients | None = None

    def coefficients(self, steps: StepCosts) -> Coefficients:
        """The coefficients by name, with "overlap", whose predictions add up to the measured time.

        The exponent is the one with the smallest misfit, in which a disturbed step counts by its size and not by its
        square: few steps lie near the knee, and a handful of disturbed ones elsewhere must not decide about its shape.
        The search continues from the exponent of the steps before these.
        """
        searched = steps.thinned(SEARCHED_ON)
        kinds = _kinds(searched)
        added, misfit = _fit_added(kinds)
        if misfit <= EXACT * sum(searched.seconds):
            return _fit_added(_kinds(steps))[0]
        if self._last is None and len(searched) > COMPARED_ON:
            self._last, _ = _with_best_overlap(_kinds(steps.thinned(COMPARED_ON)), None)
        self._last, smallest = _with_best_overlap(kinds, self._last)
        smallest += EXACT * sum(searched.seconds)
        found = self._last if smallest < (1 - OVERLAP_GAIN / len(searched)) * misfit else added
        if len(searched) == len(steps):
            return found
        kinds = _kinds(steps)
        return (_fit_added(kinds) if found is added else _fit_overlapped(kinds, found["overlap"], found))[0]


def relative_coefficients(steps: StepCosts) -> Coefficients:
    """The coefficients without overlap with the smallest relative errors, which hardly follow a stall."""
    kinds = _kinds(steps)
    return _solved_added(kinds, [[n / one / one for one, n in zip(kind.seconds, kind.counts)] for kind in kinds])


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


def _with_best_overlap(kinds: Sequence[_Kind], near: Coefficients | None) -> tuple[Coefficients, float]:
    """The coefficients with the best exponent, and their misfit.

    All exponents are tried on up to COMPARED_ON steps, whose misfit can have several minima. On more steps they are
    tried beside the best one, until none is better.

    Args:
        kinds: Measured steps.
        near: Coefficients of similar steps to begin with.
    """
    found: dict[int, tuple[Coefficients, float]] = {}
    few = sum(sum(kind.counts) for kind in kinds) <= COMPARED_ON
    ahead = [OVERLAPS.index(near["overlap"])] if near and not few else list(range(len(OVERLAPS)))
    while ahead:
        for index in ahead:
            near, _ = found[index] = _fit_overlapped(kinds, OVERLAPS[index], near)
        best = min(found, key=lambda index: found[index][1])
        near = found[best][0]
        ahead = [index for index in (best - 1, best + 1) if 0 <= index < len(OVERLAPS) and index not in found]
    return found[best]


def _misfit(kinds: Sequence[_Kind], predicted: Sequence[Vector]) -> float:
    """The sum of |predicted - measured| / sqrt(predicted)."""
    return sum(
        count * abs(one - seconds) / math.sqrt(one if one > 1e-3 * seconds else 1e-3 * seconds)
        for kind, durations in zip(kinds, predicted)
        for one, seconds, count in zip(durations, kind.seconds, kind.counts)
    )


def _solved_added(kinds: Sequence[_Kind], weights: Sequence[Vector]) -> Coefficients:
    """The best coefficients of a model that adds all times, with fixed weights."""
    parts = [{name: kind.columns[name] for name in LINEAR if name in kind.columns} for kind in kinds]
    return _solved(LINEAR, list(zip(kinds, parts, weights))) | {"overlap": 1.0}


def _fit_added(kinds: Sequence[_Kind]) -> tuple[Coefficients, float]:
    """The best coefficients of a model that adds all times, and their misfit."""
    predicted = [kind.seconds for kind in kinds]
    for _ in range(4):
        coefficients = _solved_added(kinds, [kind.weights(one) for kind, one in zip(kinds, predicted)])
        predicted = [kind.summed(coefficients, LINEAR) for kind in kinds]
    return coefficients, _misfit(kinds, predicted)


def _fit_overlapped(kinds: Sequence[_Kind], overlap: float, start: Coefficients | None) -> tuple[Coefficients, float]:
    """The best coefficients with one exponent, and their misfit.

    The overlapped time is homogeneous in the two times that it joins, so it is a sum of them with weights, its partial
    derivatives. With the weights fixed the model is linear; they are computed again from each solution (Gauss-Newton).

    Args:
        kinds: Measured steps.
        overlap: The exponent.
        start: Coefficients to begin with; None to begin with several guesses of the knee.
    """
    best: Coefficients = {}
    smallest, misfit = math.inf, math.inf
    if start is not None:
        parts = [overlapped(kind.summed(start, MEMORY), kind.summed(start, COMPUTE), overlap) for kind in kinds]
        first = [[(memory_share, compute_share) for _, memory_share, compute_share in parts]]
        durations: list[Vector] = [list(map(add, kind.summed(start, ADDED), one[0])) for kind, one in zip(kinds, parts)]
    else:
        rows = [kind.columns.get("per_row", [1.0] * len(kind.seconds)) for kind in kinds]
        first = [[_on_sides_of(knee, one) for one in rows] for knee in _knees(kinds, rows)]
        durations = [kind.seconds for kind in kinds]
    measured = sum(dot(kind.seconds, kind.counts) for kind in kinds)
    for shares in first:
        weights = [kind.weights(one) for kind, one in zip(kinds, durations)]
        error = sum(map(_squared, kinds, weights, durations)) if start is not None else math.inf
        for _ in range(MAX_ITERATIONS):
            shared = [_shared(kind, *share) for kind, share in zip(kinds, shares)]
            values = _solved((*ADDED, *MEMORY, *COMPUTE), list(zip(kinds, shared, weights)))
            predicted = []
            for k, kind in enumerate(kinds):
                added, memory, compute = (kind.summed(values, names) for names in (ADDED, MEMORY, COMPUTE))
                linear = [
                    one + part * share + other * rest
                    for one, part, share, other, rest in zip(added, memory, shares[k][0], compute, shares[k][1])
                ]
                weights[k] = kind.weights(linear)
                joined, memory_share, compute_share = overlapped(memory, compute, overlap)
                shares[k] = memory_share, compute_share
                predicted.append(list(map(add, added, joined)))
            # Iterations that diverge have an infinite error: another start wins.
            before, error = error, sum(map(_squared, kinds, weights, predicted))
            if abs(before - error) <= CONVERGED * error:
                break
        if error < smallest or not best:
            # The last solution belongs to the shares before it: scale it so that the sums agree.
            scale = measured / sum(dot(one, kind.counts) for kind, one in zip(kinds, predicted))
            best, smallest = {name: value * scale for name, value in values.items()}, error
            misfit = _misfit(kinds, [[scale * one for one in durations] for durations in predicted])
    return best | {"overlap": overlap}, misfit


def _squared(kind: _Kind, weights: Vector, predicted: Vector) -> float:
    """The weighted sum of the squared errors of predicted durations."""
    return sum([weight * one * one for weight, one in zip(weights, map(sub, predicted, kind.seconds))])


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
