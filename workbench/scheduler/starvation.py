"""Requests that wait forever in vLLM 0.33.0, and are served frugally here (docs/limits.md).

A frugal request is computed without drafts and in chunks for which blocks are free. It is one that nothing else admits
although nothing runs, or one that keeps losing its blocks to itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.chain import OrderOver, Owner
from workbench.scheduler.queues import Admit, Advance, Plan, Queues, ServiceOrder
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason

if TYPE_CHECKING:
    from workbench.scheduler.kv_cache_groups import PrefixHit
    from workbench.scheduler.kv_cache_manager import KVCacheManager


class Frugal(OrderOver):
    """Finds the requests that starve, and gives them chunks for which blocks are free."""

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        # For each request that lost its blocks to itself: the most tokens known, and computed, when it did, and the
        # times in a row that it had come no further.
        self._losses: dict[str, tuple[tuple[int, int], int]] = {}

    def carry_on(self, before: Self) -> None:
        """The same losses."""
        self._losses = before._losses

    def rehearsal(self, queues: Queues, kv_cache: KVCacheManager) -> Self:
        """The same order over copies."""
        clone = super().rehearsal(queues, kv_cache)
        clone._losses = self._losses.copy()
        return clone

    def running_order(self, batch: ScheduledBatch) -> Iterable[Request]:
        """Without a frugal request whose step in flight holds blocks that it does not need after that."""
        order = self._order.running_order(batch)
        if not self.config.async_scheduling:
            return order
        return (request for request in order if not (request.frugal and self._waits_for_blocks(request)))

    def _waits_for_blocks(self, request: Request) -> bool:
        if request.status != "running" or not request.num_in_flight_tokens:
            return False
        return not num_fitting(self.kv_cache, request, request.num_kv_computed, 1)

    def limit_chunk(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Shorten a frugal request's chunk to the free blocks."""
        refusal, request = self._order.limit_chunk(plan, batch), plan.request
        if not request.frugal or plan.num_tokens <= 0:
            return refusal
        others_run = True
        if plan.hit is not None:
            others_run = bool(self.queues.running)
        elif plan.start + plan.num_tokens > request.block_boundary:
            plan.removed = self.kv_cache.remove_skipped_blocks(request)
        else:
            return refusal
        fitting = num_fitting(self.kv_cache, request, plan.start, plan.num_tokens, plan.hit, others_run=others_run)
        plan.limit(max(1, fitting), "kv_blocks")
        return refusal

    def preempted(self, request: Request) -> None:
        """Note that a request loses its blocks to itself. The second time in vain makes it frugal.

        The prefix cache may still help the second time.
        """
        if len(self.queues.running) == 1:
            furthest, num_in_vain = self._losses.get(request.request_id, ((0, 0), 0))
            reached = (len(request.token_ids), request.num_kv_computed)
            num_in_vain = num_in_vain + 1 if reached <= furthest else 0
            self._losses[request.request_id] = max(reached, furthest), num_in_vain
            request.frugal |= num_in_vain == 2
        self._order.preempted(request)

    def rest(self, batch: ScheduledBatch, budget: int, advance: Advance, admit: Admit) -> int:
        """If nothing moves, serve the head of the queue frugally."""
        queues = self.queues
        nothing_moves = queues.waiting and not (queues.running or batch.preempted)
        if nothing_moves and (head := starving(self.waiting_order(batch, budget, 1))) is not None:
            head.frugal = True
            budget = admit(batch, budget)
        return self._order.rest(batch, budget, advance, admit)

    def ended(self, request: Request) -> None:
        """Forget its losses."""
        self._losses.pop(request.request_id, None)
        self._order.ended(request)


def starving(waiting: Iterable[Request]) -> Request | None:
    """The head of the queue, if serving it frugally may help; ``waiting`` is in order of service and nothing runs."""
    head = next((request for request in waiting if request.grammar is None or request.grammar.is_ready), None)
    return None if head is None or head.frugal or head.num_stale_output_tokens else head


def num_fitting(
    kv_cache: KVCacheManager,
    request: Request,
    start: int,
    num_tokens: int,
    hit: PrefixHit | None = None,
    *,
    others_run: bool = True,
) -> int:
    """The number of a chunk's ``num_tokens`` tokens that have room in the free blocks.

    Args:
        kv_cache: The pool.
        request: The request of the chunk.
        start: Position of the chunk's first token.
        num_tokens: Tokens of the chunk.
        hit: The prefix hit of an admission; None for a running request.
        others_run: Whether other requests run while this one is admitted.
    """

    def lacks(count: int) -> bool:
        if hit is not None:
            return kv_cache.refuse(request, hit, start + count, others_run=others_run) is not None
        return kv_cache.num_new_blocks(request, start + count) > kv_cache.num_free_blocks

    return bisect_left(range(1, num_tokens + 1), True, key=lacks)
