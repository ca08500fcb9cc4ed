"""A machine that becomes slower or faster in the course of a recording: a trend in the durations of its steps.

Load often grows in the course of a recording as well, and a fit that knows of no trend takes its effect for the cost of
more sequences. A fit therefore levels the durations first, and a prediction of the same period has the same trend.
Progress is counted in computed rows, because another setting computes the same rows at about the same time.

Steps near each other are often slow together, because another program runs for a while. Such a recording has a slope in
any case, and its steps are far fewer independent measurements than they seem. The error of a trend therefore comes from
a jackknife: the trend is estimated again without each of a few long stretches of the recording.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from workbench.simulation.costs.least_squares import Vector, dot, solve
from workbench.simulation.costs.step_model import scaled

MIN_CHANGE = 0.05
"""A smaller change of speed matters less than other errors and is left alone."""

STRETCHES = 8
"""Number of stretches of the jackknife; a disturbance much shorter than one of them is not taken for a trend."""

MIN_ERRORS = 4.0
"""A trend is certain if it is this many times its error, which chance exceeds in 0.5% of recordings (8 stretches)."""

SLOWEST, FASTEST = 0.2, 5.0
"""Limits of the factor: a trend is a line, and must not lead to steps without duration."""


@dataclass(frozen=True)
class Drift:
    """A linear trend in the duration of equal steps.

    Attributes:
        change: Change from the beginning to the end, as a fraction of the mean duration; 0 for no trend.
        center: Progress at which a step takes the mean duration, from 0 to 1.
        num_rows: Rows of the whole recording.
        error: Standard error of the change.

    Example:
        >>> Drift(change=0.2, center=0.5, num_rows=1000).factor(750)
        1.05
        >>> print(Drift(change=-2.1, center=0.5))
        steps took 90% less time at the end of the recording than at its start
    """

    change: float = 0.0
    center: float = 0.5
    num_rows: float = 1.0
    error: float = 0.0

    @property
    def is_certain(self) -> bool:
        """Whether the change is larger than MIN_CHANGE and than chance explains."""
        return abs(self.change) >= self.least_certain

    @property
    def least_certain(self) -> float:
        """The smallest change that would be certain with this error."""
        return max(MIN_CHANGE, MIN_ERRORS * self.error)

    def factor(self, rows: float) -> float:
        """Duration of a step against the mean, when this many rows have been computed."""
        progress = min(1.0, rows / self.num_rows)
        return min(FASTEST, max(SLOWEST, 1 + self.change * (progress - self.center)))

    def __str__(self) -> str:
        """The trend: "steps took 30% less time at the end of the recording than at its start"."""
        ratio = self.factor(self.num_rows) / self.factor(0)
        more = "more" if ratio > 1 else "less"
        return f"steps took {abs(ratio - 1):.0%} {more} time at the end of the recording than at its start"

    def factors(self, rows: Vector) -> list[float]:
        """The same of the steps of a recording.

        Args:
            rows: Rows of each step.
        """
        return [self.factor(done) for done in accumulate(rows)]


def find_drift(rows: Vector, measured: Vector, predicted: Vector, slopes: Sequence[Vector]) -> Drift:
    """The trend of measured against predicted durations, with its error.

    The coefficients of the model and the trend are estimated together, so the effect of a load that grows is not taken
    for a trend.

    Args:
        rows: Rows of each step.
        measured: Durations.
        predicted: Durations according to a model without a trend.
        slopes: Derivatives of these durations with respect to the model's coefficients, a column for each.
    """
    total = sum(rows)
    progress = [done / total for done in accumulate(rows)]
    level = sum(predicted)
    center = dot(progress, predicted) / level
    trend = [seconds * (done - center) for seconds, done in zip(predicted, progress)]
    roots = [1 / math.sqrt(seconds) for seconds in predicted]
    matrix = [scaled(column, roots) for column in (*slopes, trend)]
    scale = [math.sqrt(dot(column, column)) or 1.0 for column in matrix]
    target = scaled(measured, roots)
    products, right = [], []
    for stretch in stretches(len(rows), STRETCHES):
        part = [[value / size for value in column[stretch]] for column, size in zip(matrix, scale)]
        products.append([[dot(one, part[j]) for j in range(i + 1)] for i, one in enumerate(part)])
        right.append([dot(column, target[stretch]) for column in part])
    faster = scale[-1] * sum(measured) / level

    def change(left_out: int | None = None) -> float:
        kept = [k for k in range(STRETCHES) if k != left_out]
        matrix = [[sum(cells) for cells in zip(*(products[k][i] for k in kept))] for i in range(len(scale))]
        return solve(matrix, [sum(cells) for cells in zip(*(right[k] for k in kept))])[-1] / faster

    without = [change(k) for k in range(STRETCHES)]
    mean = fmean(without)
    error = math.sqrt((STRETCHES - 1) * fmean((one - mean) ** 2 for one in without))
    return Drift(change(), center, total, error)


def stretches(length: int, count: int) -> list[slice]:
    """A sequence of this length, cut into so many stretches of nearly equal length."""
    ends = [length * k // count for k in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]
