"""Rows of a step for drafts: those of a draft model, and those that fill up an admission with one token left."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk
from workbench.scheduler.chain import OrderOver, Owner
from workbench.scheduler.queues import Plan, ServiceOrder, over_budget
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason


class DraftRows(OrderOver):
    """Leaves rows of a step to a draft model, and fills up batches of decodes with drafts."""

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        self._num_slots = self.config.speculation.num_draft_slots
        self._unused = self.config.max_num_batched_tokens - self.config.token_budget
        self._max_model_len = self.config.max_model_len or sys.maxsize
        self._as_vllm, self._any_continued = scheduler.as_vllm, False

    def waiting_order(self, batch: ScheduledBatch, budget: int, num_seats: int) -> Iterable[Request]:
        """Take note of whether anybody runs on."""
        self._any_continued = bool(batch.chunks)
        return self._order.waiting_order(batch, budget, num_seats)

    def room(self, batch: ScheduledBatch, budget: int) -> int:
        """The rest of the budget, less a draft model's rows, one per request."""
        room = self._order.room(batch, budget)
        return min(room, budget + self._unused - self._num_slots * (len(batch.chunks) + 1)) if self._num_slots else room

    def consider(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Add padding to an admission with one token left: it makes the batch one of equal decodes in vLLM."""
        refusal = self._order.consider(plan, batch)
        if plan.num_uncached != 1 or plan.request.frugal or not (self._any_continued or plan.start):
            return refusal
        num_drafts = self.config.num_speculative_tokens
        if not batch.prefill_continued and plan.start + 1 + num_drafts + 1 <= self._max_model_len:
            plan.num_wanted = plan.num_tokens = 1 + num_drafts
        if plan.num_wanted > plan.room and (self.queues.running or self._as_vllm):
            return over_budget(self.config, plan.num_wanted, plan.room, "padding_drafts")
        return refusal

    def admitted(self, plan: Plan, chunk: ScheduledChunk) -> None:
        """Give the padding to the chunk.

        Raises:
            RuntimeError: It was cut, and vLLM would die.
        """
        if plan.num_wanted > plan.num_uncached:
            if chunk.num_tokens < plan.num_wanted and self._as_vllm:
                raise RuntimeError("assert num_new_tokens == 1 + self.num_spec_tokens")
            chunk.drafts, chunk.is_padded = (-1,) * (chunk.num_tokens - plan.num_uncached), True
        self._order.admitted(plan, chunk)


class WholePrompts(OrderOver):
    """Lets a prompt wait until a step has room for all of it."""

    def consider(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Refuse a prompt that does not fit."""
        refusal = self._order.consider(plan, batch)
        if refusal is None and plan.num_wanted > plan.room and not plan.request.frugal:
            return over_budget(self.config, plan.num_uncached, plan.room, "whole_prompt")
        return refusal
