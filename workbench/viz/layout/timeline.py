"""The step timeline: tokens per step against the budget, with marks for events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.trace.records import StepRecord

MARKED_EVENTS = ("admit", "resume", "preempt", "finish")
"""Kinds of events that are marked above a bar, in drawing order."""


@dataclass(frozen=True)
class StepBars:
    """One stacked bar per step (or per bin of steps), from 0 upwards: decode, prefill, slack.

    Attributes:
        step: First step of each bar.
        num_steps: Steps of each bar; 1 without binning.
        decode: Decode tokens, mean over the bin.
        prefill: Prefill tokens, mean over the bin.
        budget: Token budget, maximum over the bin.
        low: Minimum number of tokens of a step in the bin.
        high: Maximum number of tokens of a step in the bin.
        marks: (step, kind) for every kind of event in MARKED_EVENTS that occurs in a step.
    """

    step: list[int]
    num_steps: list[int]
    decode: list[float]
    prefill: list[float]
    budget: list[int]
    low: list[int]
    high: list[int]
    marks: tuple[tuple[int, str], ...]

    @property
    def slack(self) -> list[float]:
        """Unused budget above each bar; never negative."""
        bars = zip(self.budget, self.decode, self.prefill)
        return [max(budget - decode - prefill, 0.0) for budget, decode, prefill in bars]

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
    marks = tuple(
        (record.step, kind)
        for record in records
        for kind, ids in zip(MARKED_EVENTS, (record.admitted, record.resumed, record.preempted, record.finished))
        if ids
    )
    size = max(1, -(-len(records) // max_bars))
    bins = [records[start : start + size] for start in range(0, len(records), size)]
    totals = [[record.num_tokens for record in records] for records in bins]
    decodes = [sum([record.num_decode_tokens for record in records]) for records in bins]
    return StepBars(
        step=[records[0].step for records in bins],
        num_steps=[len(records) for records in bins],
        decode=[decode / len(total) for decode, total in zip(decodes, totals)],
        prefill=[(sum(total) - decode) / len(total) for decode, total in zip(decodes, totals)],
        budget=[max([record.token_budget for record in records]) for records in bins],
        low=[min(total) for total in totals],
        high=[max(total) for total in totals],
        marks=marks,
    )
