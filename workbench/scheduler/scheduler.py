"""The scheduler: chooses the tokens of the next step, and takes in the results of the last one.

Pure Python. The rules are vLLM 0.33's V1 scheduler, synchronous or asynchronous, with and without speculative decoding,
and its decisions are the same down to the block ids. There are no prefill and decode phases: every request simply has
tokens that are known and tokens whose KV is computed, and a step moves the second number towards the first.

Two features let the second number run ahead of the first:

- Speculative decoding: the draft tokens of a request count as tokens to compute. ``update()`` takes back the rejected
  ones; their KV blocks stay with the request, and their KV is overwritten.
- Asynchronous scheduling: while a step is computed the next one is scheduled, with placeholders for the tokens that it
  will give. An end that comes with the earlier step is found out too late for the later one, whose output is discarded.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from workbench.scheduler.batch import Sampled, ScheduledBatch, ScheduledChunk, only
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.queues import Queues, ServiceOrder
from workbench.scheduler.request import FinishReason, Request
from workbench.scheduler.starvation import note_loss, num_fitting, starving
from workbench.trace.fields import EMPTY
from workbench.trace.reasons import UNKNOWN, Kind, Reason, Rule
from workbench.trace.records import Arm, LimitedBy, TableChange

if TYPE_CHECKING:
    from workbench.config import EngineConfig
    from workbench.scheduler.partial_prefills import PartialPrefills
    from workbench.scheduler.policy import SchedulingPolicy
    from workbench.scheduler.recurrent_state import StateBoundaries
    from workbench.scheduler.second_tier import SecondTier
    from workbench.trace.lines import Keyframe


class Scheduler:
    """Chooses the tokens of each step.

    One step is ``batch = schedule()``, the forward pass, then ``update(batch, sampled)``, or ``fail(batch)`` if the
    forward pass raised, and ``batch.to_record()``. With ``num_speculative_tokens``, drafts for the next step go to
    ``set_drafts()``. With ``async_scheduling``, iteration k is ``schedule()`` for batch k, the forward pass of batch k,
    and meanwhile ``update()`` of batch k - 1: two batches are in flight between the two calls.

    Args:
        config: Limits and policies. ``max_model_len=None`` sets no limit.
        clock: Returns seconds since the start of the trace; stamps each step.
        policy: Decides order, chunk sizes and victims instead of vLLM's rules; None for those.
        as_vllm: Let a request wait forever, and the scheduler die, where vLLM 0.33.0 does (docs/limits.md).

    Attributes:
        config: The configuration in force.
        clock: Returns seconds since the start of the trace.
        step: Index of the next step.
        queues: The unfinished requests, waiting and running.
        kv_cache: The KV blocks.
        order: The order of service: vLLM's, a policy's, or that of the limits on partial prefills.
        partial_prefills: The limits on concurrent partial prefills; None with both of them off.
        second_tier: The second tier of the prefix cache; None without one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        policy: SchedulingPolicy | None = None,
        as_vllm: bool = False,
    ) -> None:
        self.step = 0
        self.as_vllm = as_vllm
        self.queues = Queues(config.policy)
        self.kv_cache = KVCacheManager(config)
        self.policy = policy
        self.partial_prefills: PartialPrefills | None = None
        self.second_tier: SecondTier | None = None
        self.clock = clock
        self._in_flight: deque[ScheduledBatch] = deque()
        self._overtakable: list[Request] = []
        self._refused: list[Request] = []
        self._configure(config)

    def _configure(self, config: EngineConfig) -> None:
        self.config = config
        self.max_running = config.max_num_active_seqs or config.max_num_seqs
        self.max_model_len = config.max_model_len or sys.maxsize
        self._token_budget = config.token_budget
        budget_field = "max_num_scheduled_tokens" if config.max_num_scheduled_tokens else "max_num_batched_tokens"
        self._budget_spent = Reason("token_budget", budget_field, self._token_budget, available=0)
        seats_field = "max_num_active_seqs" if config.max_num_active_seqs else "max_num_seqs"
        self._no_seat = Reason("seats", seats_field, self.max_running, 1, 0)
        self._num_drafts = config.num_speculative_tokens
        self._draft_slots = config.speculation.num_draft_slots
        self._is_async = config.async_scheduling
        self._max_in_flight = 2 if config.async_scheduling else 1
        self._steps_ahead = config.async_scheduling or config.num_speculative_tokens > 0
        self._keeps_tables = config.async_scheduling or len(config.cache_groups) > 1
        self._states: StateBoundaries | None = None
        owned = (config, self.queues, self.kv_cache)
        self.order = ServiceOrder(*owned)
        # Features that are off are not even imported.
        if self._steps_ahead:
            from workbench.scheduler.outputs import take_output

            self._take_output = take_output
        if config.enable_prefix_caching and any(group.kind == "mamba" for group in config.cache_groups):
            from workbench.scheduler.recurrent_state import StateBoundaries

            self._states = StateBoundaries(config, config.token_budget if self.as_vllm else config.longest_chunk)
        if self.policy is not None:
            from workbench.scheduler.policy import PolicyOrder

            self.order = PolicyOrder(*owned, self.policy)
        if config.max_num_partial_prefills is None and config.max_long_partial_prefills is None:
            self.partial_prefills = None
        else:
            from workbench.scheduler.partial_prefills import PartialPrefills

            num_computed = self.partial_prefills.num_computed if self.partial_prefills is not None else 0
            self.order = self.partial_prefills = PartialPrefills(*owned, self.order, num_computed)
        if config.second_tier is not None:
            from workbench.scheduler.second_tier import SecondTier, TransferOrder

            self.second_tier = self.second_tier or SecondTier(config.second_tier, config.block_size)
            self.order = TransferOrder(*owned, self.order, self.second_tier)

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests by id."""
        return self.queues.requests

    @property
    def running(self) -> list[Request]:
        """Admitted requests in the order of their admission."""
        return self.queues.running

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting requests in queue order."""
        return self.queues.waiting

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.queues.waiting)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds."""
        return self.kv_cache.num_free_blocks

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.queues.requests)

    def waits_for_grammars(self) -> bool:
        """Whether there are requests, and all of them wait for their grammars."""
        if not self._overtakable:
            return False
        grammars = [request.grammar for request in self.queues.requests.values()]
        return bool(grammars) and all(
            grammar is not None and not (grammar.is_ready or grammar.error) for grammar in grammars
        )

    def add_request(self, request: Request) -> None:
        """Queue a request for the next step. If no schedule can serve it (`check_servable`), it waits forever.

        Raises:
            ValueError: Its id is in use, or its prompt is empty.
        """
        if request.request_id in self.queues.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use: wait until it ends, or choose another")
        if not request.token_ids:
            raise ValueError(f"request {request.request_id!r} has an empty prompt: give at least one token")
        if len(self.kv_cache.groups) > 1:
            request.reset_blocks(len(self.kv_cache.groups))
        if request.grammar is not None or request.adapter:
            self._overtakable.append(request)
        self.queues.add(request)

    def abort_request(self, request_id: str) -> bool:
        """End a request and free its blocks at once.

        If the request is part of a step whose tokens are still to come, its token of that step is dropped.

        Returns:
            False when no unfinished request has this id.
        """
        request = self.queues.requests.get(request_id)
        if request is None:
            return False
        self.queues.abort(request)
        self._finish(request, "abort")
        return True

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and free its blocks, and what its grammar holds."""
        self.queues.finish(request, reason)
        self.kv_cache.free(request, keep_cached=reason != "error")
        if request.grammar is not None:
            request.grammar.release()

    # -- schedule --------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Choose the tokens of the next step and give them KV blocks.

        ``num_kv_computed`` of every chosen request advances here, before the forward pass has run.

        Raises:
            RuntimeError: Too many batches have been given to neither ``update()`` nor ``fail()``.
        """
        if len(self._in_flight) == self._max_in_flight:
            self._check_nothing_in_flight("schedule()")
        queues, kv_cache = self.queues, self.kv_cache
        batch = ScheduledBatch(
            step=self.step,
            time=self.clock(),
            layout=self.kv_cache.layout,
            token_budget=self._token_budget,
            long_prefill_cap=self._long_prefill_cap() if self.config.long_prefill_token_threshold else 0,
            arrived=tuple(queues.arrived),
            aborted=tuple(queues.aborted),
        )
        queues.arrived.clear()
        queues.aborted.clear()
        kv_cache.begin_step()
        budget = self._schedule_running(batch, batch.token_budget)
        if not batch.preempted:  # blocks were short for running requests: nobody is admitted
            budget = self._schedule_waiting(batch, budget)
        nothing_moves = queues.waiting and not (queues.running or batch.preempted or self.as_vllm)
        if nothing_moves and (head := starving(self.order.waiting_order(batch, budget, 1 + len(self._overtakable)))):
            head.frugal = True
            budget = self._schedule_waiting(batch, budget)
        if self.partial_prefills is not None:
            budget = self.partial_prefills.use_up(batch, budget, self._advance, self._schedule_waiting)
        if queues.waiting:
            if batch.preempted:
                batch.explain_preemption()
            elif batch.waiting_reason is None:
                batch.waiting_reason = self._why_not_reached(batch, budget)
        batch.running, batch.waiting = queues.running_ids(), queues.waiting_ids()
        batch.free_blocks = kv_cache.num_free_blocks
        batch.pool, batch.cached_block_ids = kv_cache.take_change()
        if self._is_async:
            batch.free_blocks_end = batch.free_blocks  # in the first iteration nothing is updated
        if self._keeps_tables:
            batch.tables = [[(table, len(table)) for table in chunk.request.block_tables] for chunk in batch.chunks]
        self.step += 1
        self._in_flight.append(batch)
        return batch

    def _check_nothing_in_flight(self, call: str) -> None:
        if self._in_flight:
            step = self._in_flight[0].step
            raise RuntimeError(f"step {step} is not complete: call update() or fail() before {call}")

    def _long_prefill_cap(self) -> int:
        """Maximum number of tokens of one request in this step; 0 for no cap. A request that is alone has none."""
        cap = self.config.long_prefill_token_threshold
        num_requests = len(self.queues.running) + len(self.queues.waiting)
        if num_requests <= 1 or self.partial_prefills is not None:
            return 0
        if self.config.long_prefill_token_threshold_adaptive:
            return max(cap, self.config.max_num_batched_tokens // num_requests)
        return cap

    def _schedule_running(self, batch: ScheduledBatch, budget: int) -> int:
        """Continue running requests in order of service, preempting when blocks run out.

        Returns:
            Tokens left in the budget.
        """
        chunks, draft_slots, max_model_len = batch.chunks, self._draft_slots, self.max_model_len
        for request in self.order.running_order(batch):
            if budget <= 0 or (draft_slots and self._available(batch, budget) <= 0):
                break
            if request.status != "running":  # preempted for a request before it
                continue
            start, num_expected = request.num_kv_computed, request.num_output_placeholders
            if num_expected and start + 2 - num_expected >= request.max_num_tokens:
                continue  # the token that is on its way is the last one, whatever becomes of the drafts
            num_tokens = num_wanted = len(request.token_ids) + len(request.draft_token_ids) + num_expected - start
            limited_by: LimitedBy = "complete"
            if num_wanted != 1 or start + 1 >= max_model_len:  # no other limit shortens the one token of a decode
                num_tokens, limited_by = self._running_chunk_size(request, num_wanted, batch, budget)
                if num_tokens <= 0:
                    continue
            if start + num_tokens < request.block_boundary and not request.is_prefill:
                # Inside its last block nothing else changes.
                chunks.append(ScheduledChunk(request, start, num_tokens, True, "decode"))
                request.num_kv_computed = start + num_tokens
                budget -= num_tokens
            else:
                budget = self._extend(request, num_tokens, num_wanted, limited_by, batch, budget)
        return budget

    def _running_chunk_size(
        self, request: Request, num_wanted: int, batch: ScheduledBatch, budget: int
    ) -> tuple[int, LimitedBy]:
        """Tokens of the chunk of a running request in its prompt or with drafts, and the limit that applied."""
        start = request.num_kv_computed
        room = self.max_model_len - start - 1
        if not self.as_vllm:  # a prompt of a simulation may be longer than max_model_len
            room = max(room, len(request.token_ids) - start)
        available = self._available(batch, budget) if self._draft_slots else budget
        return self._chunk_size(request, start, num_wanted, batch, available, room)

    def _extend(
        self,
        request: Request,
        num_tokens: int,
        num_wanted: int,
        limited_by: LimitedBy,
        batch: ScheduledBatch,
        budget: int,
    ) -> int:
        """Give a running request a chunk that needs or fills a block, is a part of its prompt, or has drafts.

        Returns:
            Tokens left in the budget.
        """
        kv_cache, start = self.kv_cache, request.num_kv_computed
        changes: Sequence[TableChange] = ()
        if start + num_tokens > request.block_boundary:
            if request.frugal and request.num_in_flight_tokens and not num_fitting(kv_cache, request, start, 1):
                return budget  # its step in flight holds blocks that it does not need after that
            removed = kv_cache.remove_skipped_blocks(request)
            if request.frugal and (fitting := num_fitting(kv_cache, request, start, num_tokens)) < num_tokens:
                num_tokens, limited_by = max(1, fitting), "kv_blocks"
            while (allocated := kv_cache.allocate_slots(request, start + num_tokens, removed=removed)) is None:
                num_new_blocks = kv_cache.num_new_blocks(request, start + num_tokens)
                budget += self._make_room(batch, budget, request, num_new_blocks)
                if request.status != "running":
                    return budget
            changes = allocated
        chunk = ScheduledChunk(request, start, num_tokens, True, "decode", None, limited_by)
        if changes:
            chunk.new_block_ids, chunk.removed = changes[0].new_block_ids, changes[0].removed
            if len(changes) > 1:
                chunk.other_groups = tuple(changes[1:])
        if request.is_prefill:
            chunk.arm, batch.prefill_continued = "cached_final", True
        if request.draft_token_ids:  # as many as the limits left
            num_drafts = max(0, len(request.draft_token_ids) - num_wanted + num_tokens)
            chunk.drafts = tuple(request.draft_token_ids[:num_drafts])
            request.draft_token_ids = ()
        batch.chunks.append(chunk)
        self._advance(chunk)
        return budget - num_tokens

    def _schedule_waiting(self, batch: ScheduledBatch, budget: int) -> int:
        """Admit waiting requests; no request overtakes one that does not fit.

        Returns:
            Tokens left in the budget.
        """
        queues, kv_cache, limits = self.queues, self.kv_cache, self.partial_prefills
        batch.waiting_reason = None
        num_seats = max(0, self.max_running - len(queues.running))
        any_continued = bool(batch.chunks)
        if self._overtakable:
            self._overtakable = [request for request in self._overtakable if request.status != "finished"]
        for request in self.order.waiting_order(batch, budget, num_seats + len(self._overtakable)):
            available = self._available(batch, budget) if self._draft_slots else budget
            if available <= 0 or len(queues.running) >= self.max_running:
                break
            may_wait = request.grammar is not None or request.num_stale_output_tokens or request.adapter
            if may_wait and (obstacle := self._obstacle(request)) is not None:
                batch.passed_over[request.request_id] = obstacle
                continue
            hit = kv_cache.get_computed_blocks(request)
            start, request.shared_prefix_boundary = hit.num_tokens, hit.shared_prefix_boundary
            num_uncached = num_wanted = len(request.token_ids) - start
            refusal = None if limits is None else limits.refuse(request, num_uncached, budget)
            if num_uncached == 1 and self._num_drafts and (any_continued or start) and not request.frugal:
                num_wanted += self._num_padding(batch, start)
                if num_wanted > available and (queues.running or self.as_vllm):
                    refusal = self._over_budget(num_wanted, available, "padding_drafts")
            is_whole = not (self.config.enable_chunked_prefill or request.frugal)
            if is_whole and refusal is None and num_wanted > available:
                refusal = self._over_budget(num_uncached, available, "whole_prompt")
            if refusal is None:
                num_tokens, limited_by = self._chunk_size(request, start, num_wanted, batch, available)
                if request.frugal:
                    fitting = num_fitting(kv_cache, request, start, num_tokens, hit, others_run=bool(queues.running))
                    if fitting < num_tokens:
                        num_tokens, limited_by = max(1, fitting), "kv_blocks"
                elif self._states is not None and num_tokens < num_wanted and num_uncached == 1:
                    num_wanted, num_tokens = 1, min(num_tokens, 1)
                if num_tokens <= 0:
                    refusal = self._over_budget(num_wanted, available, kind="state_boundary")
                else:
                    refusal = kv_cache.refuse(request, hit, start + num_tokens, others_run=bool(queues.running))
            if refusal is not None:
                batch.passed_over[request.request_id] = refusal
                if refusal.rule == "long_prompt":  # others may overtake it
                    continue
                batch.waiting_reason = refusal.for_those_behind(request.request_id)
                break
            kv_cache.allocate_slots(request, start + num_tokens, hit)
            resumed = request.status == "preempted"
            if resumed:
                batch.resumed += (request.request_id,)
            else:
                batch.admitted += (request.request_id,)
            batch.passed_over.pop(request.request_id, None)
            if limits is not None:
                limits.admit(request, num_uncached)
            queues.admit(request)
            arm: Arm = "cached_final" if resumed else "new_final"
            table, *others = map(tuple, request.block_tables)
            chunk = ScheduledChunk(request, start, num_tokens, True, arm, None, limited_by, table, start)
            if others:
                chunk.other_groups = tuple(map(TableChange, others))
            if num_wanted > num_uncached:
                if num_tokens < num_wanted and self.as_vllm:
                    raise RuntimeError("assert num_new_tokens == 1 + self.num_spec_tokens")
                chunk.drafts, chunk.is_padded = (-1,) * (num_tokens - num_uncached), True
            batch.chunks.append(chunk)
            self._advance(chunk)
            budget -= num_tokens
        return budget

    def _obstacle(self, request: Request) -> Reason | None:
        """The reason of a waiting request that others may overtake; None if nothing but a limit of the step is left."""
        if request.grammar is not None and not request.grammar.is_ready:
            if error := request.grammar.error:
                self._refused.append(request)
            return Reason("grammar", text=error)
        if request.num_stale_output_tokens:
            return Reason("output_in_flight", "async_scheduling", True)
        limit = self.config.max_loras
        if not request.adapter or not limit:
            return None
        users = {other.adapter: other.request_id for other in self.queues.running if other.adapter}
        if request.adapter in users or len(users) < limit:
            return None
        return Reason("adapter", "max_loras", limit, 1, 0, requests=tuple(users.values()))

    def _over_budget(self, needed: int, available: int, rule: Rule = "", kind: Kind = "token_budget") -> Reason:
        """The reason of a request that the rest of the budget is too small for."""
        spent = self._budget_spent
        return Reason(kind, spent.limit, spent.value, needed, available, rule=rule)

    def _why_not_reached(self, batch: ScheduledBatch, budget: int) -> Reason:
        """The reason of the waiting requests that the admissions of a step did not come to."""
        if (self._available(batch, budget) if self._draft_slots else budget) <= 0:
            return self._budget_spent
        if len(self.queues.running) >= self.max_running:
            return self._no_seat
        if self.policy is not None:
            return Reason("policy", "policy", self.config.policy, text=repr(self.policy))
        return UNKNOWN if self.partial_prefills is None else Reason("partial_prefills", rule="not_considered")

    def _available(self, batch: ScheduledBatch, budget: int) -> int:
        """Tokens that the next chunk may have: the rest of the budget, less a draft model's rows, one per request."""
        unused = self.config.max_num_batched_tokens - self._token_budget
        return min(budget, budget + unused - self._draft_slots * (len(batch.chunks) + 1))

    def _num_padding(self, batch: ScheduledBatch, start: int) -> int:
        """Padding drafts of an admission with one token left, which makes the batch one of equal decodes in vLLM."""
        fits = start + 1 + self._num_drafts + 1 <= self.max_model_len
        return self._num_drafts if fits and not batch.prefill_continued else 0

    def _chunk_size(
        self,
        request: Request,
        start: int,
        num_wanted: int,
        batch: ScheduledBatch,
        budget: int,
        room: int = sys.maxsize,
    ) -> tuple[int, LimitedBy]:
        """Tokens of a chunk, and the limit that applied."""
        num_tokens: int = num_wanted
        limited_by: LimitedBy = "complete"
        if not request.frugal or self._states is None:  # with a single state, the whole prompt has to be one chunk
            num_tokens, limited_by = self.order.limit_chunk(request, num_wanted, "complete", batch, budget)
        longest = num_tokens if limited_by == "policy" else sys.maxsize
        if budget < num_tokens:
            num_tokens, limited_by = budget, "token_budget"
        if room < num_tokens:
            num_tokens, limited_by = room, "max_model_len"
        if self._states is not None and not request.frugal:
            shorter = self._states.shorten(request, start, num_tokens, longest)
            if shorter < num_tokens:
                return shorter, "state_boundary"
        return num_tokens, limited_by

    def _advance(self, chunk: ScheduledChunk) -> None:
        """Move a chunk's request to the end of the chunk. A chunk that leaves tokens over samples nothing."""
        request, end = chunk.request, chunk.start + chunk.num_tokens
        samples = end >= len(request.token_ids) + request.num_output_placeholders
        is_prefill = request.is_prefill
        if is_prefill or not samples:
            chunk.samples, request.is_prefill = samples, not samples
            if not samples:
                chunk.arm = "intermediate"
            chunk.num_recomputed_tokens = max(0, min(end, request.num_kv_lost) - chunk.start)
            if self.partial_prefills is not None:
                self.partial_prefills.num_computed += end - max(chunk.start, request.num_kv_computed)
        request.num_kv_computed = end
        if is_prefill or end >= request.block_boundary:
            self.kv_cache.cache_full_blocks(request, end)
        if self._is_async:
            request.num_in_flight_tokens += chunk.num_tokens
            if samples:
                request.num_output_placeholders += 1 + len(chunk.drafts)
                request.draft_token_ids = () if request.frugal else (-1,) * self._num_drafts

    def _make_room(self, batch: ScheduledBatch, budget: int, request: Request, num_blocks: int) -> int:
        """Preempt a running request, and take its chunk out of the batch if it has one already.

        Args:
            batch: The step that is being scheduled.
            budget: Tokens left in the budget.
            request: The running request that lacks blocks.
            num_blocks: The number of them.

        Returns:
            Tokens that go back to the budget.
        """
        victim, rule = self.order.victim(batch, budget)
        reason = Reason(
            "kv_blocks",
            "num_blocks",
            self.config.num_pool_blocks,
            num_blocks,
            self.num_free_blocks,
            rule=rule,
            requests=(request.request_id,),
            priority=victim.priority if rule == "priority" else None,
            text=repr(self.policy) if rule == "policy" else "",
        )
        refund = 0
        chunk = next((chunk for chunk in batch.chunks if chunk.request is victim), None)
        if chunk is not None:
            # vLLM 0.33 leaves the blocks that this chunk was going to fill in its prefix cache, from where the
            # victim would take KV that was never computed when it resumes.
            withdrawn = self.kv_cache.evict_newly_cached(chain.from_iterable(victim.block_tables))
            batch.withdrawn_block_ids += tuple(sorted(withdrawn))
            victim.num_kv_computed = chunk.start
            if self._is_async:
                victim.num_in_flight_tokens -= chunk.num_tokens
            refund = chunk.num_tokens
            if self.partial_prefills is not None and chunk.arm != "decode":
                self.partial_prefills.num_computed -= refund
            batch.unscheduled_block_ids[victim.request_id] = chunk.new_block_ids
            if chunk.other_groups:
                batch.unscheduled_changes[victim.request_id] = chunk.other_groups
            batch.chunks.remove(chunk)
        if len(self.queues.running) == 1 and not self.as_vllm:
            note_loss(victim)
        self._preempt(victim)
        batch.preempted += (victim.request_id,)
        batch.preempt_reasons[victim.request_id] = reason
        return refund

    def _preempt(self, victim: Request) -> None:
        """Take all blocks from a running request and let it wait; it keeps its output and computes it again."""
        self.kv_cache.free(victim)
        num_computed = min(victim.num_kv_computed, len(victim.token_ids))
        victim.num_kv_lost = max(victim.num_kv_lost, num_computed)
        victim.num_kv_computed = 0
        victim.is_prefill = True
        victim.reset_blocks(len(self.kv_cache.groups))  # new lists, because records refer to the old ones
        victim.num_preemptions += 1
        victim.draft_token_ids = ()
        victim.num_output_placeholders = 0
        victim.num_stale_output_tokens = victim.num_in_flight_tokens
        self.queues.preempt(victim)

    # -- update ----------------------------------------------------------------------------------------------

    def update(
        self, batch: ScheduledBatch, sampled: Sampled, *, finish: Mapping[str, FinishReason] = MappingProxyType({})
    ) -> ScheduledBatch:
        """Append the sampled tokens and end the requests that are done.

        With asynchronous scheduling the requests that end here appear in the record of the batch that was scheduled
        last, because this happens in its iteration.

        Args:
            batch: The oldest batch in flight; it is returned complete, for ``to_record()``.
            sampled: See `Sampled`; several tokens are the accepted drafts and the token after them.
            finish: Requests that end for a reason only the caller sees: "stop" after a stop string, or "error", which
                drops the tokens.

        Raises:
            ValueError: Another batch, or tokens that do not fit its chunks; nothing has changed then.
        """
        self._check_in_flight(batch)
        batch.check_outputs(sampled, finish)
        iteration, max_model_len, steps_ahead = self._in_flight[-1], self.max_model_len, self._steps_ahead
        for chunk, tokens in zip(batch.chunks, sampled):
            request = chunk.request
            if request.status == "finished":  # ended since schedule()
                chunk.discarded = True
                continue
            reason = finish.get(request.request_id) if finish else None
            if steps_ahead:
                taken = None if reason == "error" else tokens
                stops = self._take_output(
                    chunk, taken, iteration, self.kv_cache, max_model_len, is_async=self._is_async
                )
                reason = reason or stops
            elif tokens is not None and reason != "error":
                chunk.sampled = token = tokens if type(tokens) is int else only(tokens)
                token_ids = request.token_ids
                token_ids.append(token)
                length = len(token_ids)
                # check_stop(), whose call takes longer than this test.
                if length >= request.max_num_tokens or length >= max_model_len or token in request.stop_token_ids:
                    reason = reason or ("stop" if token in request.stop_token_ids else "length")
            if reason is not None:
                iteration.finish_reasons[request.request_id] = reason
                self._finish(request, reason)
        if self._refused:
            self._end_refused(iteration)
        if iteration.finish_reasons:
            self.queues.drop_finished()
        iteration.free_blocks_end = self.kv_cache.num_free_blocks
        change, newly_cached = self.kv_cache.take_change()
        iteration.pool_end = iteration.pool_end.then(change)
        if newly_cached:  # drafts and asynchronous steps: their tokens became known
            iteration.cached_block_ids += newly_cached
            iteration.num_cached_end += len(newly_cached)
        self._in_flight.popleft()
        return batch

    def _end_refused(self, iteration: ScheduledBatch) -> None:
        """End the requests whose grammars cannot be compiled in the iteration that found out, as vLLM does."""
        for request in self._refused:
            if request.status != "finished":
                iteration.finish_reasons[request.request_id] = "error"
                self._finish(request, "error")
        self._refused.clear()

    def set_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Give requests the drafts that their next chunk verifies; for synchronous scheduling, after ``update()``.

        This is where the proposer of a synchronous engine hands in its drafts. Asynchronous scheduling makes
        placeholders by itself (``ScheduledChunk.drafts``).

        Args:
            drafts: For each request up to ``num_speculative_tokens`` token ids. Requests that have ended, wait or are
                in the middle of their prompt are passed over.

        Raises:
            ValueError: Too many drafts, or drafts with asynchronous scheduling; nothing has changed then.
        """
        if drafts and self._is_async:
            raise ValueError("drafts cannot be set with async_scheduling: its drafts are placeholders until they run")
        for request_id, tokens in drafts.items():
            if len(tokens) > self._num_drafts:
                raise ValueError(
                    f"request {request_id!r} gets {len(tokens)} draft tokens, num_speculative_tokens allows "
                    f"{self._num_drafts}"
                )
        for request_id, tokens in drafts.items():
            request = self.queues.requests.get(request_id)
            if request is not None and request.status == "running" and not (request.is_prefill or request.frugal):
                request.draft_token_ids = tokens

    def fail(self, batch: ScheduledBatch) -> ScheduledBatch:
        """End every request of a batch whose forward pass raised; for all others nothing has happened.

        The blocks of the batch's requests come back, and those that they cached are evicted. A batch that was scheduled
        after it may read KV that was never written, so its requests end too; give it to ``update()`` all the same.

        Raises:
            ValueError: Not the oldest batch in flight.
        """
        self._check_in_flight(batch)
        for lost in self._in_flight:
            self.kv_cache.evict(lost.cached_block_ids)
        later = [chunk.request for lost in list(self._in_flight)[1:] for chunk in lost.chunks]
        errors: dict[str, FinishReason] = {chunk.request.request_id: "error" for chunk in batch.chunks}
        for request in later:
            if request.request_id not in errors and request.status != "finished":
                self._in_flight[-1].finish_reasons[request.request_id] = "error"
                self._finish(request, "error")
        return self.update(batch, [None] * len(batch.chunks), finish=errors)

    def _check_in_flight(self, batch: ScheduledBatch) -> None:
        if not self._in_flight or batch is not self._in_flight[0]:
            raise ValueError(f"batch of step {batch.step} is not in flight: give back what schedule() returned, once")

    # -- the state as a whole --------------------------------------------------------------------------------

    def peek_next_batch(self) -> tuple[bool, int]:
        """The choice that ``schedule()`` would make if it were called now; changes nothing.

        The answer is schedule()'s own, given on a copy of the state, so the two cannot differ. The copy is not needed
        when every running request decodes and there is room for all of them. Data-parallel ranks use it to agree on a
        step.

        Returns:
            Whether the step holds a prefill, and its number of tokens.

        Raises:
            RuntimeError: The tokens of the last step are still to come.
        """
        self._check_nothing_in_flight("peek_next_batch()")
        running = self.queues.running
        nobody_admitted = self.policy is None and (not self.queues.waiting or len(running) >= self.max_running)
        is_plain = nobody_admitted and not self._steps_ahead
        room = min(self._token_budget, self.num_free_blocks)  # a decode takes one token and needs no more than a block
        if is_plain and len(running) <= room and not any(request.is_prefill for request in running):
            return False, len(running)
        batch = self._rehearsal().schedule()
        return batch.has_prefill, batch.num_tokens

    def _rehearsal(self) -> Scheduler:
        """A scheduler in the same state that can be stepped without changing this one."""
        clone = copy.copy(self)
        clone._in_flight, clone._refused = deque(), []
        clone.queues, clone.kv_cache = self.queues.copy(), self.kv_cache.copy()
        clone.order = self.order.rehearsal(clone.queues, clone.kv_cache)
        if self.partial_prefills is not None:
            clone.partial_prefills = cast("PartialPrefills", clone.order)
        return clone

    def reconfigure(self, config: EngineConfig) -> None:
        """Apply another configuration from the next step; requests keep their progress and blocks.

        Raises:
            ValueError: A field differs that blocks in use, or steps in flight, depend on.
        """
        for name in _FIXED:
            old, new = getattr(self.config, name), getattr(config, name)
            if old != new:
                raise ValueError(f"{name} cannot change from {old} to {new} while the KV cache is in use")
        if config.policy != self.config.policy:
            self.queues.reorder(config.policy)
        self._configure(config)
        self.kv_cache.configure(config)

    def keyframe(self) -> Keyframe:
        """The scheduler's memory before its next step, with which a trace can begin."""
        from workbench.trace.lines import Keyframe

        pool, running = self.kv_cache.block_pool, self.queues.running
        return Keyframe(
            step=self.step,
            block_tables={request.request_id: tuple(request.block_table) for request in running},
            other_tables={
                request.request_id: tuple([tuple(table) for table in request.block_tables[1:]]) for request in running
            }
            if len(self.kv_cache.groups) > 1
            else EMPTY,
            num_kv_computed={request.request_id: request.num_kv_computed for request in running},
            free_block_ids=tuple(pool.free_queue),
            cached_block_ids=tuple(sorted(pool.cached_blocks)),
        )


_FIXED = (
    "block_size",
    "num_blocks",
    "async_scheduling",
    "num_speculative_tokens",
    "speculative",
    "kv_cache_groups",
    "prefix_cache_retention_interval",
    "second_tier",
)
"""Fields that blocks in use, or steps in flight, depend on."""
