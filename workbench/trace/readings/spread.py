"""Whether a latency changed between two real runs, or differs by no more than two runs of one server do.

Two runs of a server never take the same time: another program runs for a while, and a request that just misses a step
waits for the next one. Requests near each other share that, so many of them gain or pay together although nothing
changed. A setting or a version that matters shows in every part of a run, if not to the same extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log
from statistics import fmean
from typing import NamedTuple

PARTS = 8
"""Number of parts of a run. Without a change all of them move the same way in 1 of 128 comparisons."""

MIN_REQUESTS = 2 * PARTS
"""With fewer requests a part says nothing."""

MIN_CHANGE = 0.02
"""A smaller change is never certain: two runs of one server differ by that much."""


class Change(NamedTuple):
    """The typical change of a latency, as a factor of each request.

    Attributes:
        ratio: Geometric mean of after / before.
        num_agreeing: Number of parts of the run in which it moved this way.
    """

    ratio: float
    num_agreeing: int

    @property
    def is_certain(self) -> bool:
        """Whether it is larger than the spread of the runs."""
        return self.num_agreeing == PARTS and abs(self.ratio - 1) >= MIN_CHANGE

    def __str__(self) -> str:
        return f"{self.ratio - 1:+z.0%} per request, in {self.num_agreeing} of {PARTS} parts of the run"


def typical_change(pairs: Sequence[tuple[float, float]]) -> Change | None:
    """The change between two runs; None for fewer than MIN_REQUESTS requests.

    Args:
        pairs: A latency of each request before and after, in order of arrival; those with a 0 are left out.

    Example:
        >>> str(typical_change([(1.0, 1.1), (1.0, 1.3)] * 20))
        '+20% per request, in 8 of 8 parts of the run'
    """
    logs = [log(after / before) for before, after in pairs if before > 0 and after > 0]
    if len(logs) < MIN_REQUESTS:
        return None
    whole = fmean(logs)
    bounds = [i * len(logs) // PARTS for i in range(PARTS + 1)]
    agreeing = sum(fmean(logs[begin:end]) * whole > 0 for begin, end in pairwise(bounds))
    return Change(exp(whole), agreeing)
