"""Sorted values of which many are equal, such as the gaps between tokens: a step gives the same to all its requests."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, chain, repeat


class Ordered:
    """Values in order, each kept once with its number.

    Args:
        values: The values in any order, or the number of each.

    Attributes:
        different: The different values in order.

    Example:
        >>> gaps = Ordered([0.2, 0.1, 0.2])
        >>> list(gaps), gaps[1], len(gaps)
        ([0.1, 0.2, 0.2], 0.2, 3)
    """

    def __init__(self, values: Iterable[float] | Mapping[float, int]) -> None:
        counts = Counter(values)
        self.different = sorted(counts)
        self._counts = [counts[value] for value in self.different]
        self._ends = list(accumulate(self._counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> float:
        return self.different[bisect_right(self._ends, range(len(self))[place])]

    def __iter__(self) -> Iterator[float]:
        return chain.from_iterable(map(repeat, self.different, self._counts))
