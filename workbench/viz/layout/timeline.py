"""The step timeline: tokens per step against the budget, with marks for events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.trace.fields import EMPTY
from workbench.trace.records import StepRecord

MARKED_EVENTS = ("admit", "resume", "preempt", "finish", "abort")
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


@dataclass(frozen=True)
class TimelineMarks:
    """The marks of a timeline.

    Attributes:
        bars: The bars.
        top: Height of the scale in tokens: the highest bar alone if it uses less than a quarter of the budget.
        slack: Unused budget above each bar, as far as the scale reaches.
        framed: Index of the bar that holds the framed step; None for none.
        events: (step, kind) once for each, those that are drawn last at the end.
        stalls: (step, sentence) of the steps that stalled.
    """

    bars: StepBars
    top: float
    slack: list[float]
    framed: int | None
    events: list[tuple[int, str]]
    stalls: list[tuple[int, str]]

    @property
    def span(self) -> tuple[int, int]:
        """The first step, and the one after the last."""
        return self.bars.step[0], self.bars.step[-1] + self.bars.num_steps[-1]

    def place(self, step: float) -> float:
        """A step as a share of the width."""
        first, last = self.span
        return (step - first) / max(1, last - first)


DRAWN_LAST = ("finish", "admit", "resume", "preempt", "abort")


def timeline_marks(
    records: Sequence[StepRecord], at: int | None = None, stalls: Mapping[int, str] = EMPTY, max_bars: int = 2000
) -> TimelineMarks | None:
    """The marks of a timeline; None without a step.

    Args:
        records: Steps in order.
        at: The step to frame.
        stalls: A sentence about each step that stalled.
        max_bars: As in `step_bars`.
    """
    if not records:
        return None
    bars = step_bars(records, max_bars)
    heights = [decode + prefill for decode, prefill in zip(bars.decode, bars.prefill)]
    top = bars.top if max(heights) * 4 >= bars.top else max(*heights, 1.0)
    holds = [step <= at < step + count for step, count in zip(bars.step, bars.num_steps)] if at is not None else []
    marks = TimelineMarks(
        bars=bars,
        top=top,
        slack=[min(slack, top - height) for slack, height in zip(bars.slack, heights)],
        framed=holds.index(True) if any(holds) else None,
        events=[(step, kind) for kind in DRAWN_LAST for step in sorted({s for s, mark in bars.marks if mark == kind})],
        stalls=[],
    )
    first, last = marks.span
    marks.stalls.extend((step, words) for step, words in stalls.items() if first <= step < last)
    return marks


def step_bars(records: Sequence[StepRecord], max_bars: int = 2000) -> StepBars:
    """Bars of consecutive records; with more than ``max_bars`` records, neighbouring steps share a bin.

    Args:
        records: Steps in order.
        max_bars: Maximum number of bars. All bins hold the same number of steps, except that the last may hold fewer.
    """
    marks = tuple(
        (record.step, kind)
        for record in records
        for kind, ids in zip(
            MARKED_EVENTS, (record.admitted, record.resumed, record.preempted, record.finished, record.aborted)
        )
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
