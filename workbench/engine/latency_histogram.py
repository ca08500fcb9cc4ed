"""Latencies of any number of events in a few hundred counters."""

from __future__ import annotations

import math

from workbench.trace.metrics import Distribution

BIN_WIDTH = 0.01
"""Relative width of a bin: percentiles are right to half of this, mean and maximum exactly."""

_SCALE = 1 / math.log1p(BIN_WIDTH)


class LatencyHistogram:
    """Counts of latencies in bins that are 1 % wide.

    Attributes:
        count: Events.
        total: Their sum in seconds.
        max: The largest in seconds.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._bins: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        """Add an event, or several equal ones."""
        bin_ = round(math.log(max(seconds, 1e-9)) * _SCALE)
        self._bins[bin_] = self._bins.get(bin_, 0) + times
        self.count += times
        self.total += seconds * times
        self.max = max(self.max, seconds)

    def percentile(self, percent: float) -> float | None:
        """The latency that this percentage of events stays within, in seconds; None without events."""
        wanted, seen = self.count * percent / 100, 0
        for bin_, times in sorted(self._bins.items()):
            seen += times
            if seen >= wanted:
                return min(math.exp(bin_ / _SCALE), self.max)
        return None

    def distribution(self) -> Distribution:
        """Mean, percentiles and maximum."""
        if not self.count:
            return Distribution(0)
        p50, p95, p99 = (self.percentile(percent) for percent in (50, 95, 99))
        return Distribution(self.count, self.total / self.count, p50, p95, p99, self.max)
