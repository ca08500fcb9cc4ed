"""Requests that wait forever in vLLM 0.33.0, and are served frugally here (docs/limits.md).

A frugal request is computed without drafts and in chunks for which blocks are free. It is one that nothing else admits
although nothing runs, or one that keeps losing its blocks to itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.scheduler.kv_cache_groups import PrefixHit
    from workbench.scheduler.kv_cache_manager import KVCacheManager
    from workbench.scheduler.request import Request


def starving(waiting: Iterable[Request]) -> Request | None:
    """The head of the queue, if serving it frugally may help; ``waiting`` is in order of service and nothing runs."""
    head = next((request for request in waiting if request.grammar is None or request.grammar.is_ready), None)
    return None if head is None or head.frugal or head.num_stale_output_tokens else head


def note_loss(request: Request) -> None:
    """Note that a request loses its blocks to itself. The second time in vain makes it frugal.

    The prefix cache may still help the second time.
    """
    reached = (len(request.token_ids), request.num_kv_computed)
    request.num_lost_in_vain = request.num_lost_in_vain + 1 if reached <= request.furthest else 0
    request.furthest = max(reached, request.furthest)
    request.frugal |= request.num_lost_in_vain == 2


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
