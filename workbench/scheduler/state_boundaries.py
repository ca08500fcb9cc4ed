"""Chunks of prompts that end where a recurrent state can be cached."""

from __future__ import annotations

from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.chain import OrderOver, Owner
from workbench.scheduler.queues import Plan, ServiceOrder, over_budget
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason


class StateBoundaries(OrderOver):
    """Shortens prompt chunks so that they end at states that can be cached.

    A state is written at the end of a chunk, so it can only be cached where a chunk ends.
    """

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        config = self.config
        self._block_size = config.block_size
        limit = config.long_prefill_token_threshold or config.token_budget
        # vLLM takes the whole budget for the longest chunk of a request, and waits forever for the next state if the
        # proposer of drafts has a row of the budget and the state needs that row.
        self._longest_chunk = min(config.token_budget if scheduler.as_vllm else config.longest_chunk, limit)
        self._keeps_boundaries = self._block_size <= min(config.token_budget, limit)
        self._drops_last_block = config.speculation.drops_last_cached_block

    def limit_chunk(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Shorten a chunk to a state; the prompt of a request with a single state is one chunk, whatever the order."""
        if plan.request.frugal:
            plan.limit_to_step()
            return None
        refusal = self._order.limit_chunk(plan, batch)
        plan.limit(self.shorten(plan.request, plan.start, plan.num_tokens, plan.steady), "state_boundary")
        if plan.num_uncached == 1 and plan.num_tokens < plan.num_wanted:  # padding that does not fit is left out
            plan.num_wanted, plan.num_tokens = 1, min(plan.num_tokens, 1)
        if plan.num_tokens <= 0:
            return over_budget(self.config, plan.num_wanted, plan.room, kind="state_boundary")
        return refusal

    def shorten(self, request: Request, start: int, num_tokens: int, longest: int) -> int:
        """Tokens of a chunk that begins at ``start``; 0 to wait for a step with room up to the next state.

        Args:
            request: Its request.
            start: Its first position.
            num_tokens: The tokens that it may have.
            longest: The tokens that a policy allows in every step: a state further away is not waited for.
        """
        size = self._block_size
        prompt_end = max(request.num_prompt_tokens, request.num_tokens - 1)  # a resumed request replays its output
        if start >= prompt_end:
            return num_tokens
        end = start + num_tokens
        if end < prompt_end:
            aligned = end // size * size
            next_end = min(prompt_end, (start // size + 1) * size)
            if aligned > start or (self._keeps_boundaries and next_end - start <= min(self._longest_chunk, longest)):
                end = aligned
        if self._drops_last_block:
            last_state = max(0, request.num_tokens // size * size - size)
        else:
            last_state = (request.num_tokens - 1) // size * size
        stops = [last_state]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < request.shared_prefix_boundary < end:
            stops.append(start + (request.shared_prefix_boundary - start) // size * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(0, end - start)
