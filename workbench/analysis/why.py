"""Nothing runs, why? Who waits for which limit, whether that can ever clear, and the smallest change that frees it.

The scheduler is put into the last recorded state and runs on with everything ending that can end. If it comes to a
state twice, no request that is left will ever be served. A changed flag is tried in the same state.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from workbench.analysis.flags import vllm_flags
from workbench.analysis.run_on import LastState, Outcome, run_on
from workbench.config import EngineConfig
from workbench.ground.field_checks import counted, printable
from workbench.scheduler.admission import most_blocks
from workbench.trace import Trace, TraceError
from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.reasons import Reason

Verdict = Literal["idle", "runs", "early", "outside", "never", "differs"]
"""What becomes of the requests.

``idle``: there is none. ``runs``: all of them can end. ``early``: all end only if some of them end before their
``max_tokens``. ``outside``: they wait for something that no scheduler decides, such as a transfer or a grammar.
``never``: a state repeats. ``differs``: the recorded engine stands still, and by vLLM 0.33.0's rules it would not.
"""

OUTSIDE = ("grammar", "adapter", "transfer", "encoder")
"""Kinds of reasons that end with an event outside the scheduler."""

STILL = 3
"""An engine stands still if its last steps, this many or more, schedule nothing."""

SECONDS = 4.0
"""Time for all simulations of one answer."""


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


@dataclass(frozen=True, eq=False)
class Why:
    """The answer of ``trace.why()``.

    Attributes:
        verdict: See `Verdict`.
        num_running: Number of running requests.
        waiters: The requests that are not served, in queue order, those that run and get nothing first.
        left: Those of them that are never served.
        outcome: What became of the scheduler that ran on.
        changes: Each of them frees all requests, the smallest first; empty if none was found, or none is needed.
        drops: Requests that free all others when they are rejected.
        free_blocks: Number of free KV blocks.
        num_blocks: Number of usable KV blocks.
        num_lost_blocks: Blocks that no request is recorded to hold, and that are not free.
        num_still_steps: Number of last steps that schedule nothing.
        circling: Requests that lose their progress again and again, while no request gets a token.
        at: Time of the last step in seconds since the start of the trace; None without a clock.
        source: The recorded engine.
        missing: Facts that the record lacks and the answer would need.
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

    def __repr__(self) -> str:
        return "\n".join(map(printable, _lines(self)))  # names come from a file


def why(trace: Trace) -> Why:
    """Say why requests are not served, whether they ever can be, and the smallest change of a setting that frees them.

    Args:
        trace: A trace, growing or not; the answer is about its last step.

    Raises:
        TraceError: The state of its scheduler cannot be rebuilt; the message names what is missing.

    Example:
        >>> from workbench import simulate
        >>> config = {"block_size": 4, "num_blocks": 6, "max_num_batched_tokens": 64}
        >>> requests = [{"id": "big", "prompt": {"len": 40}}, {"id": "small", "prompt": {"len": 4}}]
        >>> stuck = simulate({"config": config, "requests": requests}, as_vllm=True)
        >>> answer = stuck.why()
        >>> answer.verdict, answer.left, answer.changes[0]
        ('never', ('big', 'small'), Change(field='num_blocks', before=6, after=11))
    """
    try:
        state = LastState(trace)
    except ValueError as problem:
        raise TraceError(f"why() needs the scheduler's state: {problem}") from None
    return _Asker(trace, state).answer()


class _Asker:
    def __init__(self, trace: Trace, state: LastState) -> None:
        self.trace = trace
        self.state = state
        self.deadline = time.perf_counter() + SECONDS
        self.as_vllm = not trace.meta.source.startswith("engine")
        self.recorded = trace[-1].not_scheduled if len(trace) else {}
        self.parked = [
            request_id
            for request_id in state.waiting
            if (reason := self.recorded.get(request_id)) is not None and reason.kind in OUTSIDE
        ]

    def answer(self) -> Why:
        trace, state = self.trace, self.state
        still, circling = _still_steps(trace), _circling(trace)
        closed = self.run(state.config)
        verdict, left, changes, drops = self.judge(closed, still, circling)
        last = trace[-1] if len(trace) else None
        return Why(
            verdict=verdict,
            num_running=len(state.running),
            waiters=tuple(self.waiters(closed, still)),
            left=left,
            outcome=closed,
            changes=changes,
            drops=drops,
            free_blocks=last.free_blocks_end if last is not None else state.config.num_usable_blocks,
            num_blocks=state.config.num_usable_blocks,
            num_lost_blocks=state.num_lost_blocks,
            num_still_steps=still,
            circling=circling,
            at=last.end if last is not None and last.end else None,
            source=trace.meta.source,
            missing=tuple(self.missing(verdict)),
        )

    def run(self, config: EngineConfig, *, released: bool = False, ends_early: bool = True, **options: Any) -> Outcome:
        """Run on from the last state; ``released`` with all that is held outside of the scheduler given back."""
        without = (*(() if released else self.parked), *options.pop("without", ()))
        scheduler = self.state.scheduler(config, without=without, frees_lost=released, as_vllm=self.as_vllm, **options)
        if not released and self.seats_are_taken:
            scheduler.max_running = max(0, scheduler.max_running - len(self.parked))
        seconds = max(0.0, self.deadline - time.perf_counter())
        return run_on(scheduler, ends_early=ends_early, seconds=seconds if ends_early else seconds / 3)

    @property
    def seats_are_taken(self) -> bool:
        """Whether requests that wait for something outside count as running ones, by the record's own reasons."""
        num_running = len(self.state.running)
        return any(
            reason.root == "seats" and isinstance(reason.value, int) and num_running < reason.value
            for reason in self.recorded.values()
        )

    def judge(
        self, closed: Outcome, still: int, circling: tuple[str, ...]
    ) -> tuple[Verdict, tuple[str, ...], tuple[Change, ...], tuple[str, ...]]:
        """The verdict, the requests that are left, and what frees them."""
        state = self.state
        everyone = (*state.running, *state.waiting)
        if not everyone:
            return "idle", (), (), ()
        outside = bool(self.parked or state.num_lost_blocks)
        if closed.kind in ("repeats", "dies"):
            left = (*closed.running, *(closed.reasons or {}))
            changes = tuple(self.changes(lambda config: self.run(config).kind == "ends"))
            drops = self.drops(left)
            if outside and self.run(state.config, released=True).kind == "ends":
                return "outside", (*self.parked, *left), changes, drops
            return "never", left, changes, drops
        stands_still = still >= STILL or self.trace.end == "stuck"
        if self.parked and (stands_still or not state.running):
            changes = tuple(self.stated_changes())
            return "outside", tuple(self.parked) if not stands_still else everyone, changes, ()
        if stands_still or circling:
            return "differs", everyone, tuple(self.whole_sequences()), ()
        late = self.run(state.config, ends_early=False)
        if late.kind in ("repeats", "dies"):
            changes = tuple(self.changes(lambda config: self.run(config, ends_early=False).kind == "ends"))
            return "early", (*late.running, *(late.reasons or {})), changes, ()
        return "runs", (), (), ()

    def waiters(self, closed: Outcome, still: int) -> Iterator[Waiter]:
        """The requests that are not served now, with the reasons that are known best."""
        first = self.state.scheduler(without=self.parked, as_vllm=self.as_vllm)
        if self.seats_are_taken:
            first.max_running = max(0, first.max_running - len(self.parked))
        scheduled, ruled = set(), dict(closed.reasons or {})
        try:
            batch = first.schedule()
            scheduled = {chunk.request_id for chunk in batch.chunks}
            ruled |= batch.to_record().not_scheduled
        except RuntimeError:
            pass
        last = {chunk.request_id for chunk in self.trace[-1].chunks} if len(self.trace) else set()
        for request_id in self.state.running:
            if (still >= STILL and request_id not in last) or request_id not in scheduled | last:
                yield Waiter(request_id, "running", None)
        for request_id in self.state.waiting:
            recorded, rule = self.recorded.get(request_id), ruled.get(request_id)
            if rule is None or (recorded is not None and recorded.root in (*OUTSIDE, "seats")):
                yield Waiter(request_id, "waiting", recorded or Reason(), recorded=True)
            else:
                yield Waiter(request_id, "waiting", rule)

    # -- what frees them -------------------------------------------------------------------------------------------

    def changes(self, frees: Callable[[EngineConfig], bool]) -> Iterator[Change]:
        """The smallest change of each setting after which all requests end."""
        config, found = self.state.config, []
        for field, values in _candidates(config, self.state):

            def is_enough(value: Any, field: str = field) -> bool:
                try:
                    return frees(config.replace(**{field: value}))
                except ValueError:  # contradicts another field
                    return False

            place = bisect_left(values, True, key=is_enough)
            if place < len(values):
                found.append(Change(field, getattr(config, field), values[place]))
        yield from sorted(found, key=_size)

    def drops(self, left: Sequence[str]) -> tuple[str, ...]:
        """The first request whose rejection frees all others; empty if there is none."""
        for request_id in [name for name in left if name in self.state.waiting][:1]:
            if len(left) > 1 and self.run(self.state.config, without=(request_id,)).kind == "ends":
                return (request_id,)
        return ()

    def stated_changes(self) -> Iterator[Change]:
        """Changes that follow from the numbers of recorded reasons, of limits that EngineConfig does not have."""
        seen = set()
        for reason in self.recorded.values():
            if reason.limit and isinstance(reason.value, int) and reason.needed is not None:
                if reason.limit not in seen and reason.needed > (reason.available or 0):
                    seen.add(reason.limit)
                    yield Change(reason.limit, reason.value, reason.value + reason.needed - (reason.available or 0))

    def whole_sequences(self) -> Iterator[Change]:
        """A pool for an engine that counts every token in every group, though windows recycle their blocks."""
        config, state = self.state.config, self.state
        if all(group.kind == "full_attention" for group in config.cache_groups):
            return
        lengths = [self.trace.requests[request_id].num_prompt_tokens for request_id in state.waiting[:1] or state.running[:1]]
        needed = max((_blocks_of_whole(config.cache_groups, length) for length in lengths), default=0)
        if needed > config.num_usable_blocks:
            yield Change("num_blocks", config.num_pool_blocks, needed + 1)

    def missing(self, verdict: Verdict) -> Iterator[str]:
        """Sentences about facts that the record lacks."""
        trace = self.trace
        if "scheduling_policy" in trace.config:
            yield "the scheduling policy is Python code: vLLM's rules are applied in its place"
        waiting = [trace.requests[request_id] for request_id in self.state.waiting]
        if self.state.config.enable_prefix_caching and any(not info.prompt_token_ids for info in waiting):
            yield "token ids: a waiting request is taken to find no prefix of another one in the cache"
        if verdict == "differs":
            yield (
                "grammars that are compiled, transfers of KV, slots of adapters and the encoder's budget: one of them "
                "may hold the requests, or a rule of another version"
            )


def _size(change: Change) -> tuple[int, float]:
    if isinstance(change.before, bool) or not isinstance(change.before, (int, float)) or not change.before:
        return 1, 0.0
    return 0, abs(change.after - change.before) / change.before


def _candidates(config: EngineConfig, state: LastState) -> Iterator[tuple[str, Sequence[Any]]]:
    """Fields with values ever further from the one in force; each frees at least what the one before it frees."""
    requests = [state.trace.requests[request_id] for request_id in (*state.running, *state.waiting)]
    lengths = [info.num_prompt_tokens + info.max_tokens for info in requests]
    drafts = config.num_speculative_tokens
    most = max(lengths, default=1) + drafts + config.block_size
    blocks = sum(_blocks_of_whole(config.cache_groups, length + drafts) + 2 * (1 + drafts) for length in lengths)
    yield "num_blocks", range(config.num_pool_blocks + 1, config.num_pool_blocks + blocks + 2)
    slots = config.speculation.num_draft_slots * (len(requests) + 1)
    for field in ("max_num_scheduled_tokens", "max_num_batched_tokens"):
        if (budget := getattr(config, field)) is not None:
            yield field, range(budget + 1, budget + most + slots + 2)
    seats = "max_num_active_seqs" if config.max_num_active_seqs else "max_num_seqs"
    yield seats, range(getattr(config, seats) + 1, getattr(config, seats) + len(requests) + 1)
    yield "num_speculative_tokens", range(drafts - 1, -1, -1)
    for field, value in (
        ("watermark", 0.0),
        ("scheduler_reserve_full_isl", True),
        ("scheduler_reserve_full_isl", False),
        ("long_prefill_token_threshold", 0),
        ("enable_chunked_prefill", True),
    ):
        if getattr(config, field) != value:
            yield field, (value,)


def _blocks_of_whole(groups: Sequence[KVCacheGroup], num_tokens: int) -> int:
    """Blocks of a sequence if no group gives any back."""
    return sum(-(-num_tokens // group.block_size) for group in groups if group.is_attention) or most_blocks(
        groups, num_tokens
    )


def _still_steps(trace: Trace) -> int:
    """Number of last steps that schedule nothing."""
    count = 0
    for record in reversed(trace.steps):
        if record.chunks:
            break
        count += 1
    return count


def _circling(trace: Trace) -> tuple[str, ...]:
    """Requests that begin again and again at the end of a trace, while no request gets a token or ends."""
    starts: dict[str, int] = {}
    before: dict[str, int] = {}
    for record in reversed(trace.steps):
        if record.finished or any(chunk.sampled is not None for chunk in record.chunks):
            break
        for chunk in record.chunks:  # in reverse: a start beyond a later one
            if before.get(chunk.request_id, chunk.start) < chunk.start:
                starts[chunk.request_id] = starts.get(chunk.request_id, 0) + 1
            before[chunk.request_id] = chunk.start
    return tuple([request_id for request_id, count in starts.items() if count >= 2])


# -- sentences ---------------------------------------------------------------------------------------------------------


def _lines(answer: Why) -> Iterator[str]:
    when = f", {answer.at:.3f} s after the start" if answer.at is not None else ""
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
    yield _verdict_line(answer)
    for index, change in enumerate(answer.changes):
        flag = vllm_flags({change.field: change.after})
        more = f" ({change.after - change.before:+d})" if type(change.after) is type(change.before) is int else ""
        start = "smallest change that frees them" if not index else "or"
        yield f"{start}: {change.field} {change.before} -> {change.after}{more}" + (f"  {flag}" if flag else "")
    if answer.drops:
        yield f"or reject {_names(answer.drops)}: all others are served then"
    if not (answer.changes or answer.drops) and answer.verdict in ("never", "early"):
        yield "no setting of the scheduler frees them: abort them, or restart the server"
    for sentence in answer.missing:
        yield f"not in the record: {sentence}"


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
        case "early":
            return (
                f"this clears only if requests end before their max_tokens; if none does, {_names(answer.left)} "
                f"{'wait' if len(answer.left) > 1 else 'waits'} for ever"
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
