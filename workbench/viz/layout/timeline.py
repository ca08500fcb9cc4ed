"""The step timeline: tokens per step against the budget, with marks for events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.on_demand import np
from workbench.trace.records import StepRecord

MARKED_EVENTS = ("admit", "resume", "preempt", "finish")
"""Kinds of events that are marked above a bar, in drawing order."""


@dataclass(frozen=True)
class StepBars:
    """One stacked bar per step (or per bin of steps), from 0 upwards: decode, prefill, slack.

    Attributes:
        step: First step of each bar, int64 [n].
        num_steps: Steps of each bar; 1 without binning, int64 [n].
        decode: Decode tokens, mean over the bin, float64 [n].
        prefill: Prefill tokens, mean over the bin, float64 [n].
        budget: Token budget, maximum over the bin, float64 [n].
        low: Minimum number of tokens of a step in the bin, float64 [n].
        high: Maximum number of tokens of a step in the bin, float64 [n].
        marks: (step, kind) for every kind of event in MARKED_EVENTS that occurs in a step.
    """

    step: np.ndarray
    num_steps: np.ndarray
    decode: np.ndarray
    prefill: np.ndarray
    budget: np.ndarray
    low: np.ndarray
    high: np.ndarray
    marks: tuple[tuple[int, str], ...]

    @property
    def slack(self) -> np.ndarray:
        """Unused budget above each bar, float64 [n]; never negative."""
        return np.maximum(self.budget - self.decode - self.prefill, 0.0)

    @property
    def top(self) -> float:
        """Height of the scale in tokens."""
        return float(max(1.0, *self.budget, *self.high)) if len(self.step) else 1.0


def step_bars(records: Sequence[StepRecord], max_bars: int = 2000) -> StepBars:
    """Bars of consecutive records; with more than ``max_bars`` records, neighbouring steps share a bin.

    Args:
        records: Steps in order.
        max_bars: Maximum number of bars. All bins hold the same number of steps, except that the last may hold fewer.
    """
    decode = np.array([record.num_decode_tokens for record in records], dtype=np.float64)
    total = np.array([record.num_tokens for record in records], dtype=np.float64)
    budget = np.array([record.token_budget for record in records], dtype=np.float64)
    marks = tuple(
        (record.step, kind)
        for record in records
        for kind, ids in zip(MARKED_EVENTS, (record.admitted, record.resumed, record.preempted, record.finished))
        if ids
    )
    size = max(1, -(-len(records) // max_bars))
    starts = np.arange(0, len(records), size)
    counts = np.diff(np.append(starts, len(records)))
    first = records[0].step if records else 0
    if not len(starts):
        empty = np.zeros(0)
        return StepBars(starts, counts, empty, empty, empty, empty, empty, marks)
    return StepBars(
        step=first + starts,
        num_steps=counts,
        decode=np.add.reduceat(decode, starts) / counts,
        prefill=np.add.reduceat(total - decode, starts) / counts,
        budget=np.maximum.reduceat(budget, starts),
        low=np.minimum.reduceat(total, starts),
        high=np.maximum.reduceat(total, starts),
        marks=marks,
    )
