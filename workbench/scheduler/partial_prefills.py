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
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from workbench.config import EngineConfig
from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.queues import Queues, ServiceOrder
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason, Rule
from workbench.trace.records import LimitedBy

OVERTAKING_SHARE = 0.07
"""Fraction of the work up to a long prompt's own end by which later prompts may put it off.

A time to first token that is at most a tenth worse than without limits leaves three hundredths for what short prompts
take of the budget while it is being computed.
"""

MAX_SCANNED = 1024
"""Maximum number of waiting requests considered in a step, so that its cost is bounded for any length of the queue."""


class PartialPrefills(ServiceOrder):
    """Shares and slots of the prompts in progress: an order of service laid over another one.

    Args:
        config: A configuration with at least one of the two limits on.
        queues: The requests.
        kv_cache: Their KV blocks.
        order: The order that the limits are laid over.
        num_computed: Prefill tokens scheduled so far.

    Attributes:
        share: Tokens of one prompt in the first round of this step.
        num_computed: Prefill tokens scheduled so far in all: the clock by which overtaking is measured.
    """

    def __init__(
        self,
        config: EngineConfig,
        queues: Queues,
        kv_cache: KVCacheManager,
        order: ServiceOrder,
        num_computed: int = 0,
    ) -> None:
        super().__init__(config, queues, kv_cache)
        self.share = sys.maxsize
        self.num_computed = num_computed
        self._order = order
        self._budget = config.token_budget
        self._max_num = config.max_num_partial_prefills
        self._max_long = config.max_long_partial_prefills
        self._long_threshold = config.long_prefill_token_threshold or config.token_budget
        self._in_progress: list[Request] = []
        self._long: list[Request] = []
        self._projected = 0
        self._slack = sys.maxsize

    def rehearsal(self, queues: Queues, kv_cache: KVCacheManager) -> Self:
        """The same limits over a copy of the queues and of the KV blocks."""
        clone = super().rehearsal(queues, kv_cache)
        clone._order = self._order.rehearsal(queues, kv_cache)
        return clone

    def running_order(self, batch: ScheduledBatch) -> Sequence[Request]:
        """Count the prompts in progress and fix their share.

        Returns:
            The running requests, prompts in progress first: a budget full of decodes leaves them their share.
        """
        order, running = self._order.running_order(batch), self.queues.running
        if len(order) < len(running):  # a policy may let decodes wait, not prompts in progress
            chosen = set(map(id, order))
            order = [*order, *(r for r in running if r.is_prefill and id(r) not in chosen)]
        self._in_progress = [request for request in order if request.is_prefill]
        self._long = [request for request in self._in_progress if self._is_long(_num_left(request))]
        if self._max_num is None:
            return list(order)
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

    def limit_chunk(
        self, request: Request, num_tokens: int, limited_by: LimitedBy, batch: ScheduledBatch, budget: int
    ) -> tuple[int, LimitedBy]:
        """Shorten a chunk to the share of one prompt."""
        if self.share < num_tokens:
            num_tokens, limited_by = self.share, "partial_prefill_slot"
        return self._order.limit_chunk(request, num_tokens, limited_by, batch, budget)

    def victim(self, batch: ScheduledBatch, budget: int) -> tuple[Request, Rule]:
        """The victim of the order below."""
        return self._order.victim(batch, budget)

    def refuse(self, request: Request, num_uncached: int, budget: int) -> Reason | None:
        """Whether the next waiting request has to wait on; None when it may be admitted.

        Args:
            request: The next of the queue.
            num_uncached: Its tokens that are not in the prefix cache.
            budget: Tokens left in the budget.
        """
        if self._max_long is not None and self._is_long(num_uncached) and self._num(self._long) >= self._max_long:
            self._pass_over(request, num_uncached)
            return self._full("max_long_partial_prefills", self._max_long, "long_prompt", self._long)
        stays_partial = num_uncached > min(budget, self.share)
        if self._max_num is not None and stays_partial and self._num(self._in_progress) >= self._max_num:
            return self._full("max_num_partial_prefills", self._max_num, "", self._in_progress)
        if num_uncached > self._slack:
            limit = "max_long_partial_prefills"
            return Reason("partial_prefills", limit, self._max_long, num_uncached, self._slack, rule="overtaken")
        return None

    @staticmethod
    def _full(limit: str, value: int, rule: Rule, in_progress: Sequence[Request]) -> Reason:
        """The reason for which a prompt has no slot: those that take them are in progress."""
        names = tuple([request.request_id for request in in_progress if request.is_prefill])
        return Reason("partial_prefills", limit, value, 1, 0, rule=rule, requests=names)

    def admit(self, request: Request, num_uncached: int) -> None:
        """Take note of a request that is admitted, before its first chunk is."""
        request.overtaking_limit = None
        self._projected += num_uncached
        self._slack -= num_uncached
        self._in_progress.append(request)
        if self._is_long(num_uncached):
            self._long.append(request)

    def use_up(
        self,
        batch: ScheduledBatch,
        budget: int,
        advance: Callable[[ScheduledChunk], None],
        admit: Callable[[ScheduledBatch, int], int],
    ) -> int:
        """Give what shares left over to the prompts that can use more, then to newcomers once those are complete.

        Args:
            batch: The step that is being scheduled.
            budget: Tokens left in the budget.
            advance: Moves a chunk's request to the end of the chunk.
            admit: Admits waiting requests and returns what is left of the budget.

        Returns:
            Tokens left in the budget.
        """
        while budget > 0:
            left = self._lengthen_chunks(batch, budget, advance)
            if left in (0, budget) or batch.preempted:
                return left
            budget = admit(batch, left)
        return budget

    def _lengthen_chunks(self, batch: ScheduledBatch, budget: int, advance: Callable[[ScheduledChunk], None]) -> int:
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
