"""Concurrent partial prefills: short prompts complete while long ones are being computed, at no cost to others.

Three fields of EngineConfig control it; with both limits at None nothing here runs and the scheduler is vLLM V1's.

- ``max_num_partial_prefills``: prompts that are guaranteed to progress in every step. The tokens that decodes leave in
  the budget are shared evenly by the prompts in progress and those that may join them. A prompt beyond that number is
  admitted only if it fits whole into the rest.
- ``max_long_partial_prefills``: the number of prompts in progress that may be long. The limit acts at admission and
  nowhere else: a prompt that holds KV blocks progresses in every step until it is done.
- ``long_prefill_token_threshold``: a prompt is long while more than this many tokens are neither in the prefix cache
  nor computed; 0 stands for the token budget. With a limit on, the threshold classifies and caps nothing.

No token is wasted: a prompt that needs less than its share leaves the rest to the others in the same step, so a long
prompt that is alone gets the whole budget.

A long prompt that finds the long slots taken is passed over: it keeps its place and later prompts may overtake it. It
can be overtaken only so far, and the bound is one of work, not of time. When a prompt is first passed over, the
prefill tokens in front of it and its own say when its turn would have ended in first-come-first-served order. Later
prompts may put that off by ``OVERTAKING_SHARE`` of those tokens, or by a quarter of a step's budget if that is more.
A prompt that would put it off further waits behind it. So no long prompt waits for its turn much longer than it would
have in first-come-first-served order, for any arrivals.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Self

from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk
from workbench.scheduler.chain import OrderOver, Owner
from workbench.scheduler.queues import Admit, Advance, Plan, ServiceOrder
from workbench.scheduler.request import Request
from workbench.trace.reasons import UNKNOWN, Reason, Rule

OVERTAKING_SHARE = 0.07
"""Fraction of the work up to a long prompt's own end by which later prompts may put it off.

A time to first token that is at most a tenth worse than without limits leaves three hundredths for what short prompts
take of the budget while it is being computed.
"""

MAX_SCANNED = 1024
"""Maximum number of waiting requests considered in a step, so that its cost is bounded for any length of the queue."""


class PartialPrefills(OrderOver):
    """Shares and slots of the prompts in progress; the configuration has at least one of the two limits on.

    Attributes:
        share: Tokens of one prompt in the first round of this step.
        num_computed: Prefill tokens scheduled so far in all: the clock by which overtaking is measured.
    """

    caps_chunks = False

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        config = self.config
        self.share = sys.maxsize
        self.num_computed = 0
        self._budget = config.token_budget
        self._max_num = config.max_num_partial_prefills
        self._max_long = config.max_long_partial_prefills
        self._long_threshold = config.long_prefill_token_threshold or config.token_budget
        self._in_progress: list[Request] = []
        self._long: list[Request] = []
        self._projected = 0
        self._slack = sys.maxsize

    def carry_on(self, before: Self) -> None:
        """The same clock."""
        self.num_computed = before.num_computed

    def running_order(self, batch: ScheduledBatch) -> Sequence[Request]:
        """Count the prompts in progress and fix their share.

        Returns:
            The running requests, prompts in progress first: a budget full of decodes leaves them their share.
        """
        order, running = list(self._order.running_order(batch)), self.queues.running
        if len(order) < len(running):  # a policy may let decodes wait, not prompts in progress
            chosen = set(map(id, order))
            order += [r for r in running if r.is_prefill and id(r) not in chosen]
        self._in_progress = [request for request in order if request.is_prefill]
        self._long = [request for request in self._in_progress if self._is_long(_num_left(request))]
        if self._max_num is None:
            return order
        num_seats = max(0, (self.config.max_num_active_seqs or self.config.max_num_seqs) - len(running))
        num_prompts = len(self._in_progress)
        num_joining = min(num_seats, len(self.queues.waiting))
        num_shares = max(num_prompts, min(self._max_num, num_prompts + num_joining), 1)
        for_prompts = max(num_prompts, self._budget - (len(order) - num_prompts))
        self.share = max(1, for_prompts // num_shares)
        return [*self._in_progress, *(request for request in order if not request.is_prefill)]

    def waiting_order(self, batch: ScheduledBatch, budget: int, num_seats: int) -> Iterable[Request]:
        """Waiting requests in the order of admission, as many as one step may look at."""
        self._in_progress = [request for request in self._in_progress if request.is_prefill]
        self._long = [request for request in self._long if request.is_prefill]
        self._projected = self.num_computed + sum(map(_num_left, self._in_progress))
        self._slack = sys.maxsize
        return self._order.waiting_order(batch, budget, MAX_SCANNED)

    def limit_chunk(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Shorten a chunk to the share of one prompt."""
        plan.limit(self.share, "partial_prefill_slot")
        return self._order.limit_chunk(plan, batch)

    def consider(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Refuse a request that finds no slot, or that would overtake another one too far."""
        request, num_uncached = plan.request, plan.num_uncached
        if self._max_long is not None and self._is_long(num_uncached) and self._num(self._long) >= self._max_long:
            self._pass_over(request, num_uncached)
            plan.may_be_overtaken = True
            return self._full("max_long_partial_prefills", self._max_long, "long_prompt", self._long)
        stays_partial = num_uncached > min(plan.room, self.share)
        if self._max_num is not None and stays_partial and self._num(self._in_progress) >= self._max_num:
            return self._full("max_num_partial_prefills", self._max_num, "", self._in_progress)
        if num_uncached > self._slack:
            limit = "max_long_partial_prefills"
            return Reason("partial_prefills", limit, self._max_long, num_uncached, self._slack, rule="overtaken")
        return self._order.consider(plan, batch)

    @staticmethod
    def _full(limit: str, value: int, rule: Rule, in_progress: Sequence[Request]) -> Reason:
        """The reason for which a prompt has no slot: those that take them are in progress."""
        names = tuple([request.request_id for request in in_progress if request.is_prefill])
        return Reason("partial_prefills", limit, value, 1, 0, rule=rule, requests=names)

    def admitted(self, plan: Plan, chunk: ScheduledChunk) -> None:
        """Give a request its slot."""
        request, num_uncached = plan.request, plan.num_uncached
        request.overtaking_limit = None
        self._projected += num_uncached
        self._slack -= num_uncached
        self._in_progress.append(request)
        if self._is_long(num_uncached):
            self._long.append(request)
        self._order.admitted(plan, chunk)

    def computed(self, chunk: ScheduledChunk, num_tokens: int) -> None:
        """Let the clock run."""
        if chunk.arm != "decode":
            self.num_computed += num_tokens
        self._order.computed(chunk, num_tokens)

    def not_reached(self) -> Reason:
        """As many as a step may look at were looked at."""
        reason = self._order.not_reached()
        return Reason("partial_prefills", rule="not_considered") if reason is UNKNOWN else reason

    def rest(self, batch: ScheduledBatch, budget: int, advance: Advance, admit: Admit) -> int:
        """Give what shares left over to the prompts that can use more, then to newcomers once those are complete."""
        budget = self._order.rest(batch, budget, advance, admit)
        while budget > 0:
            left = self._lengthen_chunks(batch, budget, advance)
            if left in (0, budget) or batch.preempted:
                return left
            budget = admit(batch, left)
        return budget

    def _lengthen_chunks(self, batch: ScheduledBatch, budget: int, advance: Advance) -> int:
        """Lengthen the chunks that their share cut, evenly, as far as budget and free blocks reach.

        Returns:
            Tokens left in the budget.
        """
        kv_cache, block_size = self.kv_cache, self.config.block_size
        max_model_len = self.config.max_model_len or sys.maxsize
        cut = [chunk for chunk in batch.chunks if chunk.limited_by == "partial_prefill_slot"]
        progress = True
        while cut and budget > 0 and progress:
            share, progress = max(1, budget // len(cut)), False
            for chunk in cut:
                request, end = chunk.request, chunk.start + chunk.num_tokens
                held = (len(request.block_table) + kv_cache.num_free_blocks) * block_size
                num_tokens = min(share, budget, request.num_tokens - end, held - end, max_model_len - end - 1)
                if num_tokens <= 0:
                    continue
                for change in kv_cache.allocate_slots(request, end + num_tokens) or ():
                    chunk.new_block_ids += change.new_block_ids
                chunk.num_tokens += num_tokens
                budget -= num_tokens
                progress = True
                advance(chunk)
                if chunk.samples:
                    chunk.limited_by = "complete"
                    chunk.arm = "new_final" if request.request_id in batch.admitted else "cached_final"
            cut = [chunk for chunk in cut if not chunk.samples]
        if len(cut) == 1 and budget == 0:  # it has all that the others did not want
            cut[0].limited_by = "token_budget"
        return budget

    def _pass_over(self, request: Request, num_uncached: int) -> None:
        """Let later requests overtake this one as far as its limit allows."""
        self._projected += num_uncached
        if request.overtaking_limit is None:
            work = self._projected - self.num_computed
            request.overtaking_limit = self._projected + max(int(OVERTAKING_SHARE * work), self._budget // 4)
        self._slack = min(self._slack, request.overtaking_limit - self._projected)

    def _is_long(self, num_left: int) -> bool:
        return num_left > self._long_threshold

    @staticmethod
    def _num(requests: Sequence[Request]) -> int:
        """Number of them whose prompt is not complete."""
        return sum(request.is_prefill for request in requests)


def _num_left(request: Request) -> int:
    return request.num_tokens - request.num_kv_computed
