"""Prompt chunks end at block boundaries when the state of recurrent layers is cached.

A state is written at the end of a chunk, so it can only be cached where a chunk ends.
"""

from __future__ import annotations

from workbench.config import EngineConfig
from workbench.scheduler.request import Request


class StateBoundaries:
    """Shortens prompt chunks so that they end at states that can be cached.

    Args:
        config: A configuration with a group of recurrent state, and with prefix caching.
        longest_chunk: Maximum number of tokens of a request in a step. vLLM takes the whole budget for it, and waits
            forever for the next state if the proposer of drafts has a row of the budget and the state needs that row.
    """

    def __init__(self, config: EngineConfig, longest_chunk: int) -> None:
        self._block_size = config.block_size
        threshold = config.long_prefill_token_threshold
        limit = threshold or config.token_budget
        self._longest_chunk = min(longest_chunk, limit)
        self._keeps_boundaries = self._block_size <= min(config.token_budget, limit)
        self._drops_last_block = config.speculation.drops_last_cached_block

    def shorten(self, request: Request, start: int, num_tokens: int) -> int:
        """Tokens of a chunk that begins at ``start``; 0 when no state can be reached."""
        size = self._block_size
        prompt_end = max(request.num_prompt_tokens, request.num_tokens - 1)  # a resumed request replays its output
        if start >= prompt_end:
            return num_tokens
        end = start + num_tokens
        if end < prompt_end:
            aligned = end // size * size
            next_end = min(prompt_end, (start // size + 1) * size)
            if aligned > start or (self._keeps_boundaries and next_end - start <= self._longest_chunk):
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
