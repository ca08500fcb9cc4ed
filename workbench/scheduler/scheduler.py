"""The scheduler: chooses the tokens of the next step, and takes in the results of the last one.

Pure Python. The rules are vLLM 0.33's V1 scheduler, synchronous or asynchronous, with and without speculative decoding,
and its decisions are the same down to the block ids. There are no prefill and decode phases: every request simply has
tokens that are known and tokens whose KV is computed, and a step moves the second number towards the first.

Two features let the second number run ahead of the first (`workbench.scheduler.in_flight`):

- Speculative decoding: the draft tokens of a request count as tokens to compute. ``update()`` takes back the rejected
  ones; their KV blocks stay with the request, and their KV is overwritten.
- Asynchronous scheduling: while a step is computed the next one is scheduled, with placeholders for the tokens that it
  will give. An end that comes with the earlier step is found out too late for the later one, whose output is discarded.

They and all other features are links of a chain over the order of service, which this file asks at named places: see
`workbench.scheduler.queues.ServiceOrder` for the places and `workbench.scheduler.chain` for the links.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from workbench.scheduler.batch import Sampled, ScheduledBatch, ScheduledChunk
from workbench.scheduler.chain import links_of, make_order, needed_for, with_links
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.queues import Plan, Queues, ServiceOrder
from workbench.scheduler.request import FinishReason, Request
from workbench.trace.fields import EMPTY
from workbench.trace.reasons import Reason
from workbench.trace.records import Arm, TableChange

if TYPE_CHECKING:
    from workbench.config import EngineConfig
    from workbench.scheduler.policy import SchedulingPolicy
    from workbench.scheduler.second_tier import SecondTier, TransferOrder
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
        order: The order of service: vLLM's or a policy's, with the features that are on laid over it.
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
        self.clock = clock
        self._in_flight: deque[ScheduledBatch] = deque()
        self._linked: set[str] = set()  # kinds of links that requests have needed
        self.order = ServiceOrder(config, self.queues, self.kv_cache)
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
        self._use(make_order(self))

    def _use(self, order: ServiceOrder) -> None:
        """Ask this order from now on."""
        self.order = order
        self._max_in_flight = order.max_in_flight()
        # Tables that change before their step is recorded are copied.
        self._keeps_tables = self._max_in_flight > 1 or len(self.kv_cache.groups) > 1
        # A step asks for the room of every chunk: no call if nobody answers.
        self._room = None if getattr(order.room, "__func__", None) is ServiceOrder.room else order.room

    def _link(self, kinds: Collection[str]) -> None:
        """Lay further features over the order of service, if they are not there yet."""
        if not self._linked.issuperset(kinds):
            self._linked |= set(kinds)
            self._use(with_links(self, kinds))

    def __repr__(self) -> str:
        blocks = f"{self.num_free_blocks} of {self.config.num_pool_blocks - 1} KV blocks free"
        return f"Scheduler(step {self.step}: {self.num_running} running, {self.num_waiting} waiting, {blocks})"

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

    @property
    def second_tier(self) -> SecondTier | None:
        """The second tier of the prefix cache; None without one."""
        link = links_of(self.order).get("TransferOrder")
        return None if link is None else cast("TransferOrder", link).tier

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.queues.requests)

    def waits_for_grammars(self) -> bool:
        """Whether there are requests, and all of them wait for their grammars."""
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
        self.kv_cache.expect(request)
        if request.adapter or request.grammar is not None:
            self.prepare_for(request)
        self.queues.add(request)

    def prepare_for(self, request: Request) -> None:
        """Lay the features over the order of service that a request needs, not a configuration."""
        self._link(needed_for(request))
        self.order.arrived(request)

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
        """End a request and free its blocks."""
        self.queues.finish(request, reason)
        self.kv_cache.free(request, keep_cached=reason != "error")
        self.order.ended(request)

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
        if queues.waiting and not queues.running:  # perhaps nobody can be admitted any more
            self._rescue()
        budget = self.order.rest(batch, budget, self._advance, self._schedule_waiting)
        if queues.waiting:
            if batch.preempted:
                batch.explain_preemption()
            elif batch.waiting_reason is None:
                batch.waiting_reason = self._why_not_reached(batch, budget)
        batch.running, batch.waiting = queues.running_ids(), queues.waiting_ids()
        batch.free_blocks = batch.free_blocks_end = (
            kv_cache.num_free_blocks
        )  # in the first iteration nothing is updated
        batch.pool, batch.cached_block_ids = kv_cache.take_change()
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
        if num_requests <= 1 or not self.order.caps_chunks:
            return 0
        if self.config.long_prefill_token_threshold_adaptive:
            return max(cap, self.config.max_num_batched_tokens // num_requests)
        return cap

    def _schedule_running(self, batch: ScheduledBatch, budget: int) -> int:
        """Continue running requests in order of service, preempting when blocks run out.

        Returns:
            Tokens left in the budget.
        """
        chunks, room, max_model_len = batch.chunks, self._room, self.max_model_len
        for request in self.order.running_order(batch):
            if budget <= 0 or (room is not None and room(batch, budget) <= 0):
                break
            if request.status != "running":  # preempted for a request before it
                continue
            start = request.num_kv_computed
            num_wanted = len(request.token_ids) + request.num_ahead - start
            if num_wanted == 1 and start + 1 < max_model_len:  # no limit shortens the one token of a decode
                if start + 1 < request.block_boundary and not request.is_prefill:
                    # Inside its last block nothing else changes.
                    chunks.append(ScheduledChunk(request, start, 1, True, "decode"))
                    request.num_kv_computed = start + 1
                    budget -= 1
                    continue
                plan = Plan(request, start, budget, 1, 1)
            else:
                plan = self._limited(request, num_wanted, batch, budget)
                if plan.num_tokens <= 0:
                    continue
            budget = self._extend(plan, batch, budget)
        return budget

    def _limited(self, request: Request, num_wanted: int, batch: ScheduledBatch, budget: int) -> Plan:
        """The chunk of a running request in its prompt or with drafts."""
        start = request.num_kv_computed
        room = budget if self._room is None else self._room(batch, budget)
        plan = Plan(request, start, room, num_wanted, num_wanted)
        plan.longest = self.max_model_len - start - 1
        if not self.as_vllm:  # a prompt of a simulation may be longer than max_model_len
            plan.longest = max(plan.longest, len(request.token_ids) - start)
        self.order.limit_chunk(plan, batch)
        return plan

    def _extend(self, plan: Plan, batch: ScheduledBatch, budget: int) -> int:
        """Give a running request a chunk that needs or fills a block, is a part of its prompt, or has drafts.

        Returns:
            Tokens left in the budget.
        """
        request, kv_cache, start = plan.request, self.kv_cache, plan.start
        end = start + plan.num_tokens
        changes: Sequence[TableChange] = ()
        if end > request.block_boundary:
            removed = plan.removed or kv_cache.remove_skipped_blocks(request)
            while (allocated := kv_cache.allocate_slots(request, end, removed=removed)) is None:
                budget += self._make_room(batch, budget, request, kv_cache.num_new_blocks(request, end))
                if request.status != "running":
                    return budget
            changes = allocated
        chunk = ScheduledChunk(request, start, plan.num_tokens, True, "decode", None, plan.limited_by)
        if changes:
            chunk.new_block_ids, chunk.removed = changes[0].new_block_ids, changes[0].removed
            if len(changes) > 1:
                chunk.other_groups = tuple(changes[1:])
        if request.is_prefill:
            chunk.arm, batch.prefill_continued = "cached_final", True
        self.order.continued(plan, chunk)
        batch.chunks.append(chunk)
        self._advance(chunk)
        return budget - plan.num_tokens

    def _schedule_waiting(self, batch: ScheduledBatch, budget: int) -> int:
        """Admit waiting requests; no request overtakes one that does not fit.

        Returns:
            Tokens left in the budget.
        """
        queues, kv_cache, order = self.queues, self.kv_cache, self.order
        batch.waiting_reason = None
        for request in order.waiting_order(batch, budget, max(0, self.max_running - len(queues.running))):
            room = budget if self._room is None else self._room(batch, budget)
            if room <= 0 or len(queues.running) >= self.max_running:
                break
            plan = Plan.of_admission(request, kv_cache.get_computed_blocks(request), room)
            refusal = order.consider(plan, batch) or self._refuse(plan, batch)
            if refusal is None:
                budget -= self._admit(plan, batch)
                continue
            batch.passed_over[request.request_id] = refusal
            if not plan.may_be_overtaken:
                batch.waiting_reason = refusal.for_those_behind(request.request_id)
                break
        return budget

    def _refuse(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Find the length of an admission's first chunk; the reason if it has none, or no blocks."""
        assert plan.hit is not None
        return self.order.limit_chunk(plan, batch) or self.kv_cache.refuse(
            plan.request, plan.hit, plan.start + plan.num_tokens, others_run=bool(self.queues.running)
        )

    def _admit(self, plan: Plan, batch: ScheduledBatch) -> int:
        """Give a waiting request its blocks and its first chunk; returns the tokens of it."""
        request, start, num_tokens = plan.request, plan.start, plan.num_tokens
        self.kv_cache.allocate_slots(request, start + num_tokens, plan.hit)
        arm: Arm = "new_final"
        if request.status == "preempted":
            batch.resumed += (request.request_id,)
            arm = "cached_final"
        else:
            batch.admitted += (request.request_id,)
        batch.passed_over.pop(request.request_id, None)
        self.queues.admit(request)
        table, *others = map(tuple, request.block_tables)
        chunk = ScheduledChunk(request, start, num_tokens, True, arm, None, plan.limited_by, table, start)
        if others:
            chunk.other_groups = tuple(map(TableChange, others))
        self.order.admitted(plan, chunk)
        batch.chunks.append(chunk)
        self._advance(chunk)
        return num_tokens

    def _rescue(self) -> None:
        """From now on look for requests that would wait forever, unless vLLM's decisions are asked for."""
        if not self.as_vllm:
            self._link({"Frugal"})

    def _why_not_reached(self, batch: ScheduledBatch, budget: int) -> Reason:
        """The reason of the waiting requests that the admissions of a step did not come to."""
        if self.order.room(batch, budget) <= 0:
            return self._budget_spent
        if len(self.queues.running) >= self.max_running:
            return self._no_seat
        return self.order.not_reached()

    def _advance(self, chunk: ScheduledChunk) -> None:
        """Move a chunk's request to the end of the chunk. A chunk that leaves tokens over samples nothing."""
        request, end = chunk.request, chunk.start + chunk.num_tokens
        num_tokens = end - max(chunk.start, request.num_kv_computed)
        samples = end >= len(request.token_ids) + request.num_ahead
        is_prefill = request.is_prefill
        if is_prefill or not samples:
            chunk.samples, request.is_prefill = samples, not samples
            if not samples:
                chunk.arm = "intermediate"
            chunk.num_recomputed_tokens = max(0, min(end, request.num_kv_lost) - chunk.start)
        request.num_kv_computed = end
        if is_prefill or end >= request.block_boundary:
            self.kv_cache.cache_full_blocks(request, end)
        self.order.computed(chunk, num_tokens)

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
            withdrawn = self.kv_cache.evict_newly_cached(victim, chunk.start)
            batch.withdrawn_block_ids += tuple(sorted(withdrawn))
            victim.num_kv_computed = chunk.start
            refund = chunk.num_tokens
            self.order.computed(chunk, -refund)
            batch.unscheduled_block_ids[victim.request_id] = chunk.new_block_ids
            if chunk.other_groups:
                batch.unscheduled_changes[victim.request_id] = chunk.other_groups
            batch.chunks.remove(chunk)
        if len(self.queues.running) == 1:  # it loses them to itself
            self._rescue()
        self._preempt(victim)
        batch.preempted += (victim.request_id,)
        batch.preempt_reasons[victim.request_id] = reason
        return refund

    def _preempt(self, victim: Request) -> None:
        """Take all blocks from a running request and let it wait; it keeps its output and computes it again."""
        self.order.preempted(victim)
        self.kv_cache.free(victim)
        num_computed = min(victim.num_kv_computed, len(victim.token_ids))
        victim.num_kv_lost = max(victim.num_kv_lost, num_computed)
        victim.num_kv_computed = 0
        victim.is_prefill = True
        self.kv_cache.begin_tables(victim)  # new lists, because records refer to the old ones
        victim.num_preemptions += 1
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
        iteration = self._in_flight[-1]
        for request, reason in self.order.take_output(batch, sampled, finish, iteration):
            iteration.finish_reasons[request.request_id] = reason
            self._finish(request, reason)
        if iteration.finish_reasons:
            self.queues.drop_finished()
        iteration.free_blocks_end = self.kv_cache.num_free_blocks
        change, newly_cached = self.kv_cache.take_change()
        iteration.pool_end = iteration.pool_end.then(change)
        if newly_cached:  # their tokens became known
            iteration.cached_block_ids += newly_cached
            iteration.num_cached_end += len(newly_cached)
        self._in_flight.popleft()
        return batch

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
        self.order.set_drafts(drafts)

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
        is_plain = self.order.decodes_plainly and (not self.queues.waiting or len(running) >= self.max_running)
        room = min(self._token_budget, self.num_free_blocks)  # a decode takes one token and needs no more than a block
        if is_plain and len(running) <= room and not any(request.is_prefill for request in running):
            return False, len(running)
        batch = self._rehearsal().schedule()
        return batch.has_prefill, batch.num_tokens

    def _rehearsal(self) -> Scheduler:
        """A scheduler in the same state that can be stepped without changing this one."""
        clone = copy.copy(self)
        clone._in_flight, clone._linked = deque(), self._linked.copy()
        clone.queues, clone.kv_cache = self.queues.copy(), self.kv_cache.copy()
        clone._use(self.order.rehearsal(clone.queues, clone.kv_cache))
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
