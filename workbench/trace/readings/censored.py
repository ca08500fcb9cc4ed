"""Estimates from times of which some had not ended: a request that has waited 110 s waits for at least 110 s.

Leaving such times out makes the worst minute of a server its best, and counting them as if they had ended makes
requests that have just arrived look fast. So the weight of a time that had not ended is divided among all that are
longer (the Kaplan-Meier estimate); if the longest had not ended, its weight stays. Predictions and targets are compared
with these estimates. They do not bound anything: five times so far of 6 s to 15 s become five of 15 s. The summary of a
run has bounds instead (`workbench.trace.readings.metrics.Distribution`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate


class Times:
    """Some times, of which a few had not ended.

    Args:
        ended: Those that had.
        open: The lengths so far of those that had not.

    Example:
        >>> waits = Times([0.1], [119.0, 119.0])
        >>> waits.percentile(50), waits.percentile(20)
        (119.0, 0.1)
    """

    def __init__(self, ended: Iterable[float], open: Iterable[float] = ()) -> None:
        both = sorted([*((float(time), False) for time in ended), *((float(time), True) for time in open)])
        self._times = [time for time, _ in both]
        weights, each = [], 1 / len(both) if both else 0.0
        for place, (_, is_open) in enumerate(both):
            longer = len(both) - 1 - place
            weights.append(0.0 if is_open and longer else each)
            each *= 1 + 1 / longer if is_open and longer else 1.0
        self._reached = list(accumulate(weights))
        self.mean = sum(time * weight for time, weight in zip(self._times, weights)) if both else None

    def __len__(self) -> int:
        return len(self._times)

    def percentile(self, percent: float) -> float:
        """The shortest time that this percentage of all times are estimated not to exceed."""
        place = bisect_left(self._reached, percent / 100 * (1 - 1e-12))
        return self._times[min(place, len(self._times) - 1)]
