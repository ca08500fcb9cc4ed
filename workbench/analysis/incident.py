"""A recorded run as an incident: the slow requests with their biggest cause, what they share, and the stalls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from workbench.analysis.apart import Difference, apart
from workbench.analysis.explain import Explainer, explainer_of
from workbench.base.text import printable
from workbench.simulation.costs.stalls import Stall, stalls
from workbench.trace import Trace

MAX_SLOW = 1000
"""Maximum number of requests whose cause is named, the slowest."""


MAX_SHOWN = 5
"""Maximum number of lines of each kind in the text of an incident."""


class Slow(NamedTuple):
    """A request, and the biggest part of its time to first token.

    Attributes:
        request_id: The request.
        ttft: Its time to first token as it is shown, "at least" the time so far if it has none.
        cause: The biggest part, its own computation and the time between steps included; "" for none.
        share: The share of that part, in [0, 1].
        culprits: Up to three requests behind it.
    """

    request_id: str
    ttft: str
    cause: str
    share: float
    culprits: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Incident:
    """The answer of ``trace.incident``.

    Attributes:
        slow: Requests, the slowest to a first token first.
        apart: Properties that set the slowest 1% apart, the most telling first.
        never_served: Requests that nothing will serve, as the engine stands still.
        stalls: Steps that took many times what their contents explain.
    """

    slow: tuple[Slow, ...]
    apart: tuple[Difference, ...]
    stalls: tuple[Stall, ...]
    never_served: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = ["time to first token, the slowest first" if self.slow else "no request waited for a first token"]
        never = set(self.never_served)
        lines += _few(
            [f"  {_line(one)}{'; never served' if one.request_id in never else ''}" for one in self.slow], "request"
        )
        lines += _few([f"{difference}" for difference in self.apart], "property", "properties")
        lines += _few([f"{stall}" for stall in self.stalls], "stall")
        return "\n".join(map(printable, lines))  # names come from a file


def _line(slow: Slow) -> str:
    if not slow.cause:
        return f"{slow.request_id}: {slow.ttft}"
    behind = f": {', '.join(slow.culprits)}" if slow.culprits else ""
    return f"{slow.request_id}: {slow.ttft}, {slow.share:.0%} of it {slow.cause}{behind}"


def _few(lines: list[str], noun: str, plural: str | None = None) -> list[str]:
    """The first of some lines, and the number of the others."""
    hidden = len(lines) - MAX_SHOWN
    others = noun if hidden == 1 else plural or f"{noun}s"
    return [*lines[:MAX_SHOWN], *([f"  ... and {hidden:,} more {others}"] if hidden > 0 else [])]


def incident(trace: Trace) -> Incident:
    """Find the causes of slow requests, the properties that they share, and the stalls.

    Args:
        trace: A trace, finished or growing.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": "long", "prompt": {"len": 900}}, {"id": "short", "prompt": {"len": 9}, "max_tokens": 1}]
        >>> trace = simulate({"config": {"max_num_batched_tokens": 100}, "requests": requests})
        >>> trace.incident().slow[0].cause
        'waiting for the token budget'
    """
    explainer = explainer_of(trace)
    found = tuple(stalls(trace) if explainer.unit == "s" else ())
    return Incident(tuple(_slow(explainer)), apart(trace), found, explainer.never_served)


def _slow(explainer: Explainer) -> Iterator[Slow]:
    for request_id in explainer.slowest()[:MAX_SLOW]:
        if (span := explainer.first_token(request_id)) is None:
            continue
        part, ttft = span.biggest, span.amount(explainer.unit)
        if part is None:
            yield Slow(request_id, ttft, "", 0.0, ())
        else:
            yield Slow(request_id, ttft, part.words, part.amount / (span.total or 1.0), part.culprits[:3])
