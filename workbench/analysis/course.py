"""The course of a request: the causes of each piece of its time, and the parts of any stretch of that time.

A piece is a step, or the time before one. `workbench.analysis.explain` asks records, reasons and costs about it. The
rest is arithmetic, in which nothing is counted twice and nothing is left over.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from workbench.analysis.causes import Cause, Part, Span, before

LONG_GAP = 2.0
"""A gap between two tokens is long if it is this many times the median gap of its request."""

MAX_GAPS = 5
"""Maximum number of long gaps that an explanation lists."""


class Share(NamedTuple):
    """The share of a cause in a piece of time, and the weight of each request behind it."""

    cause: Cause
    share: float
    who: Mapping[str, float]


class Piece(NamedTuple):
    """A piece of a request's time, with its causes; their shares are over 0."""

    begin: float
    end: float
    step: int
    shares: Sequence[Share]


@dataclass(frozen=True, eq=False)
class Course:
    """The time of one request, piece by piece, in the unit of its explanation.

    Attributes:
        request_id: The request.
        arrival: When it arrived.
        end: When it ended, or the last that is known of it.
        tokens: The times of its tokens.
        num_before: Number of tokens that it got before the trace begins.
        token_before: The time of the last of them; None if there is none, or it is not known.
        has_ttft: Whether the first of them is the first that it got.
        waits: Whether it got no token, before the trace begins neither.
        pieces: That time.
        first_step: The first step of the trace.
    """

    request_id: str
    arrival: float
    end: float
    tokens: Sequence[float]
    num_before: int
    token_before: float | None
    has_ttft: bool
    waits: bool
    pieces: Sequence[Piece]
    first_step: int

    def ttft(self) -> Span | None:
        """The time to first token; None if the trace does not have it."""
        if not (self.has_ttft and self.tokens):
            return None
        first = self.tokens[0]
        return Span("time to first token", first - self.arrival, self.parts(self.arrival, first))

    def waiting(self) -> Span | None:
        """The time without a token; None if it got one."""
        if not self.waits:
            return None
        return Span("time to first token", self.end - self.arrival, self.parts(self.arrival, self.end), is_open=True)

    def long_gaps(self) -> tuple[Span, ...]:
        """The gaps between tokens that are long for this request, the longest first."""
        tokens, number = self.tokens, self.num_before + 1  # of the first one
        if tokens and self.token_before is not None:
            tokens, number = (self.token_before, *tokens), self.num_before
        gaps = [(after - before, place) for place, (before, after) in enumerate(pairwise(tokens), start=1)]
        if not gaps:
            return ()
        usual = sorted(length for length, _ in gaps)[len(gaps) // 2]
        long = sorted((gap for gap in gaps if gap[0] >= LONG_GAP * usual and gap[0] > 0), reverse=True)[:MAX_GAPS]
        return tuple(
            Span(
                f"gap before token {number + place}",
                length,
                self.parts(tokens[place - 1], tokens[place]),
            )
            for length, place in long
            if length > usual
        )

    def parts(self, begin: float, end: float) -> tuple[Part, ...]:
        """The parts of a stretch of time; their amounts add up to its length."""
        amounts: dict[Cause, float] = defaultdict(float)
        lengths: dict[Cause, float] = defaultdict(float)
        culprits: dict[Cause, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        steps: dict[Cause, list[int]] = defaultdict(list)
        tokens: dict[str, int] = defaultdict(int)
        for index in range(bisect_right(self.pieces, begin, key=attrgetter("end")), len(self.pieces)):
            piece = self.pieces[index]
            if piece.begin >= end:
                break
            length = min(end, piece.end) - max(begin, piece.begin)
            for cause, share, who in piece.shares:
                amounts[cause] += share * length
                lengths[cause] += length
                if not steps[cause] or steps[cause][-1] != piece.step:
                    steps[cause].append(piece.step)
                whole = sum(who.values()) or 1.0
                for request_id, weight in who.items():
                    culprits[cause][request_id] += share * length * weight / whole
                    if cause.kind == "token_budget":
                        tokens[request_id] += round(weight)
        early = min(end, self.pieces[0].begin) - begin if self.pieces else 0.0
        if early > 1e-9:
            amounts[before(self.first_step)] += early
            steps[before(self.first_step)].append(self.first_step)
        outside = (end - begin) - math.fsum(amounts.values())
        if amounts and abs(outside) > 0:  # after the last step of the trace, and rounding
            cause = Cause("between") if abs(outside) > 1e-9 else max(amounts, key=lambda name: amounts[name])
            amounts[cause] += outside
            steps[cause] = steps[cause] or [self.first_step]
        parts = []
        for cause, amount in sorted(amounts.items(), key=lambda item: -item[1]):
            weights = tokens if cause.kind == "token_budget" else culprits[cause]
            named = tuple(sorted(weights, key=lambda request_id: -weights[request_id]))
            slower = lengths[cause] / max(lengths[cause] - amount, 1e-9) if cause.kind == "slow" else 1.0
            counts = tuple(tokens[request_id] for request_id in named) if weights is tokens else ()
            parts.append(Part.of(cause, amount, named, tuple(steps[cause]), slower, counts))
        return tuple(parts)
