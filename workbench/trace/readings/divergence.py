"""Find the first difference between two runs of the same requests: in their schedules, and in their tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import TYPE_CHECKING

from workbench.trace.readings.narrate import shown
from workbench.trace.reasons import UNKNOWN

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

Scheduled = tuple[int, int, int]
"""Step, start and number of tokens of a chunk."""


@dataclass(frozen=True)
class Divergence:
    """The first step in which two runs treated a request differently.

    Attributes:
        step: The step.
        request_id: The request.
        what: The difference as text.
    """

    step: int
    request_id: str
    what: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.request_id}: {self.what}"


@dataclass(frozen=True)
class TokenDifference:
    """The first output token that differs.

    Attributes:
        request_id: The request.
        index: Index of the token in the output.
        a: Token id in the first trace; None if its output ended earlier.
        b: Token id in the second trace.
    """

    request_id: str
    index: int
    a: int | None
    b: int | None


def output_token_ids(trace: Trace) -> defaultdict[str, list[int]]:
    """The output tokens of each request that the trace holds."""
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    for record in trace:
        for chunk in record.chunks:
            if chunk.accepted:
                tokens[chunk.request_id] += chunk.accepted
    return tokens


def common_steps(a: Trace, b: Trace) -> float:
    """The step up to which both traces are complete: infinite if both runs ended."""
    whole = ("done", "stuck")
    return min((trace[-1].step + 1 if len(trace) else 0 for trace in (a, b) if trace.end not in whole), default=inf)


def chunks_by_request(trace: Trace, before: float) -> defaultdict[str, list[Scheduled]]:
    """The chunks of each request in the steps before ``before``."""
    chunks: defaultdict[str, list[Scheduled]] = defaultdict(list)
    for record in trace:
        if record.step < before:
            for chunk in record.chunks:
                chunks[chunk.request_id].append((record.step, chunk.start, chunk.num_tokens))
    return chunks


def divergence(
    request_id: str,
    a: Trace,
    b: Trace,
    in_a: list[Scheduled],
    in_b: list[Scheduled],
    id_in_b: str | None = None,
) -> Divergence | None:
    """The first step that schedules a request differently, described from the records of both traces.

    Args:
        request_id: The request.
        a: The first trace.
        b: The second trace.
        in_a: The request's chunks in the first trace.
        in_b: Its chunks in the second.
        id_in_b: Its id in the second trace; None for the same.
    """
    if in_a == in_b:
        return None
    for of_a, of_b in zip_longest(in_a, in_b):
        if of_a == of_b:
            continue
        step = min(scheduled[0] for scheduled in (of_a, of_b) if scheduled is not None)
        what = f"A {_describe(a, request_id, step, of_a)}, B {_describe(b, id_in_b or request_id, step, of_b)}"
        return Divergence(step, request_id, what)
    raise AssertionError("lists that are not equal have an entry that differs")


def _describe(trace: Trace, request_id: str, step: int, scheduled: Scheduled | None) -> str:
    """Describe how a trace treated a request in a step."""
    if scheduled is not None and scheduled[0] == step:
        return f"computes tokens [{scheduled[1]}, {scheduled[1] + scheduled[2]})"
    position = step - trace[0].step if len(trace) else 0
    if position < 0:
        return f"begins with step {trace[0].step}"
    if position >= len(trace):
        return "has ended"
    record = trace[position]
    if request_id in record.preempted:
        reason = record.preempt_reasons.get(request_id)
        return f"preempts it ({shown(reason) if reason else 'no reason recorded'})"
    if (reason := record.not_scheduled.get(request_id)) is not None:
        return f"lets it wait ({shown(reason)})" if reason != UNKNOWN else "lets it wait"
    return "does not schedule it" if scheduled is not None or request_id in record.running else "has finished it"


def token_difference(
    request_id: str, a: list[int], b: list[int], ended: bool, before: tuple[int, int] = (0, 0)
) -> TokenDifference | None:
    """The first token in which two outputs differ, of those that both traces have.

    Args:
        request_id: The request.
        a: Its output tokens in the first trace.
        b: Its output tokens in the second.
        ended: Both outputs are complete, so a difference in length counts.
        before: Number of tokens before those of the first trace, and of the second.
    """
    start = max(before)
    a, b = (tokens[start - number :] for tokens, number in zip((a, b), before))
    for index, (of_a, of_b) in enumerate(zip(a, b), start):
        if of_a != of_b:
            return TokenDifference(request_id, index, of_a, of_b)
    if ended and len(a) != len(b):
        index = min(len(a), len(b))
        ends = (tokens[index] if index < len(tokens) else None for tokens in (a, b))
        return TokenDifference(request_id, start + index, *ends)
    return None
