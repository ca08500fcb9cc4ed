"""Requests that no schedule can serve: those for which the whole pool is too small, or one step too short.

A request is served best when it is alone: then all blocks are its own, and it may begin again from its first token
as often as it likes. Its blocks are counted as ``Request.frugal`` makes the scheduler use them, without drafts.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from workbench.base.field_checks import FieldError
from workbench.base.text import counted
from workbench.config import EngineConfig
from workbench.trace.kv_groups import KVCacheGroup


def check_servable(config: EngineConfig, num_prompt_tokens: int, max_tokens: int, name: str = "this request") -> None:
    """Refuse a request that no schedule can serve.

    Args:
        config: The configuration.
        num_prompt_tokens: Tokens of its prompt.
        max_tokens: Number of output tokens, unless ``max_model_len`` ends it before.
        name: The request in the message.

    Raises:
        ValueError: The message names the field that is too small, and the value that would do.
    """
    if not config.enable_chunked_prefill and num_prompt_tokens > config.longest_chunk:
        needed = num_prompt_tokens + config.max_num_batched_tokens - config.longest_chunk
        raise FieldError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is too small for {name}: a step computes "
            f"{config.longest_chunk} tokens of it, and with enable_chunked_prefill=False its prompt of "
            f"{num_prompt_tokens} tokens has to fit into one; raise the budget to {needed}, or turn chunked prefill on"
        )
    # The last token is returned and never fed to the model.
    num_computed = num_prompt_tokens + max_tokens - 1
    if config.max_model_len is not None:
        num_computed = max(num_prompt_tokens, min(num_computed, config.max_model_len - 1))
    if most_blocks(config.cache_groups, num_computed) <= config.num_usable_blocks:
        return
    needed = fewest_blocks(config, num_computed)
    ends = (
        f" (up to max_model_len={config.max_model_len:,})" if num_computed < num_prompt_tokens + max_tokens - 1 else ""
    )
    if needed > config.num_usable_blocks:
        raise FieldError(
            f"num_blocks={config.num_blocks} is too small for {name}: {counted(num_prompt_tokens, 'prompt token')} and "
            f"max_tokens={max_tokens}{ends} need {counted(needed, 'block')} of {config.block_size}, the pool has "
            f"{config.num_usable_blocks} ({config.num_usable_blocks * config.block_size:,} tokens): shorten the "
            f"prompt, lower max_tokens or raise num_blocks to {needed + 1}"
        )


def fewest_blocks(config: EngineConfig, num_tokens: int) -> int:
    """The smallest number of blocks with which a request that is alone can compute this many tokens."""
    groups, chunk = config.cache_groups, config.longest_chunk
    sizes = range(1, most_blocks(groups, num_tokens) + 1)
    return 1 + bisect_left(sizes, True, key=lambda num_blocks: _reaches(groups, chunk, num_tokens, num_blocks))


def most_blocks(groups: Sequence[KVCacheGroup], num_tokens: int, in_flight: int = 0) -> int:
    """Maximum number of blocks that a request of this many tokens holds at a time, over all KV cache groups.

    Args:
        groups: The groups.
        num_tokens: Tokens of the request.
        in_flight: Tokens that steps in flight compute together; 0 if they compute one at a time.
    """
    return sum(min(-(-num_tokens // group.block_size), _most_held(group, in_flight)) for group in groups)


def _most_held(group: KVCacheGroup, in_flight: int) -> int:
    if group.kind == "sliding_window":
        return -(-(group.sliding_window - 1 + in_flight) // group.block_size) + 1
    return 2 if group.kind == "mamba" else sys.maxsize  # the state that is read, and the one that is written


def _reaches(groups: Sequence[KVCacheGroup], chunk: int, num_tokens: int, num_blocks: int) -> bool:
    """Whether chunks as long as the blocks allow reach the last token: a later start never needs more blocks."""
    start = 0
    while start < num_tokens:
        ends = range(start + 1, min(start + chunk, num_tokens) + 1)
        num_fitting = bisect_right(ends, num_blocks, key=lambda end: _num_held(groups, start, end))
        if not num_fitting:
            return False
        start += num_fitting
    return True


def _num_held(groups: Sequence[KVCacheGroup], start: int, end: int) -> int:
    """Blocks that a request holds while it computes the tokens ``[start, end)``."""
    total = 0
    for group in groups:
        last = (end - 1) // group.block_size
        if group.kind == "mamba":  # the state that is read, and the one that is written
            total += 1 + (start > 0 and (start - 1) // group.block_size != last)
        else:
            window = group.sliding_window or end
            total += last + 1 - max(0, start - window + 1) // group.block_size
    return total
