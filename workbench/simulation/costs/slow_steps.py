"""Steps that took longer than others like them nearby: the machine was slow, and no request is behind it.

A step is compared with steps of about the same contents close to it in the run, so no fit has to hold: the worse a
machine, the less do durations follow from contents, and the more there is to find. A relative fit only corrects the
small differences between such steps; if there are too few of them, it stands in for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import NamedTuple

from workbench.base.text import counted, significant
from workbench.simulation.costs.coefficients import SEARCHED_ON, relative_coefficients
from workbench.simulation.costs.cost_model import step_costs
from workbench.simulation.costs.fit import MIN_STEPS, NORMAL_SPREAD, find_stalls
from workbench.simulation.costs.step_model import Features, StepCosts, predicted_seconds
from workbench.trace import StepRecord, Trace
from workbench.trace.readings.metrics import amount, percentile

SLOW_FACTOR = 1.35
"""A slow step takes at least this many times what steps like it take."""

SLOW_SPREADS = 5.0
"""The logarithm of that factor is at least this many times the spread of the same of all steps."""

SLOW_SECONDS = 0.002
"""A slow step takes at least this much longer."""

REACH = 60
"""Steps on each side among which those like a step are looked for."""

NUM_LIKE, FEWEST_LIKE = 12, 3
"""Number of like steps that are compared, the nearest ones, and the number without which there is no comparison."""

FEWEST_COMPARED = (3, 12, 12)
"""Number of steps with the same ground (`Expected`) below which their spread is not known."""

WEAK = math.log(1.5)
"""Without steps of as many sequences nothing is said if a tenth of such comparisons are off by more than this."""

MOST_DIFFERENT = 1.4
"""Steps whose contents explain durations that differ by more than this factor are not alike."""


@dataclass(frozen=True)
class SlowStep:
    """A step that took longer than its contents explain.

    Attributes:
        step: The step.
        seconds: Its duration.
        expected: The duration of steps like it nearby.
        num_tokens: Rows of its batch.
        time: When it began, in seconds since the start of the trace.
    """

    step: int
    seconds: float
    expected: float
    num_tokens: int
    time: float

    @property
    def factor(self) -> float:
        """The number of times that it took what steps like it take."""
        return self.seconds / self.expected

    def __str__(self) -> str:
        tokens = counted(self.num_tokens, "token")
        return (
            f"step {self.step} took {amount(self.seconds, 's')} for {tokens}, {significant(self.factor, 2)} times the "
            f"{amount(self.expected, 's')} of steps like it nearby"
        )


def slow_steps(trace: Trace) -> tuple[SlowStep, ...]:
    """The steps that took longer than others like them, in order.

    Args:
        trace: A trace with timings; a trace without them, or of few steps, has none. Those of a slice are the whole
            trace's.

    Example:
        >>> from workbench import CostModel, simulate
        >>> requests = [{"id": "a", "prompt": {"len": 100}, "max_tokens": 40}]
        >>> slow_steps(simulate({"requests": requests}, cost_model=CostModel(fixed=0.1)))
        ()
    """
    compared = compare_steps(trace)
    steps = compared.steps
    return tuple(
        [
            SlowStep(record.step, steps.seconds[index], expected, record.num_tokens, record.time)
            for record, index, expected in compared.of_trace(trace, compared.slow)
        ]
    )


class Expected(NamedTuple):
    """The duration that a step should have.

    Attributes:
        seconds: The duration.
        ground: 0 if steps with as many sequences say it, 1 if steps with nearly as many do, as some machines jump from
            one number to the next, and 2 for the relative fit and its errors nearby.
    """

    seconds: float
    ground: int


def expectations(steps: StepCosts) -> list[Expected]:
    """The duration that each step should have by those near it; empty for too few steps."""
    if len(steps) < MIN_STEPS:
        return []
    priced = predicted_seconds(relative_coefficients(steps.thinned(SEARCHED_ON)), steps.features)
    residuals = [math.log(max(seconds, 1e-9) / max(one, 1e-9)) for seconds, one in zip(steps.seconds, priced)]
    comparison = _Comparison(steps.features, steps.seconds, priced, residuals)
    return [comparison.of(index) for index in range(len(steps))]


def find_slow(steps: StepCosts, expected: Sequence[Expected]) -> dict[int, float]:
    """The indices of slow steps, with the seconds that steps like them take.

    Args:
        steps: The steps.
        expected: Their `expectations`.
    """
    found: dict[int, float] = {}
    for ground in range(3):
        late = {
            index: math.log(max(steps.seconds[index], 1e-9) / max(one.seconds, 1e-9))
            for index, one in enumerate(expected)
            if one.ground == ground
        }
        if len(late) < FEWEST_COMPARED[ground]:
            continue
        middle = median(late.values())
        distances = sorted(abs(value - middle) for value in late.values())
        least = max(math.log(SLOW_FACTOR), SLOW_SPREADS * NORMAL_SPREAD * median(distances))
        if ground and percentile(distances, 90) > WEAK:
            continue
        for index, value in late.items():
            if value >= least and steps.seconds[index] - expected[index].seconds >= SLOW_SECONDS:
                found[index] = expected[index].seconds
    return found


class Compared(NamedTuple):
    """The measured steps of a whole trace, each compared with those near it.

    Attributes:
        steps: The steps.
        expected: The duration that each should have; empty for too few steps.
        slow: The indices of slow steps, with the seconds that steps like them take.
        stalled: The same of stalls, as a fit finds them.
    """

    steps: StepCosts
    expected: list[Expected]
    slow: dict[int, float]
    stalled: dict[int, float]

    def of_trace(self, trace: Trace, found: Mapping[int, float]) -> Iterator[tuple[StepRecord, int, float]]:
        """The records of found indices that are in the trace or slice, in order, with index and expected seconds."""
        first = trace[0].step if len(trace) else 0
        for index, expected in sorted(found.items()):
            if 0 <= (place := self.steps.places[index][1] - first) < len(trace):
                yield trace[place], index, expected


def compare_steps(trace: Trace) -> Compared:
    """Compare the steps of a trace, once for all who ask until it grows; a slice has the comparison of the whole."""
    return trace.whole.reading_so_far("compared steps", _compared)


def _compared(trace: Trace) -> Compared:
    steps = step_costs(trace)
    expected = expectations(steps)
    return Compared(steps, expected, find_slow(steps, expected), find_stalls(steps))


class _Comparison:
    """Compares each step with those near it."""

    def __init__(
        self,
        features: Sequence[Features],
        seconds: Sequence[float],
        priced: Sequence[float],
        residuals: Sequence[float],
    ) -> None:
        self._features, self._seconds, self._priced, self._residuals = features, seconds, priced, residuals
        self._kinds = [-sequences if prefill > 0 else sequences for sequences, prefill, _, _ in features]
        self._contexts = [kv_tokens for _, _, kv_tokens, _ in features]

    def of(self, index: int) -> Expected:
        """The duration that a step should have."""
        kinds, contexts, priced = self._kinds, self._contexts, self._priced
        kind, context, price = kinds[index], contexts[index], priced[index]
        equal: list[float] = []
        like: list[float] = []
        needs_like = True  # they count only if fewer than FEWEST_LIKE are equal
        for other in self._near(index):  # in place, because a million pairs are compared
            if (another := kinds[other]) != kind:
                if not needs_like or (another > 0) != (kind > 0):  # with a prompt and without are never alike
                    continue
                difference, most = abs(another - kind), max(abs(another), abs(kind))
                if difference > 1 and difference > 0.15 * most:
                    continue
            further = contexts[other]
            if abs(context - further) > 0.3 * (context if context > further else further):
                continue
            if kind < 0 and not self._has_like_prompts(index, other):
                continue
            ratio = price / priced[other] if priced[other] > 0 else 1.0
            if 1 / MOST_DIFFERENT <= ratio <= MOST_DIFFERENT:
                (equal if another == kind else like).append(self._seconds[other] * ratio)
                if len(equal) == NUM_LIKE:
                    break
                needs_like = len(equal) < FEWEST_LIKE and len(like) < NUM_LIKE
        if len(equal) >= FEWEST_LIKE:
            return Expected(median(equal), 0)
        if len(equal) + len(like) >= FEWEST_LIKE:
            return Expected(median([*equal, *like]), 1)
        of_kind = (self._residuals[other] for other in self._near(index) if (kinds[other] > 0) == (kind > 0))
        same_kind = list(islice(of_kind, NUM_LIKE))
        return Expected(price * math.exp(median(same_kind)) if same_kind else price, 2)

    def _has_like_prompts(self, index: int, other: int) -> bool:
        """Whether two steps have about the same prompt tokens, and as much work for them."""
        (_, tokens, _, cells), (_, other_tokens, _, other_cells) = self._features[index], self._features[other]
        return abs(tokens - other_tokens) <= 0.1 * max(tokens, other_tokens) and abs(cells - other_cells) <= 0.4 * max(
            cells, other_cells
        )

    def _near(self, index: int) -> Iterable[int]:
        """The steps near one, the nearest first."""
        size = len(self._features)
        if REACH <= index < size - REACH:
            return map(index.__add__, _OFFSETS)
        return [index + offset for offset in _OFFSETS if 0 <= index + offset < size]


_OFFSETS = [offset for distance in range(1, REACH + 1) for offset in (-distance, distance)]
