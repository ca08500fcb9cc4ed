"""The scheduler: which tokens of which requests make up the next step, and what became of the last one.

Pure Python. The rules are vLLM 0.33's V1 scheduler (synchronous), and its decisions are the same down to the
block ids. There are no prefill and decode phases: every request simply has tokens that are known and tokens whose
KV is computed, and a step moves the second number towards the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from workbench.engine.config import EngineConfig
from workbench.engine.policy import SchedulingPolicy
from workbench.engine.request import Request
from workbench.engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from workbench.engine.step_completion import StepCompletion
from workbench.trace.records import LimitedBy

__all__ = ["ScheduledBatch", "ScheduledChunk", "Scheduler"]


class Scheduler(StepCompletion):
    """Chooses the tokens of each step.

    One step is ``batch = schedule()``, the forward pass, then ``update(batch, sampled)``, or ``fail(batch)`` where
    the forward pass raised.

    Args:
        config: Limits and policies.
        clock: Returns seconds since the start of the trace; stamps each step.
        policy: Decides order, chunk sizes and victims instead of vLLM's rules; None for those.

    Attributes:
        step: Index of the next step.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        super().__init__(config, policy)
        self.step = 0
        self._clock = clock

    def schedule(self) -> ScheduledBatch:
        """Choose the tokens of the next step and give them KV blocks.

        ``num_kv_computed`` of every chosen request advances here, before the forward pass has run.

        Raises:
            RuntimeError: The previous batch has been given to neither ``update()`` nor ``fail()``.
        """
        self._refuse_in_flight("schedule()")
        batch = ScheduledBatch(
            step=self.step,
            time=self._clock(),
            token_budget=self.config.token_budget,
            long_prefill_cap=self._long_prefill_cap(),
            arrived=tuple(self.arrived),
            aborted=tuple(self.aborted),
        )
        self.arrived.clear()
        self.aborted.clear()
        self.kv_cache.published.clear()
        budget = self._schedule_running(batch, batch.token_budget)
        if not batch.preempted:  # blocks were short for those who run: nobody is let in
            budget = self._schedule_waiting(batch, budget)
        if self.partial_prefills is not None:
            budget = self._use_up(batch, budget)
        if self.waiting:
            seats = "max_num_active_seqs" if self.config.max_num_active_seqs else "max_num_seqs"
            batch.explain_waiting(budget, f"{seats} reached ({self.max_running})")
        batch.running, batch.waiting = self.running_ids(), self.waiting_ids()
        batch.free_blocks = self.kv_cache.num_free
        batch.cached_block_ids = tuple(self.kv_cache.published)
        self.step += 1
        self._in_flight = batch
        return batch

    def peek_next_batch(self) -> tuple[bool, int]:
        """What the next ``schedule()`` would choose if it were called now; changes nothing.

        The answer is schedule()'s own, given on a copy of the state, so the two cannot differ. Only where every
        running request decodes and there is room for all of them is it plain without trying. Data-parallel ranks
        use it to agree on a step.

        Returns:
            Whether the step holds a prefill, and its number of tokens.

        Raises:
            RuntimeError: A step is under way, and its tokens are still to come.
        """
        self._refuse_in_flight("peek_next_batch()")
        running = self.running
        nobody_admitted = not self.waiting or len(running) >= self.max_running
        room = min(self.config.token_budget, self.kv_cache.num_free)  # a decode takes one token, at most one block
        as_usual = nobody_admitted and self.policy is None
        if as_usual and len(running) <= room and not any(request.is_prefill for request in running):
            return False, len(running)
        batch = self._rehearsal().schedule()
        return batch.has_prefill, batch.num_tokens

    def _refuse_in_flight(self, call: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step} is under way: call update() or fail() before {call}")

    def _long_prefill_cap(self) -> int:
        """Tokens of one request in this step at most; 0 for no cap. A request that is alone is never capped."""
        cap = self.config.long_prefill_token_threshold
        num_requests = len(self.running) + len(self.waiting)
        if cap == 0 or num_requests <= 1 or self.partial_prefills is not None:
            return 0
        if self.config.long_prefill_token_threshold_adaptive:
            return max(cap, self.config.max_num_batched_tokens // num_requests)
        return cap

    def _schedule_running(self, batch: ScheduledBatch, budget: int) -> int:
        """Continue running requests in order of admission, preempting when blocks run out.

        Returns:
            What is left of the token budget.
        """
        chunks, kv_cache = batch.chunks, self.kv_cache
        block_size, max_model_len = self.config.block_size, self.max_model_len
        for request in self._running_order(batch):
            if budget <= 0:
                break
            start = request.num_kv_computed
            if not request.is_prefill and start % block_size:
                # By far the most frequent: a decode whose last block has room. Nothing to limit or allocate.
                request.num_kv_computed = start + 1
                if (start + 1) % block_size == 0:
                    kv_cache.publish_full_blocks(request, start + 1)
                chunks.append(ScheduledChunk(request, start, 1, "decode"))
                budget -= 1
                continue
            if request.status != "running":  # preempted for one before it
                continue
            num_tokens, limited_by = self._chunk_size(
                request, request.num_tokens - start, batch, budget, max_model_len - start - 1
            )
            if num_tokens <= 0:
                continue
            num_new_blocks = kv_cache.num_new_blocks(request, start + num_tokens)
            while num_new_blocks > kv_cache.num_free and request.status == "running":
                victim = self._victim(batch, budget)
                blocks = "block" if num_new_blocks == 1 else "blocks"
                reason = f"{request.request_id} needs {num_new_blocks} more KV {blocks}, {kv_cache.num_free} free"
                budget += self._preempt_for(reason, victim, batch)
            if request.status == "running":
                new_block_ids = kv_cache.allocate(request, start + num_tokens)
                arm = "cached_final" if request.is_prefill else "decode"
                self._append_chunk(
                    batch, ScheduledChunk(request, start, num_tokens, arm, limited_by, new_block_ids=new_block_ids)
                )
                budget -= num_tokens
        return budget

    def _schedule_waiting(self, batch: ScheduledBatch, budget: int) -> int:
        """Admit from the head of the waiting queue; nobody overtakes a head that does not fit.

        Returns:
            What is left of the token budget.
        """
        kv_cache, limits = self.kv_cache, self.partial_prefills
        batch.waiting_reason = ""
        for request in self._waiting_order(batch, budget):
            if budget <= 0 or len(self.running) >= self.max_running:
                break
            request_id = request.request_id
            hits = kv_cache.find_cached_blocks(request)
            start = len(hits) * self.config.block_size
            num_uncached = request.num_tokens - start
            if limits is not None and (refusal := limits.refuse(request, num_uncached, budget)):
                batch.passed_over[request_id] = refusal.reason
                if refusal.may_be_overtaken:
                    continue
                batch.waiting_reason = f"waiting behind {request_id}: {refusal.reason}"
                break
            if not self.config.enable_chunked_prefill and num_uncached > budget:
                reason = f"{num_uncached} tokens in one step, {budget} of the token budget left"
                batch.passed_over[request_id] = reason
                batch.waiting_reason = f"waiting behind {request_id}: {reason}"
                break
            num_tokens, limited_by = self._chunk_size(request, num_uncached, batch, budget)
            shortage = kv_cache.shortage(request, hits, start + num_tokens, others_run=bool(self.running))
            if shortage:
                batch.passed_over[request_id] = shortage
                batch.waiting_reason = f"waiting behind {request_id}: {shortage}"
                break
            kv_cache.take_cached_blocks(request, hits)
            kv_cache.allocate(request, start + num_tokens)
            resumed = request.status == "preempted"
            (batch.resumed if resumed else batch.admitted).append(request_id)
            batch.passed_over.pop(request_id, None)
            if limits is not None:
                limits.admit(request, num_uncached)
            self._admit(request)
            self._append_chunk(
                batch,
                ScheduledChunk(
                    request,
                    start,
                    num_tokens,
                    "cached_final" if resumed else "new_final",
                    limited_by,
                    new_block_ids=tuple(request.block_table),
                    num_cached_tokens=start,
                ),
            )
            budget -= num_tokens
        return budget

    def _use_up(self, batch: ScheduledBatch, budget: int) -> int:
        """Give what shares left over to the prompts that can use more, and to newcomers once those are through.

        Returns:
            What is left of the token budget.
        """
        while budget > 0:
            left = self._lengthen_chunks(batch, budget)
            if left in (0, budget) or batch.preempted:
                return left
            budget = self._schedule_waiting(batch, left)
        return budget

    def _lengthen_chunks(self, batch: ScheduledBatch, budget: int) -> int:
        """Lengthen the chunks that their share cut, evenly, as far as budget and free blocks reach.

        Returns:
            What is left of the token budget.
        """
        kv_cache, block_size = self.kv_cache, self.config.block_size
        cut = [chunk for chunk in batch.chunks if chunk.limited_by == "partial_prefill_slot"]
        progress = True
        while cut and budget > 0 and progress:
            share, progress = max(1, budget // len(cut)), False
            for chunk in cut:
                request, end = chunk.request, chunk.start + chunk.num_tokens
                held = (len(request.block_table) + kv_cache.num_free) * block_size
                num_tokens = min(share, budget, request.num_tokens - end, held - end, self.max_model_len - end - 1)
                if num_tokens <= 0:
                    continue
                chunk.new_block_ids += kv_cache.allocate(request, end + num_tokens)
                chunk.num_tokens += num_tokens
                budget -= num_tokens
                progress = True
                self._settle_chunk(chunk)
                if chunk.samples:
                    chunk.limited_by = "complete"
                    chunk.arm = "new_final" if request.request_id in batch.admitted else "cached_final"
            cut = [chunk for chunk in cut if not chunk.samples]
        if len(cut) == 1 and budget == 0:  # it has all that the others did not want
            cut[0].limited_by = "token_budget"
        return budget

    def _chunk_size(
        self, request: Request, remaining: int, batch: ScheduledBatch, budget: int, room: int = sys.maxsize
    ) -> tuple[int, LimitedBy]:
        """Tokens of a request to schedule, and which of the limits was the one that counted."""
        cap = batch.long_prefill_cap
        num_tokens, limited_by = remaining, "complete"
        if 0 < cap < num_tokens:
            num_tokens, limited_by = cap, "long_prefill_token_threshold"
        if self.partial_prefills is not None and self.partial_prefills.share < num_tokens:
            num_tokens, limited_by = self.partial_prefills.share, "partial_prefill_slot"
        if self.policy is not None:
            most = self.policy.max_chunk(request, self._view(batch, budget))
            if most is not None and most < num_tokens:
                num_tokens, limited_by = most, "policy"
        if budget < num_tokens:
            num_tokens, limited_by = budget, "token_budget"
        if room < num_tokens:
            num_tokens, limited_by = room, "max_model_len"
        return num_tokens, limited_by

    def _append_chunk(self, batch: ScheduledBatch, chunk: ScheduledChunk) -> None:
        """Put a chunk into the batch and move its request on."""
        batch.chunks.append(chunk)
        self._settle_chunk(chunk)

    def _settle_chunk(self, chunk: ScheduledChunk) -> None:
        """Move a chunk's request on to its end. A chunk that leaves tokens over samples nothing."""
        request, end = chunk.request, chunk.start + chunk.num_tokens
        chunk.samples = end >= request.num_tokens
        if not chunk.samples:
            chunk.arm = "intermediate"
        chunk.num_recomputed_tokens = max(0, min(end, request.num_kv_lost) - chunk.start)
        if self.partial_prefills is not None and chunk.arm != "decode":
            self.partial_prefills.num_computed += end - max(chunk.start, request.num_kv_computed)
        request.num_kv_computed = end
        request.is_prefill = not chunk.samples
        self.kv_cache.publish_full_blocks(request, end)

    def _preempt_for(self, reason: str, victim: Request, batch: ScheduledBatch) -> int:
        """Preempt a request, and take it out of the batch if it is there already.

        Returns:
            Tokens that go back to the budget.
        """
        refund = 0
        for index, chunk in enumerate(batch.chunks):
            if chunk.request is victim:
                # vLLM 0.33 leaves the blocks that this chunk was going to fill in its prefix cache, from where the
                # victim would take KV that was never computed when it resumes.
                self.kv_cache.withdraw(victim.block_table)
                victim.num_kv_computed = chunk.start
                refund = chunk.num_tokens
                if self.partial_prefills is not None and chunk.arm != "decode":
                    self.partial_prefills.num_computed -= refund
                if chunk.new_block_ids:
                    batch.unscheduled_block_ids[victim.request_id] = chunk.new_block_ids
                del batch.chunks[index]
                break
        self._preempt(victim)
        rule = "last admitted" if self.config.policy == "fcfs" else f"lowest priority ({victim.priority})"
        if self.policy is not None:
            rule = f"chosen by {self.policy.policy!r}"
        batch.preempted.append(victim.request_id)
        batch.preempt_reasons[victim.request_id] = f"{reason}; {rule}"
        return refund
