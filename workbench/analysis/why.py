"""Nothing runs, why? The limit that each request waits for, whether that can ever clear, and the change that frees it.

The scheduler is put into the last recorded state and runs on with everything ending that can end. If it comes to a
state twice, no request that is left will ever be served. A changed flag is tried in the same state.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from workbench.analysis.flags import BY_VLLM_RULES, Server
from workbench.analysis.run_on import LastState, Outcome, run_on
from workbench.analysis.why_answer import Change, Holder, Verdict, Waiter, Why
from workbench.analysis.why_signs import circling_requests, still_steps, usual_step
from workbench.config import EngineConfig
from workbench.scheduler.admission import most_blocks
from workbench.scheduler.scheduler import Scheduler
from workbench.trace import Trace, TraceError
from workbench.trace.clock import time_of_day
from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.reasons import Reason
from workbench.trace.run_zero import kept_zero, run_zero

OUTSIDE = ("grammar", "adapter", "transfer", "encoder")
"""Kinds of reasons that end with an event outside the scheduler; ``max_loras`` is a limit of the scheduler itself."""

STILL = 3
"""An engine stands still if its last steps, this many or more, schedule nothing. The recorder for vLLM leaves out all
but the first of them."""

SECONDS = 2.5
"""Time for all simulations of one answer."""


SILENT = 5.0
"""Seconds without a line after which a recording of short steps is silent; a recorder writes every second or so."""

PACE_TOKENS = 20
"""Latest tokens of a request that give its pace."""

MAX_TRIED = 32
"""A change is tried on this many requests at the head of the queue, and on as many of the largest behind them."""


def why(trace: Trace, silent: float | None = None) -> Why:
    """Say why requests are not served, whether they ever can be, and the smallest change of a setting that frees them.

    Args:
        trace: A trace, growing or not; the answer is about its last step.
        silent: Seconds since its file was last written; None if it is not a file that is written now.

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
    return _Asker(trace, state, silent).answer()


class _Asker:
    def __init__(self, trace: Trace, state: LastState, silent: float | None) -> None:
        self.trace = trace
        self.silent = silent
        self.usual, self.longest = usual_step(trace)
        self.state = state
        self.deadline = time.thread_time() + SECONDS
        self.is_complete = True
        self.as_vllm = not trace.meta.source.startswith("engine")
        self.recorded = trace[-1].not_scheduled if len(trace) else {}
        self.parked = [
            request_id
            for request_id in state.waiting
            if (reason := self.recorded.get(request_id)) is not None
            and reason.kind in OUTSIDE
            and reason.limit != "max_loras"
        ]

    def answer(self) -> Why:
        trace, state = self.trace, self.state
        still, circling = still_steps(trace), circling_requests(trace)
        self.stands_still = trace.end == "stuck" or still >= (1 if trace.meta.is_of_server else STILL)
        closed = self.run(state.config)
        verdict, left, changes, drops = self.judge(closed, circling)
        waiters = tuple(self.waiters(closed))
        if verdict in ("runs", "early") and (gone := self.gone()):
            verdict, left, changes, drops = gone, tuple(state.waiting), (), ()
        is_served = verdict in ("runs", "early", "silent")
        holders, next_seat, seat_obstacle = self.seats(waiters) if is_served else ((), None, None)
        last = trace[-1] if len(trace) else None
        return Why(
            verdict=verdict,
            num_running=len(state.running),
            waiters=waiters,
            left=left,
            outcome=closed,
            changes=changes,
            drops=drops,
            free_blocks=last.free_blocks_end if last is not None else state.config.num_usable_blocks,
            num_blocks=state.config.num_usable_blocks,
            num_lost_blocks=state.num_lost_blocks,
            num_still_steps=still,
            circling=circling,
            at=last.end - run_zero(trace) if last is not None and last.end else None,
            source=trace.meta.source,
            server=Server.of(trace),
            first_step=trace.whole[0].step if len(trace.whole) and kept_zero(trace.whole) is None else 0,
            missing=tuple(self.missing(verdict)),
            holders=holders,
            next_seat=next_seat,
            seat_obstacle=seat_obstacle,
            silent=self.silent,
            usual=self.usual,
            clock=time_of_day(trace.meta.created, last.end, date=True) if last is not None and last.end else "",
        )

    def gone(self) -> Literal["silent", "ended", ""]:
        """Facts against requests being served, whatever the rules say: silence, or the end; "" for none."""
        if self.trace.has_ended and self.trace.end == "" and self.trace.meta.is_of_server:
            return "ended"
        if self.silent is None or self.usual is None:
            return ""
        return "silent" if self.silent > max(SILENT, 20 * self.usual, 3 * self.longest) else ""

    def seats(self, waiters: Sequence[Waiter]) -> tuple[tuple[Holder, ...], Change | None, Reason | None]:
        """If the head of the queue waits for a seat: the holders, and one seat more or why it does not help."""
        head = next((waiter for waiter in waiters if waiter.status == "waiting"), None)
        if head is None or head.reason is None or head.reason.kind != "seats" or not isinstance(head.reason.value, int):
            return (), None, None
        now = self.scheduler(self.state.config)
        if now.num_running < now.max_running:  # the last step has freed one
            return (), None, None
        change = Change(head.reason.limit, head.reason.value, head.reason.value + 1)
        try:
            batch = self.scheduler(self.state.config.replace(**{change.field: change.after})).schedule()
        except (ValueError, RuntimeError):  # it contradicts another field, or the engine dies
            return self.holders(), None, None
        if any(chunk.request_id == head.request_id for chunk in batch.chunks):
            return self.holders(), change, None
        return self.holders(), None, batch.to_record().not_scheduled.get(head.request_id)

    def holders(self) -> tuple[Holder, ...]:
        """The requests that hold the seats, in the order in which they leave; one without a pace has that of others."""
        requests, has_clock = metrics(self.trace).requests, metrics(self.trace).summary.unit == "s"
        before, left, paces = outputs_before(self.trace), {}, {}
        for request_id in self.state.running:
            of_request = requests[request_id]
            num_output_tokens = (before.get(request_id) or 0) + of_request.num_output_tokens
            left[request_id] = max(0, self.trace.requests[request_id].max_tokens - num_output_tokens)
            if has_clock and (gaps := of_request.gaps("s")[-PACE_TOKENS:]):
                paces[request_id] = fmean(gaps)
        common = fmean(paces.values()) if paces else 1.0
        names = sorted(left, key=lambda name: (left[name] * paces.get(name, common), left[name]))
        return tuple([Holder(name, left[name], left[name] * paces[name] if name in paces else None) for name in names])

    def scheduler(self, config: EngineConfig, *, released: bool = False, **options: Any) -> Scheduler:
        """One in the last state; ``released`` with all that is held outside of the scheduler given back."""
        without = (*(() if released else self.parked), *options.pop("without", ()))
        scheduler = self.state.scheduler(config, without=without, frees_lost=released, as_vllm=self.as_vllm, **options)
        if not released and self.seats_are_taken:
            scheduler.max_running = max(0, scheduler.max_running - len(self.parked))
        return scheduler

    def run(self, config: EngineConfig, *, ends_early: bool = True, **options: Any) -> Outcome:
        """Run on from the last state; the options are those of `scheduler`."""
        scheduler = self.scheduler(config, **options)
        seconds = max(0.0, self.deadline - time.thread_time())
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
        self, closed: Outcome, circling: tuple[str, ...]
    ) -> tuple[Verdict, tuple[str, ...], tuple[Change, ...], tuple[str, ...]]:
        """The verdict, the requests that are left, and what frees them."""
        state = self.state
        everyone = (*state.running, *state.waiting)
        if not everyone:
            return "idle", (), (), ()
        outside = bool(self.parked or state.num_lost_blocks)
        if closed.kind in ("repeats", "dies"):
            left = (*closed.running, *(closed.reasons or {}))
            changes = self.changes()
            drops = self.drops(left)
            if outside and self.run(state.config, released=True).kind == "ends":
                return "outside", (*self.parked, *left), changes, drops
            changes += tuple(self.restarted_changes())
            return "never", left, changes, drops
        if self.parked and (self.stands_still or not state.running):
            changes = tuple(self.stated_changes())
            return "outside", tuple(self.parked) if not self.stands_still else everyone, changes, ()
        if self.stands_still or circling:
            return "differs", everyone, tuple(self.whole_sequences()), ()
        late = self.run(state.config, ends_early=False)
        if late.kind in ("repeats", "dies"):
            changes = self.changes(ends_early=False)
            return "early", (*late.running, *(late.reasons or {})), changes, ()
        return "runs", (), (), ()

    def waiters(self, closed: Outcome) -> Iterator[Waiter]:
        """The requests that are not served now, with the reasons that are known best."""
        first = self.scheduler(self.state.config)
        scheduled, ruled = set(), dict(closed.reasons or {})
        try:
            batch = first.schedule()
            scheduled = {chunk.request_id for chunk in batch.chunks}
            ruled |= batch.to_record().not_scheduled
        except RuntimeError:
            pass
        last = {chunk.request_id for chunk in self.trace[-1].chunks} if len(self.trace) else set()
        for request_id in self.state.running:
            if request_id not in (last if self.stands_still else scheduled | last):
                yield Waiter(request_id, "running", None)
        for request_id in self.state.waiting:
            recorded, rule = self.recorded.get(request_id), ruled.get(request_id)
            if rule is None or (recorded is not None and recorded.root in (*OUTSIDE, "seats")):
                yield Waiter(request_id, "waiting", recorded or Reason(), recorded=True)
            else:
                yield Waiter(request_id, "waiting", rule)

    # -- what frees them -------------------------------------------------------------------------------------------

    def frees(self, changes: Mapping[str, Any], **options: Any) -> bool:
        """Whether all requests end under changed settings.

        Raises:
            TimeoutError: Time was up before.
        """
        if changes.get("num_speculative_tokens") == 0:
            changes = {**changes, "speculative": None}
        try:
            config = self.state.config.replace(**changes)
        except ValueError:  # contradicts another field
            return False
        kind = self.run(config, without=self.rest_of_the_queue, **options).kind
        if kind == "open":
            raise TimeoutError
        return kind == "ends"

    @cached_property
    def rest_of_the_queue(self) -> tuple[str, ...]:
        """Waiting requests of a long queue that no trial needs: neither among the first nor among the largest."""
        requests, waiting = self.trace.requests, self.state.waiting[MAX_TRIED:]
        return tuple(sorted(waiting, key=lambda request_id: requests[request_id].num_prompt_tokens)[:-MAX_TRIED])

    def changes(self, **options: Any) -> tuple[Change, ...]:
        """The smallest change of each setting after which all requests end."""
        found = []
        for field, values in _candidates(self.state.config, self.state):

            def is_enough(value: Any, field: str = field) -> bool:
                return self.frees({field: value}, **options)

            try:
                if not values or not is_enough(values[-1]):
                    continue
                place, end = 0, 1
                while end < len(values) and not is_enough(values[end - 1]):
                    place, end = end, 2 * end
                place = bisect_left(values, True, place, min(end, len(values)), key=is_enough)
                found.append(Change(field, getattr(self.state.config, field), values[min(place, len(values) - 1)]))
            except TimeoutError:
                self.is_complete = False
        return tuple(sorted(found, key=_size))

    def restarted_changes(self) -> Iterator[Change]:
        """Settings that cannot change in the recorded state: fewer seats, and smaller blocks in as much memory."""
        config, num_requests = self.state.config, len(self.state.running) + len(self.state.waiting)
        size = config.block_size
        sizes = [size >> shift for shift in range(1, 5) if size % (1 << shift) == 0]
        after_restart = {"released": True, "restarted": True}
        try:
            if self.frees({}, **after_restart):
                return
            for seats in range(min(config.max_num_seqs, num_requests) - 1, 0, -1):
                if self.frees({"max_num_seqs": seats}, **after_restart):
                    yield Change("max_num_seqs", config.max_num_seqs, seats)
                    break
            for smaller in sizes:
                pool = config.num_pool_blocks * (size // smaller)
                if self.frees({"block_size": smaller, "num_blocks": pool}, **after_restart):
                    yield Change("block_size", size, smaller)
                    break
        except TimeoutError:
            self.is_complete = False

    def drops(self, left: Sequence[str]) -> tuple[str, ...]:
        """The first request whose rejection frees all others; empty if there is none."""
        for request_id in [name for name in left if name in self.state.waiting][:1]:
            if len(left) > 1 and self.run(self.state.config, without=(request_id,)).kind == "ends":
                return (request_id,)
        return ()

    def stated_changes(self) -> Iterator[Change]:
        """Changes that follow from the numbers of recorded reasons, of limits that EngineConfig does not have."""
        seen: set[str] = set()
        for reason in self.recorded.values():
            if reason.limit in ("", *seen) or not isinstance(reason.value, int):
                continue
            if (lacking := (reason.needed or 0) - (reason.available or 0)) > 0:
                seen.add(reason.limit)
                yield Change(reason.limit, reason.value, reason.value + lacking)

    def whole_sequences(self) -> Iterator[Change]:
        """A pool for an engine that counts every token in every group, though windows recycle their blocks."""
        config, state = self.state.config, self.state
        if all(group.kind == "full_attention" for group in config.cache_groups):
            return
        lengths = [
            self.trace.requests[request_id].num_prompt_tokens for request_id in state.waiting[:1] or state.running[:1]
        ]
        needed = max((_blocks_of_whole(config.cache_groups, length) for length in lengths), default=0)
        if needed > config.num_usable_blocks:
            yield Change("num_blocks", config.num_pool_blocks, needed + 1)

    def missing(self, verdict: Verdict) -> Iterator[str]:
        """Sentences about facts that the record lacks."""
        trace = self.trace
        if "scheduling_policy" in trace.config:
            yield "the scheduling policy is Python code: vLLM's rules are applied in its place"
        if trace.meta.is_of_sglang:
            yield f"the next decisions of SGLang: {BY_VLLM_RULES}"
        waiting = [trace.requests[request_id] for request_id in self.state.waiting]
        if self.state.config.enable_prefix_caching and not all(map(self.state.contents.is_known, waiting)):
            yield "token ids or block hashes: a waiting request is taken to find no prefix of another one in the cache"
        if verdict in ("runs", "early") and trace.end == "cut":
            yield "whether the server still serves: the file has no end line; workbench why looks when it was written"
        if not self.is_complete:
            yield f"other settings, for which {SECONDS:.0f} s were too short"
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
    largest = [*lengths[: len(state.running)], max(lengths, default=0)]
    blocks = sum(_blocks_of_whole(config.cache_groups, length + drafts) + 2 * (1 + drafts) for length in largest)
    yield "num_blocks", range(config.num_pool_blocks + 1, config.num_pool_blocks + blocks + 2)
    slots = config.speculation.num_draft_slots * (len(requests) + 1)
    budget = config.max_num_batched_tokens
    yield "max_num_batched_tokens", range(budget + 1, budget + most + slots + 2)
    if config.max_num_scheduled_tokens is not None:
        yield "max_num_scheduled_tokens", range(config.max_num_scheduled_tokens + 1, budget + 1)
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
