"""The output of a step with drafts, or of an asynchronous one: tokens are appended, and rejected drafts taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.scheduler.flight import Flight
from workbench.scheduler.request import FinishReason, Request

if TYPE_CHECKING:
    from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk
    from workbench.scheduler.kv_cache_manager import KVCacheManager


def flight_of(request: Request) -> Flight:
    """The part of a request that runs ahead; made when it is asked for first."""
    if request.flight is None:
        request.flight = Flight()
    return request.flight


def expect_drafts(request: Request, drafts: Sequence[int]) -> None:
    """Let the next chunk of a request verify drafts."""
    flight = flight_of(request)
    flight.drafts = drafts
    request.num_ahead = flight.placeholders + len(drafts)


def check_stop(request: Request, token: int, max_model_len: int) -> FinishReason | None:
    """Why a request ends with ``token``, its latest; None when it does not end.

    A stop token counts before a length limit, as in vLLM.
    """
    if token in request.stop_token_ids:
        return "stop"
    num_tokens = len(request.token_ids)
    if num_tokens >= request.max_num_tokens or num_tokens >= max_model_len:
        return "length"
    return None


def take_output(
    chunk: ScheduledChunk,
    sampled: int | Sequence[int] | None,
    last: ScheduledBatch,
    kv_cache: KVCacheManager,
    max_model_len: int,
    *,
    is_async: bool,
) -> FinishReason | None:
    """Append what a chunk gave and take back the drafts it rejected, with drafts or asynchronous scheduling.

    The output of a chunk that was scheduled before a preemption is stale: its tokens count, but nothing that the
    preemption has reset.

    Args:
        chunk: The chunk.
        sampled: Its token, or its tokens; None when there is none.
        last: The batch that was scheduled last.
        kv_cache: Caches the blocks that became full.
        max_model_len: The most tokens of a request.
        is_async: Whether steps are scheduled before the output of the one before is known.

    Returns:
        Why the request ends with these tokens; None when it does not.
    """
    request, flight = chunk.request, flight_of(chunk.request)
    is_stale = flight.stale > 0
    if is_async:
        flight.num_tokens -= chunk.num_tokens
        if is_stale:
            flight.stale -= chunk.num_tokens
    if not chunk.samples or sampled is None:
        return None
    tokens = (sampled,) if isinstance(sampled, int) else sampled
    chunk.num_accepted = max(0, len(tokens) - 1)
    num_rejected = len(chunk.drafts) - chunk.num_accepted
    if num_rejected and not is_stale:
        request.num_kv_computed -= num_rejected
        if is_async:
            _expect_fewer(request, flight, num_rejected)
            if (later := last.chunk_of(request)) is not None and later is not chunk:
                later.ahead += num_rejected
    reason: FinishReason | None = None
    num_appended = 0
    for token in tokens:
        request.token_ids.append(token)
        num_appended += 1
        if (reason := check_stop(request, token, max_model_len)) is not None:
            break
    if num_appended:
        chunk.sampled_before, chunk.sampled = tuple(tokens[: num_appended - 1]), tokens[num_appended - 1]
    if not is_stale:
        request.num_kv_computed -= len(tokens) - num_appended
        if is_async:
            _expect_fewer(request, flight, len(tokens))
        if request.status == "running":
            kv_cache.cache_full_blocks(request, request.num_kv_computed - flight.num_tokens)
    return reason


def _expect_fewer(request: Request, flight: Flight, num_tokens: int) -> None:
    flight.placeholders -= num_tokens
    request.num_ahead -= num_tokens
