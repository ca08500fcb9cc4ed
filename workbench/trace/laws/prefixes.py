"""The use of the prefix cache: full blocks can be found, and a request begins with the longest prefix that is cached.

A block that is missing in the cache makes no request wrong, only slower, so the law of content does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.laws.history import History
from workbench.trace.laws.known import Known
from workbench.trace.laws.state import Chunk, SchedulerState, Step, is_special


def check_prefixes(history: History, step: Step, state: SchedulerState) -> None:
    """Note what a step should have cached, or found in the prefix cache.

    Args:
        history: The run, with the step and with the prefix cache before it.
        step: A step that was just scheduled.
        state: The scheduler's state.
    """
    limits, cached, keys = history.limits, state.cached_blocks, state.block_keys
    if not limits.prefix_caching or cached is None or keys is None:
        return
    new = {*step.admitted, *step.resumed}
    for chunk in step.chunks:
        known = history.requests.get(chunk.request_id)
        if known is None or known.tokens is None or known.num_tokens is None:
            continue
        admitted = chunk.request_id in new
        if limits.is_plain:
            _published(history, known, chunk, cached, keys, admitted=admitted)
        if limits.writes_ahead:  # a drafter with its own KV moves the places at which a hit may end
            continue
        if not limits.is_plain:
            _kept(history, known, chunk, cached, keys)
        if admitted and not is_special(chunk):
            _found(history, known, chunk, state, cached, keys)


Keys = Callable[[Known, int, int], tuple[Sequence[bytes], int]]


def _is_cached(known: Known, group: int, place: int, cached: Mapping[int, bytes], keys: Keys) -> bool:
    """Whether a full block of a request is cached by its hash; True also if there is no block, or no hash yet."""
    table, (own, num_hashes) = known.tables[group], keys(known, group, place)
    return len(own) < num_hashes or place >= len(table) or cached.get(table[place]) == own[-1]


def _published(
    history: History, known: Known, chunk: Chunk, cached: Mapping[int, bytes], keys: Keys, *, admitted: bool
) -> None:
    """A block that is full of known tokens can be found from the step on that computes them."""
    size, num_tokens = history.limits.block_size, known.num_tokens or 0
    first, last = known.published, min(known.computed, num_tokens) // size
    if admitted:
        first = chunk.num_cached_tokens // size
    known.published = last
    for place in range(first, last):
        if not _is_cached(known, 0, place, cached, keys):
            what = f"its block {known.tables[0][place]} is full of known tokens, and is not in the prefix cache"
            return history.report("published", known.request_id, what)


def _kept(history: History, known: Known, chunk: Chunk, cached: Mapping[int, bytes], keys: Keys) -> None:
    """With several groups, or one of windows or states, the same prompt can begin at its last aligned place."""
    groups = history.limits.groups
    unit = math.lcm(*(group.block_size for group in groups))
    boundary = (known.num_prompt_tokens - 1) // unit * unit
    if not chunk.start < boundary <= known.computed:
        return
    for index, group in enumerate(groups):
        if group.kind == "mamba" and (known.num_output_tokens or is_special(chunk) or unit != group.block_size):
            continue  # chunks end at the blocks of states alone
        if group.kind == "mamba" and known.computed > boundary:
            what = f"its chunk passes position {boundary}, where the last state of its prompt can be cached"
            return history.report("kept", known.request_id, what)
        for place in _needed(group, boundary):
            if not _is_cached(known, index, place, cached, keys):
                what = f"a prompt like its own cannot begin at {boundary}: block {place} of group {index} is not cached"
                return history.report("kept", known.request_id, what)


def _needed(group: KVCacheGroup, num_tokens: int) -> range:
    """The blocks that a hit of this many tokens needs."""
    last = num_tokens // group.block_size
    if group.kind == "mamba":
        return range(last - 1, last)
    if group.sliding_window:
        return range(max(0, last - -(-(group.sliding_window - 1) // group.block_size)), last)
    return range(last)


def _found(
    history: History, known: Known, chunk: Chunk, state: SchedulerState, cached: Mapping[int, bytes], keys: Keys
) -> None:
    """A request begins with the longest prefix whose blocks were cached before the step, and still are."""
    before, by_hash, groups = history.contents.hashes, state.blocks_by_hash, history.limits.groups
    start, longest = chunk.num_cached_tokens, (known.num_tokens or 1) - 1
    unit = math.lcm(*(group.block_size for group in groups))
    if not before or start + unit > longest:
        return
    if by_hash is None:
        found: dict[bytes, list[int]] = {}
        for block, digest in cached.items():
            found.setdefault(digest, []).append(block)
        by_hash = found

    @cache
    def has(group: int, place: int) -> bool:
        own, num_hashes = keys(known, group, place)
        return len(own) == num_hashes and any(
            before.get(block) == cached.get(block) == own[-1] for block in by_hash.get(own[-1], ())
        )

    for index, group in enumerate(groups):
        if group.kind == "full_attention":
            first = next((place for place in _needed(group, longest) if not has(index, place)), longest)
            longest = min(longest, first * group.block_size)
    others = [(index, group) for index, group in enumerate(groups) if group.kind != "full_attention"]
    for end in range(longest // unit * unit, start, -unit):
        # A window of one token needs no block, and is found by one.
        needed = [(index, _needed(group, end) or (end // group.block_size - 1,)) for index, group in others]
        if all(has(index, place) for index, places in needed for place in places):
            what = f"it begins at {start}, and {end} of its tokens are in the prefix cache"
            return history.report("found", known.request_id, what)
