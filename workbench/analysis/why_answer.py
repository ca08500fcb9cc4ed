"""The answer to "nothing runs, why?": facts, and the sentences that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from workbench.analysis.flags import VLLM, Server
from workbench.analysis.run_on import Outcome
from workbench.base.text import counted, printable
from workbench.trace.readings.metrics import amount
from workbench.trace.reasons import Reason

Verdict = Literal["idle", "runs", "early", "outside", "never", "differs", "silent", "ended"]
"""The fate of the requests.

``idle``: there is none. ``runs``: all of them can end. ``early``: all end only if some of them end before their
``max_tokens``. ``outside``: they wait for something that no scheduler decides, such as a transfer or a grammar.
``never``: a state repeats. ``silent``: by the rules they are served, and nothing has been written for much longer than
a step takes: a step hangs, or the server died. ``ended``: the recording of a server ended before they did.
``differs``: the recorded engine stands still, and by vLLM 0.33.0's rules it would not.
"""


class Waiter(NamedTuple):
    """A request that is not served.

    Attributes:
        request_id: The request.
        status: "waiting", or "running" if it runs and gets no token.
        reason: The reason, None for a running one.
        recorded: Whether the record says so; otherwise vLLM 0.33.0's rules do, applied to the recorded state.
    """

    request_id: str
    status: Literal["waiting", "running"]
    reason: Reason | None
    recorded: bool = False


class Change(NamedTuple):
    """A changed setting that frees the requests.

    Attributes:
        field: Its field of EngineConfig.
        before: The value in force.
        after: The value nearest to it that frees them.
    """

    field: str
    before: Any
    after: Any


class Holder(NamedTuple):
    """A request that holds a seat for which others wait.

    Attributes:
        request_id: The request.
        tokens_left: Output tokens up to its max_tokens.
        seconds: The time that they take at its pace; None without a clock, or before its second token.
    """

    request_id: str
    tokens_left: int
    seconds: float | None


@dataclass(frozen=True, eq=False)
class Why:
    """The answer of ``trace.why()``.

    Attributes:
        verdict: See `Verdict`.
        num_running: Number of running requests.
        waiters: The requests that are not served, in queue order, those that run and get nothing first.
        left: Those of them that are never served.
        outcome: The end of the scheduler that ran on.
        changes: Each of them frees all requests, the smallest first; empty if none was found, or none is needed.
        drops: Requests that free all others when they are rejected.
        free_blocks: Number of free KV blocks.
        num_blocks: Number of usable KV blocks.
        num_lost_blocks: Blocks that no request is recorded to hold, and that are not free.
        num_still_steps: Number of last steps that schedule nothing.
        circling: Requests that lose their progress again and again, while no request gets a token.
        at: End of the last step in seconds since the first arrival, or since `first_step` if the trace lacks the steps
            before it; None without a clock.
        source: The recorded engine.
        missing: Facts that the record lacks and the answer would need.
        holders: If the first waiting request waits for a seat, those that hold the seats, the one that leaves first at
            the front.
        next_seat: The change that lets it in at once; None if none does, or it does not wait for a seat.
        seat_obstacle: Why one seat more does not let it in; None if it does, or it does not wait for a seat.
        silent: Seconds since the recording was last written; None if it has ended, or is not read from a file.
        usual: Usual duration of a step in seconds; None without a clock.
        clock: The time of day of the last step; "" if the trace does not say it.
        server: The server whose flags are named.
        first_step: The first step of a trace that lacks earlier ones and does not know the first arrival, else 0.
    """

    verdict: Verdict
    num_running: int
    waiters: tuple[Waiter, ...]
    left: tuple[str, ...]
    outcome: Outcome
    changes: tuple[Change, ...]
    drops: tuple[str, ...]
    free_blocks: int
    num_blocks: int
    num_lost_blocks: int
    num_still_steps: int
    circling: tuple[str, ...]
    at: float | None
    source: str
    missing: tuple[str, ...]
    holders: tuple[Holder, ...] = ()
    next_seat: Change | None = None
    seat_obstacle: Reason | None = None
    silent: float | None = None
    usual: float | None = None
    clock: str = ""
    server: Server = VLLM
    first_step: int = 0

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait that nothing serves: what a probe asks."""
        if self.verdict == "outside":
            return self.num_running == 0 or self.num_still_steps > 0
        return self.verdict in ("never", "differs", "silent", "ended")

    def __repr__(self) -> str:
        return "\n".join(map(printable, _lines(self)))  # names come from a file


def _lines(answer: Why) -> Iterator[str]:
    zero = f"step {answer.first_step} began" if answer.first_step else "the first arrival"
    when = f", {answer.at:.3f} s after {zero}" if answer.at is not None else ""
    when += f" ({answer.clock})" if answer.clock else ""
    waiting = sum(waiter.status == "waiting" for waiter in answer.waiters)
    yield (
        f"{answer.source}{when}: {answer.num_running} running, {waiting} waiting, "
        f"{answer.free_blocks} of {answer.num_blocks} KV blocks free"
    )
    if answer.verdict == "idle":
        yield "no request is unfinished"
        return
    if answer.num_still_steps:
        yield f"the last {counted(answer.num_still_steps, 'step')} scheduled nothing"
    if answer.circling:
        yield f"begin again and again, and no request gets a token: {_names(answer.circling)}"
    yield from _waiter_lines(answer.waiters)
    yield from _holder_lines(answer)
    yield _verdict_line(answer)
    for index, change in enumerate(answer.changes):
        flag = answer.server.flags({change.field: change.after})
        more = f" ({change.after - change.before:+d})" if type(change.after) is type(change.before) is int else ""
        start = "smallest change that frees them" if not index else "or"
        yield f"{start}: {change.field} {change.before} -> {change.after}{more}" + (f"  {flag}" if flag else "")
    if answer.drops:
        yield f"or reject {_names(answer.drops)}: all others are served then"
    if not (answer.changes or answer.drops) and answer.verdict in ("never", "early"):
        yield "no setting of the scheduler frees them: abort them, or restart the server"
    for sentence in answer.missing:
        yield f"not known: {sentence}"


def _holder_lines(answer: Why) -> Iterator[str]:
    """The seats that others wait for: until when the first of them is held, and the flag for one more if it helps."""
    if not answer.holders:
        return
    first = answer.holders[0]
    left = f"at most {counted(first.tokens_left, 'token')} left"
    if first.seconds is not None:
        left += f", {amount(first.seconds, 's')} at its pace"
    others = len(answer.holders) - 1
    more = f"; {others} more {'holds' if others == 1 else 'hold'} a seat" if others else ""
    yield f"  next seat: that of {first.request_id}, {left}{more}"
    if (change := answer.next_seat) is not None:
        flag = answer.server.flags({change.field: change.after})
        yield f"  one seat more lets the next one in: {change.field} {change.before} -> {change.after}  {flag}".rstrip()
    elif answer.seat_obstacle is not None:
        yield f"  one seat more does not let the next one in: {answer.seat_obstacle}"


def _waiter_lines(waiters: Sequence[Waiter]) -> Iterator[str]:
    """The requests with equal reasons in one line."""
    groups: dict[str, list[Waiter]] = {}
    for waiter in waiters:
        sentence = "runs, and gets no token" if waiter.reason is None else str(waiter.reason)
        groups.setdefault(sentence, []).append(waiter)
    for sentence, same in groups.items():
        said = ", by the record" if same[0].recorded else ""
        yield f"  {_names([waiter.request_id for waiter in same])}: {sentence}{said}"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _verdict_line(answer: Why) -> str:
    outcome = answer.outcome
    match answer.verdict:
        case "runs":
            return "this clears: every request can end"
        case "silent":
            return (
                f"nothing was written for {amount(answer.silent, 's')}, with requests to serve and steps of "
                f"{amount(answer.usual, 's')}: a step hangs, the server died, or its disk is full"
            )
        case "ended":
            unfinished = counted(answer.num_running + len(answer.left), "unfinished request")
            return f"the recording ended with {unfinished}: the server was stopped or died, and nothing serves them"
        case "early":
            return (
                f"this clears only if requests end before their max_tokens; if none does, {_names(answer.left)} "
                f"{'wait' if len(answer.left) > 1 else 'waits'} forever"
            )
        case "differs":
            return (
                "by the rules of vLLM 0.33.0 the next step would serve them, and the recorded engine does not: the "
                "cause is not in the record"
            )
        case "outside":
            held = f", and {answer.num_lost_blocks} blocks that no request holds" if answer.num_lost_blocks else ""
            return f"this clears when something outside the scheduler happens: {_names(answer.left)}{held}"
    if outcome.kind == "dies":
        return f"vLLM's engine dies in {counted(outcome.num_steps + 1, 'step')}: {outcome.error}"
    others = f", after {_names(outcome.ended)} ended" if outcome.ended else ""
    return (
        f"this never clears: with every request ending that can end, the same state comes back after "
        f"{counted(outcome.period, 'step')}{others}; {_names(answer.left)} "
        f"{'are' if len(answer.left) > 1 else 'is'} never served"
    )
