"""A machine that becomes slower or faster in the course of a recording: a trend in the durations of its steps.

Load often grows in the course of a recording as well, and a fit that knows of no trend takes its effect for the cost of
more sequences. A fit therefore levels the durations first, and a prediction of the same period has the same trend.
Progress is counted in computed rows, because another setting computes the same rows at about the same time.

Steps near each other are often slow together, because another program runs for a while. Such a recording has a slope in
any case, and its steps are far fewer independent measurements than they seem. The error of a trend therefore comes from
a jackknife: the trend is estimated again without each of a few long stretches of the recording.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.ground.on_demand import np

MIN_CHANGE = 0.05
"""A smaller change of speed matters less than other errors and is left alone."""

STRETCHES = 8
"""Number of stretches of the jackknife; a disturbance much shorter than one of them is not taken for a trend."""

MIN_ERRORS = 4.0
"""A trend is certain if it is this many times its error, which chance exceeds in 0.5 % of recordings (8 stretches)."""

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
    """

    change: float = 0.0
    center: float = 0.5
    num_rows: float = 1.0
    error: float = 0.0

    @property
    def is_certain(self) -> bool:
        """Whether the change is larger than MIN_CHANGE and than chance explains."""
        return abs(self.change) >= max(MIN_CHANGE, MIN_ERRORS * self.error)

    def factor(self, rows: float) -> float:
        """Duration of a step against the mean, when this many rows have been computed."""
        progress = min(1.0, rows / self.num_rows)
        return min(FASTEST, max(SLOWEST, 1 + self.change * (progress - self.center)))

    def factors(self, rows: np.ndarray) -> np.ndarray:
        """The same of the steps of a recording, float64 [steps].

        Args:
            rows: Rows of each step, float64 [steps].
        """
        return np.array([self.factor(done) for done in np.cumsum(rows)])


def find_drift(rows: np.ndarray, measured: np.ndarray, predicted: np.ndarray, slopes: np.ndarray) -> Drift:
    """The trend of measured against predicted durations, with its error.

    The coefficients of the model and the trend are estimated together, so the effect of a load that grows is not taken
    for a trend.

    Args:
        rows: Rows of each step, float64 [steps].
        measured: Durations, float64 [steps].
        predicted: Durations according to a model without a trend, float64 [steps].
        slopes: Derivatives of these durations with respect to the model's coefficients, float64 [steps, coefficients].
    """
    progress = np.cumsum(rows) / rows.sum()
    center = float(np.average(progress, weights=predicted))
    matrix = np.column_stack([slopes, predicted * (progress - center)]) / np.sqrt(predicted)[:, None]
    matrix /= (scale := np.sqrt((matrix**2).sum(axis=0)))
    target = measured / np.sqrt(predicted)
    stretches = np.array_split(np.arange(len(rows)), STRETCHES)
    products = np.array([matrix[stretch].T @ matrix[stretch] for stretch in stretches])
    right = np.array([matrix[stretch].T @ target[stretch] for stretch in stretches])
    level = measured.sum() / predicted.sum()

    def change(products: np.ndarray, right: np.ndarray) -> float:
        return float(np.linalg.lstsq(products, right, rcond=1e-12)[0][-1] / scale[-1] / level)

    without = np.array([change(products.sum(0) - product, right.sum(0) - one) for product, one in zip(products, right)])
    error = float(np.sqrt((STRETCHES - 1) * ((without - without.mean()) ** 2).mean()))
    return Drift(change(products.sum(0), right.sum(0)), center, float(rows.sum()), error)
