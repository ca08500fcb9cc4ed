"""Make the records of a trace from an engine's messages.

Messages arrive in the order of the events; records are in the order of the steps. With asynchronous scheduling the two
differ: step k + 1 is scheduled before the output of step k is available. A record therefore contains

- the requests that were preempted or aborted before or while its step was scheduled,
- the queues, block tables and free blocks after its scheduling,
- the tokens of its output,
- the requests that ended while it was the newest step: with asynchronous scheduling a request keeps its place among
  the running requests and its blocks one step longer than needed, and may have a chunk with an unused output in it.

With synchronous scheduling the record equals the one that Workbench's own engine makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from workbench.base.cache_salt import digest_of
from workbench.trace.kv_groups import read_groups
from workbench.trace.lines import RequestInfo, Supplement
from workbench.trace.pool_change import NO_CHANGE, PoolChange, PoolLog
from workbench.trace.reasons import UNKNOWN, Reason
from workbench.trace.recorders.block_hashes import BlockHasher
from workbench.trace.recorders.host_watch import HostWatch
from workbench.trace.recorders.messages import (
    Admission,
    Arrival,
    End,
    Message,
    Pause,
    PoolNews,
    Preemption,
    Schedule,
    Update,
)
from workbench.trace.recorders.queues import LiveRequest, Queues
from workbench.trace.records import Arm, Chunk, LimitedBy, StepRecord, TableChange
from workbench.trace.step_span import StepSpan

_UNLIMITED = 2**62

# The fields of a Chunk before and after the sampled token.
_Before = tuple[str, int, int, bool, Arm]
_After = tuple[LimitedBy, tuple[int, ...], int, int]


class _OpenStep:
    """A step that is scheduled and has no output yet.

    Attributes:
        message: The message about its scheduling.
        chunks: The request of each chunk, and the chunk's fields before and after the sampled token.
        record: The record as far as it is known: without chunks and without the fields of the output.
        table_changes: Changes of the block tables in all KV cache groups by request; empty if one group is recorded.
        finish_reasons: Reasons of the requests that ended while this was the newest step.
        free_blocks_end: Number of free blocks after the last output that was processed.
        pool_end: Changes to the pool by the outputs that were processed while this was the newest step.
        cached_end: The blocks that were cached with them.
        ahead: Rejected drafts of the step before by request, if they were not known when this step was scheduled.
    """

    def __init__(
        self,
        message: Schedule,
        chunks: list[tuple[LiveRequest, _Before, _After]],
        record: StepRecord,
        table_changes: dict[str, tuple[TableChange, ...]],
    ) -> None:
        self.message = message
        self.chunks = chunks
        self.record = record
        self.table_changes = table_changes
        self.finish_reasons: dict[str, str] = {}
        self.free_blocks_end = message.free_blocks
        self.pool_end: PoolChange | None = NO_CHANGE
        self.cached_end: tuple[int, ...] = ()
        self.ahead: dict[str, int] = {}


class Assembler:
    """Turns messages into the lines of a trace.

    Args:
        config: The engine's configuration; only ``block_size`` and the limits that explain decisions are used.
        kv_cache_group: Index of the KV cache group whose blocks are recorded.
        samples: Whether requests sample tokens; False for pooling models.
        max_waiting: Maximum number of waiting requests named in a record.
        start: Start of the recording, by the clock of the steps' times.
        watches_pool: Whether a PoolNews comes before each Schedule or Update with changes of the pool.
        hasher: Hashes the blocks of requests; None to leave them out.
        host: Says what the machine did during long steps; None to leave that out.
        as_vllm: The engine admits nobody in a step with a preemption, as vLLM; SGLang says nothing of why others wait.

    Example:
        >>> assembler = Assembler({"block_size": 16})
        >>> [info] = assembler.take(Arrival("a", 3, 8, 0, 0.0, 0.0))
        >>> list(assembler.take(Schedule(0, 0.0, 0.0, 99, ["a"], [], [], [3], [Admission("a", 0, 3, [1])])))
        []
        >>> [record] = assembler.take(Update(0, 0.0, 0.0, 99))
        >>> record.chunks[0].arm, record.running, record.block_tables if record.has_block_tables else None
        ('new_final', ('a',), None)
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        kv_cache_group: int = 0,
        samples: bool = True,
        max_waiting: int = 512,
        start: float = 0.0,
        watches_pool: bool = False,
        hasher: BlockHasher | None = None,
        host: HostWatch | None = None,
        as_vllm: bool = True,
    ) -> None:
        self._start = start
        self._as_vllm = as_vllm
        self._token_ids = bool(config.get("token_ids_recorded", True))
        self._hasher = hasher
        self._host = host
        self._watches_pool = watches_pool
        self._pool_news = PoolNews()
        self._hashes: dict[str, str] = {}
        """Of requests that have ended, until the record of their end is complete."""
        self._groups = read_groups(config) if "kv_cache_groups" in config else ()
        self._group = kv_cache_group
        self._block_size = int(config.get("block_size") or 16)
        self._token_budget = int(config.get("max_num_scheduled_tokens") or config.get("max_num_batched_tokens") or 0)
        self._max_batched = int(config.get("max_num_batched_tokens") or 0)
        self._max_running = int(config.get("max_num_active_seqs") or config.get("max_num_seqs") or _UNLIMITED)
        self._max_model_len = int(config.get("max_model_len") or _UNLIMITED)
        self._threshold = int(config.get("long_prefill_token_threshold") or 0)
        self._adaptive = bool(config.get("long_prefill_token_threshold_adaptive"))
        self._caches_prefixes = bool(config.get("enable_prefix_caching"))
        self._samples = samples
        num_blocks = config.get("num_blocks")
        self._no_blocks = Reason("kv_blocks", "num_blocks", num_blocks if isinstance(num_blocks, int) else None)
        self._no_block_free = msgspec.structs.replace(self._no_blocks, available=0)
        self._cache_reset = Reason("preempted", rule="cache_reset")
        limit = "max_num_scheduled_tokens" if config.get("max_num_scheduled_tokens") else "max_num_batched_tokens"
        self._budget_spent = Reason("token_budget", limit, self._token_budget, available=0)
        limit = "max_num_active_seqs" if config.get("max_num_active_seqs") else "max_num_seqs"
        self._no_seat = Reason("seats", limit, self._max_running, 1, 0)
        self._queues = Queues(by_priority=config.get("policy") == "priority", max_waiting=max_waiting)
        self._open: deque[_OpenStep] = deque()
        self._next_step = 0
        self._still_scheduled: dict[str, None] = {}
        self._arrived: list[str] = []
        self._aborted: list[str] = []
        self._preempted: dict[str, Reason] = {}
        self._unscheduled: dict[str, tuple[int, ...]] = {}
        self._unscheduled_changes: dict[str, tuple[TableChange, ...]] = {}
        self._ended_in_update: dict[str, str] = {}
        self._previous_end = 0.0

    def take(self, message: Message) -> Iterator[RequestInfo | StepRecord | Supplement]:
        """Process the next message.

        Yields:
            A RequestInfo for an arrival, a StepRecord when a step is complete, with the hashes of the requests that
            ended in it, nothing otherwise.

        Raises:
            KeyError: The message names a request that has not arrived.
        """
        if isinstance(message, Update):
            yield (record := self._update(message))
            if ended := self._hashes.keys() & {*record.finished, *record.aborted}:
                yield Supplement(record.step, "block_hashes", {name: self._hashes.pop(name) for name in sorted(ended)})
            if self._host is not None and (happened := self._host.step(record)) is not None:
                yield happened
        elif isinstance(message, Schedule):
            self._schedule(message)
        elif isinstance(message, Arrival):
            yield self._arrive(message)
        elif isinstance(message, Preemption):
            self._preempt(message)
        elif isinstance(message, End):
            self._end(message)
        elif isinstance(message, PoolNews):
            self._pool_news = message
        elif isinstance(message, Pause) and self._host is not None:
            self._host.pause(message)

    def _arrive(self, message: Arrival) -> RequestInfo:
        self._queues.arrive(message)
        self._arrived.append(message.request_id)
        # First, because the hasher takes the list of tokens over.
        stored = tuple(message.prompt_token_ids) if self._token_ids else ()
        return RequestInfo(
            request_id=message.request_id,
            num_prompt_tokens=max(1, message.num_prompt_tokens),
            prompt_token_ids=stored,
            max_tokens=message.max_tokens,
            arrival_step=self._next_step,
            arrival_time=max(0.0, message.time),
            priority=message.priority,
            cache_salt=digest_of(message.cache_salt, None if self._hasher is None else self._hasher.key),
            adapter=message.lora,
            block_hashes=self._hasher.begin(message) if self._hasher is not None else "",
        )

    def _preempt(self, message: Preemption) -> None:
        request = self._queues.preempt(message.request_id)
        self._still_scheduled.pop(message.request_id, None)
        gained = message.block_ids[len(request.block_table) :]
        if gained:
            self._unscheduled[message.request_id] = tuple(gained)
        others = [table[len(before) :] for table, before in zip(message.other_tables, request.other_tables)]
        if any(others):
            self._unscheduled_changes[message.request_id] = tuple([TableChange(tuple(table)) for table in others])
        reason = UNKNOWN if message.is_unexplained else self._no_blocks
        self._preempted[message.request_id] = self._cache_reset if message.is_reset else reason
        request.lose_blocks()

    def _end(self, message: End) -> None:
        self._queues.remove(message.request_id)
        self._still_scheduled.pop(message.request_id, None)
        if self._hasher is not None and (hashes := self._hasher.end(message.request_id, message.output_token_ids)):
            self._hashes[message.request_id] = hashes
        newest = self._open[-1] if self._open else None
        if message.in_update and newest is not None:
            self._ended_in_update[message.request_id] = message.reason
            newest.finish_reasons[message.request_id] = message.reason
        else:
            self._aborted.append(message.request_id)

    # -- scheduling ------------------------------------------------------------------------------------------

    def _schedule(self, message: Schedule) -> None:
        admissions = {admission.request_id: admission for admission in message.admissions}
        if message.request_ids is not None:
            self._still_scheduled = dict.fromkeys(message.request_ids)
        elif admissions:
            self._still_scheduled |= dict.fromkeys(admissions)
        num_scheduled_tokens = message.num_scheduled_tokens or [1] * len(self._still_scheduled)
        cap = self._long_prefill_cap(len(self._queues))
        chunks: list[tuple[LiveRequest, _Before, _After]] = []
        admitted: list[str] = []
        resumed: list[str] = []
        published: list[int] = []
        new_block_ids: Sequence[int]
        table_changes: dict[str, tuple[TableChange, ...]] = {}
        before: _Before
        after: _After
        others = zip(message.num_computed_tokens, message.new_block_ids, strict=True)
        for request_id, num_tokens in zip(self._still_scheduled, num_scheduled_tokens, strict=True):
            admission = admissions.get(request_id)
            if admission is not None:
                request = self._queues.admit(request_id)
                (resumed if request.was_preempted else admitted).append(request_id)
                start, new_block_ids = request.begin_prefill(admission), admission.block_ids
                if self._groups:
                    tables = (admission.block_ids, *admission.other_tables)
                    table_changes[request_id] = tuple([TableChange(tuple(table)) for table in tables])
            else:
                request = self._queues.live[request_id]
                start, groups = next(others)
                new_block_ids = ()
                if not self._groups:
                    new_block_ids = groups[self._group] if groups else ()
                    request.block_table.extend(new_block_ids)
                elif (changed := message.table_changes.get(request_id)) is not None:
                    new_block_ids = changed[0][1]
                    table_changes[request_id] = _change_tables(request, changed)
            if start >= request.prefill_end:
                request.num_kv_computed = start + num_tokens
                before = (request_id, start, num_tokens, False, "decode")
                after = ("complete", tuple(new_block_ids), 0, 0)
            else:
                before, after = self._prefill_chunk(request, start, num_tokens, new_block_ids, admission, cap)
            chunks.append((request, before, after))
            if self._watches_pool:
                continue  # the news say what was cached
            if self._groups and self._caches_prefixes:
                published.extend(self._full_blocks(request, start, start + num_tokens))
            elif self._caches_prefixes:
                first, last = start // self._block_size, (start + num_tokens) // self._block_size
                published.extend(request.block_table[first:last])
        if message.running is not None:
            self._queues.replace(message.running, message.waiting or [])
        pool, cached = self._pool_changes()
        waiting_reason, passed_over = self._explain_waiting(sum(num_scheduled_tokens), message.free_blocks)
        record = StepRecord(
            step=self._next_step,
            arrived=tuple(self._arrived),
            admitted=tuple(admitted),
            resumed=tuple(resumed),
            preempted=tuple(self._preempted),
            aborted=tuple(self._aborted),
            running=self._queues.running_ids(),
            waiting=self._queues.waiting_ids(),
            waiting_reason=waiting_reason,
            passed_over=passed_over,
            preempt_reasons=self._preempted,
            unscheduled_block_ids=self._unscheduled,
            unscheduled_changes=self._unscheduled_changes,
            free_blocks=message.free_blocks,
            cached_block_ids=(*published, *cached),
            pool=pool,
            token_budget=self._token_budget,
            long_prefill_cap=cap,
        )
        self._arrived, self._aborted, self._preempted, self._unscheduled = [], [], {}, {}
        self._unscheduled_changes = {}
        self._next_step += 1
        self._open.append(_OpenStep(message, chunks, record, table_changes))

    def _pool_changes(self) -> tuple[PoolChange | None, tuple[int, ...]]:
        """The changes of the pool in the call of this message, None if they cannot be known; and the cached blocks."""
        news, self._pool_news = self._pool_news, PoolNews()
        return _changes_of(news) if self._watches_pool else (None, ())

    def _full_blocks(self, request: LiveRequest, start: int, end: int) -> Iterator[int]:
        """The blocks of full attention that a chunk fills; a recording does not say which others are cached."""
        for group, table in zip(self._groups, (request.block_table, *request.other_tables)):
            if group.kind == "full_attention":
                yield from table[start // group.block_size : end // group.block_size]

    def _long_prefill_cap(self, num_requests: int) -> int:
        """Maximum number of tokens of one request in a step, by vLLM's rule; 0 for no cap."""
        if self._threshold == 0 or num_requests <= 1:
            return 0
        return max(self._threshold, self._max_batched // num_requests) if self._adaptive else self._threshold

    def _prefill_chunk(
        self,
        request: LiveRequest,
        start: int,
        num_tokens: int,
        new_block_ids: Sequence[int],
        admission: Admission | None,
        cap: int,
    ) -> tuple[_Before, _After]:
        """Advance the request; return the fields of its chunk before and after the sampled token."""
        end = start + num_tokens
        is_partial = end < request.prefill_end
        arm: Arm = "new_final" if admission is not None and not request.was_preempted else "cached_final"
        limited_by: LimitedBy = "complete"
        if is_partial:
            arm = "intermediate"
            limited_by = "long_prefill_token_threshold" if num_tokens == cap else "token_budget"
            if end >= self._max_model_len - 1:
                limited_by = "max_model_len"
        num_recomputed = max(0, min(end, request.num_kv_lost) - start)
        request.num_kv_computed = end
        num_cached = start if admission is not None else 0
        before = (request.request_id, start, num_tokens, is_partial, arm)
        return before, (limited_by, tuple(new_block_ids), num_cached, num_recomputed)

    def _explain_waiting(self, num_tokens: int, free_blocks: int) -> tuple[Reason | None, dict[str, Reason]]:
        """A record's ``waiting_reason`` and ``passed_over``, as far as they can be known from outside the engine."""
        if not self._queues.num_waiting:
            return None, {}
        passed_over = {rid: reason.as_preempted() for rid, reason in self._preempted.items()}
        if passed_over and self._as_vllm:
            names = tuple(self._preempted)
            return msgspec.structs.replace(self._no_blocks, rule="preemption", requests=names), passed_over
        if num_tokens >= self._token_budget > 0:
            return self._budget_spent, passed_over
        if self._queues.num_running >= self._max_running:
            return self._no_seat, passed_over
        return UNKNOWN if free_blocks else self._no_block_free, passed_over

    # -- after the forward pass ------------------------------------------------------------------------------

    def _update(self, message: Update) -> StepRecord:
        newest = self._open[-1]
        newest.free_blocks_end = message.free_blocks  # these blocks are freed while that step is the newest
        pool, cached = self._pool_changes()
        newest.pool_end = None if pool is None or newest.pool_end is None else newest.pool_end.then(pool)
        newest.cached_end += cached
        step = self._open.popleft()
        if step.message.output_id != message.output_id:
            raise ValueError(f"the output of another step arrived before that of step {step.record.step}")
        tokens = dict(zip(message.request_ids, message.token_ids)) if message.request_ids else None
        num_given = dict(zip(message.request_ids, message.num_given))
        chunks = []
        for request, before, after in step.chunks:
            request_id = before[0]
            proposed, ahead = step.message.drafts.get(request_id, ()), step.ahead.get(request_id, 0)
            has_ended = self._queues.live.get(request_id) is not request and request_id not in self._ended_in_update
            token = self._token(request, before[3], tokens)
            if not (proposed or ahead or has_ended):
                chunks.append(Chunk(*before, token, *after))
                continue
            given = () if token is None or tokens is None else tuple(tokens.get(request_id, ()))
            num_accepted = max(0, num_given.get(request_id, len(given)) - 1) if token is not None else 0
            if self._open and token is not None:  # the next step is scheduled already, and counts the rejected drafts
                self._open[0].ahead[request_id] = len(proposed) - num_accepted
            chunks.append(
                Chunk(
                    *before,
                    token,
                    *after,
                    drafts=tuple(proposed),
                    sampled_before=given[:-1],
                    num_accepted=num_accepted,
                    ahead=ahead,
                    discarded=has_ended,
                )
            )
        if self._groups:
            none = (TableChange(),) * len(self._groups)
            chunks = [_with_changes(chunk, step.table_changes.get(chunk.request_id, none)) for chunk in chunks]
        finished = step.finish_reasons
        self._ended_in_update = {}
        return msgspec.structs.replace(
            step.record,
            chunks=tuple(chunks),
            finished=tuple(finished),
            finish_reasons=finished,
            free_blocks_end=step.free_blocks_end,
            pool_end=step.pool_end,
            cached_block_ids=step.record.cached_block_ids + step.cached_end,
            num_cached_end=len(step.cached_end),
            **self._times(step.message, message),
        )

    def _times(self, scheduled: Schedule, updated: Update) -> dict[str, Any]:
        """The times of a step. Its forward pass begins when it has been scheduled and the step before has ended."""
        moments = (scheduled.started, scheduled.ended, updated.started, updated.ended)
        started, ended, called, returned = (moment - self._start for moment in moments)
        begin = max(ended, self._previous_end)
        span = StepSpan(started)
        span.add("schedule", started, ended)
        span.add("forward", begin, max(begin, called))
        span.add("update", max(begin, called), returned)
        times = span.fields(self._previous_end)
        self._previous_end = times["end"]
        return times

    def _token(self, request: LiveRequest, is_partial: bool, tokens: dict[str, list[int]] | None) -> int | None:
        """The token that a chunk sampled; 0 if token ids are not recorded."""
        if is_partial or not self._samples:
            return None
        request_id = request.request_id
        has_ended = self._queues.live.get(request_id) is not request
        if has_ended and self._ended_in_update.get(request_id, "abort") in ("abort", "error"):
            return None  # it ended before this output was available, and its token was thrown away
        if tokens is None:
            return 0
        given = tokens.get(request_id)
        return given[-1] if given else None


def _changes_of(news: PoolNews) -> tuple[PoolChange, tuple[int, ...]]:
    """The net change of the pool, and the blocks that were cached."""
    log, cached = PoolLog(), dict[int, None]()
    for block in news.content:
        if block > 0:
            cached[block] = None
        else:
            cached.pop(-block, None)
            log.evict(-block)
    for to_front, blocks in news.given_back:
        log.give_back(blocks if to_front else (), () if to_front else blocks)
    return log.take(lambda _: True), tuple(cached)


def _change_tables(request: LiveRequest, changed: Sequence[tuple[list[int], list[int]]]) -> tuple[TableChange, ...]:
    """Apply the changes of all groups to a request's tables."""
    for table, (removed, appended) in zip((request.block_table, *request.other_tables), changed):
        for place in removed:
            table[place] = 0
        table.extend(appended)
    return tuple([TableChange(tuple(appended), tuple(removed)) for removed, appended in changed])


def _with_changes(chunk: Chunk, changes: tuple[TableChange, ...]) -> Chunk:
    return msgspec.structs.replace(chunk, removed=changes[0].removed, other_groups=changes[1:])
