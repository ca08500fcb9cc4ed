"""A machine that becomes slower or faster in the course of a recording: a trend in the durations of its steps.

Load often grows in the course of a recording as well, and a fit that knows of no trend takes its effect for the cost of
more sequences. A fit therefore levels the durations first, and a prediction of the same period has the same trend.
Progress is counted in computed rows, because another setting computes the same rows at about the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.on_demand import np

MIN_CHANGE = 0.05
"""A smaller change of speed is within the noise of a recording and left alone."""

SLOWEST, FASTEST = 0.2, 5.0
"""Limits of the factor: a trend is a line, and must not lead to steps without duration."""


@dataclass(frozen=True)
class Drift:
    """A linear trend in the duration of equal steps.

    Attributes:
        change: Change from the beginning to the end, as a fraction of the mean duration; 0 for no trend.
        center: Progress at which a step takes the mean duration, from 0 to 1.
        num_rows: Rows of the whole recording.

    Example:
        >>> Drift(change=0.2, center=0.5, num_rows=1000).factor(750)
        1.05
    """

    change: float = 0.0
    center: float = 0.5
    num_rows: float = 1.0

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


def find_drift(rows: np.ndarray, measured: np.ndarray, predicted: np.ndarray) -> Drift:
    """The trend of measured against predicted durations.

    Args:
        rows: Rows of each step, float64 [steps].
        measured: Durations, float64 [steps].
        predicted: Durations according to a model without a trend, float64 [steps].
    """
    progress = np.cumsum(rows) / rows.sum()
    center = float(np.average(progress, weights=predicted))
    offset = progress - center
    level = measured.sum() / predicted.sum()
    change = float((offset * (measured - level * predicted)).sum() / (level * predicted * offset**2).sum())
    return Drift(change, center, float(rows.sum()))
