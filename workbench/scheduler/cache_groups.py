"""KV blocks of several KV cache groups, of windows and states, and of steps that run ahead of the known tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.scheduler.kv_cache_groups import FullAttention, GroupManager, PrefixHit, Retention, Shared
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason
from workbench.trace.records import TableChange

if TYPE_CHECKING:
    from workbench.config import EngineConfig
    from workbench.trace.kv_groups import KVCacheGroup


class CacheGroups(KVCacheManager):
    """Gives requests blocks of one pool for every KV cache group, and the drafts and steps ahead of them their slots.

    With one group of full attention and steps that know their tokens, it decides as a `KVCacheManager` does.
    """

    rests_inside_blocks = False

    def _make_groups(self, config: EngineConfig) -> None:
        groups = config.cache_groups
        self._num_lookahead_tokens = config.speculation.num_lookahead_tokens
        self.num_hash_lookahead_tokens = config.speculation.num_hash_lookahead_tokens
        self._max_model_len = config.max_model_len or sys.maxsize
        sizes = [group.block_size for group in groups]
        self.alignment = math.lcm(*sizes)
        self._hash_block_size = math.gcd(*sizes)
        interval = None if config.prefix_cache_retention_interval == "dense" else config.prefix_cache_retention_interval
        assert not isinstance(interval, str)
        drops = config.speculation.drops_last_cached_block
        retention = Retention(interval, self.alignment, drops)
        flagged = [group.eagle for group in groups]
        dropping = [drops and (flag or not any(flagged)) for flag in flagged]
        for index, group in enumerate(groups):  # groups with the same specification are looked up together
            same = [other for other, its in enumerate(groups) if _specification(its) == _specification(group)]
            dropping[index] = any(dropping[other] for other in same)
        shared = Shared(
            pool=self.block_pool,
            hash_block_size=self._hash_block_size,
            retention=retention,
            num_drafts=config.num_speculative_tokens,
            max_in_flight=config.max_num_batched_tokens * (2 if config.async_scheduling else 1),
            max_model_len=self._max_model_len,
        )
        self.groups = [
            self._kind_of(group)(index, group, shared, drops)
            for index, (group, drops) in enumerate(zip(groups, dropping))
        ]
        self._states = [group.fresh for group in self.groups if group.fresh is not None]
        sets: dict[object, list[GroupManager]] = {}
        for manager in self.groups:
            sets.setdefault(_specification(manager.group), []).append(manager)
        # Full attention bounds the others, and is looked up once: a part of its hit is a hit.
        self._full_sets = [same for same in sets.values() if same[0].group.kind == "full_attention"]
        self._other_sets = [same for same in sets.values() if same[0].group.kind != "full_attention"]

    def _kind_of(self, group: KVCacheGroup) -> type[GroupManager]:
        """The manager of a kind of group; few models need others than that of full attention."""
        if group.kind == "full_attention":
            return FullAttention
        if group.kind == "sliding_window":
            from workbench.scheduler.sliding_window import SlidingWindow

            return SlidingWindow
        from workbench.scheduler.recurrent_state import CachedState, RecurrentState

        return CachedState if self.enable_prefix_caching else RecurrentState

    def copy(self) -> KVCacheManager:
        """See `KVCacheManager.copy`."""
        clone = super().copy()
        assert isinstance(clone, CacheGroups)
        clone._states = [group.fresh for group in clone.groups if group.fresh is not None]
        clone._full_sets = [[clone.groups[manager.index] for manager in same] for same in self._full_sets]
        clone._other_sets = [[clone.groups[manager.index] for manager in same] for same in self._other_sets]
        return clone

    def begin_step(self) -> None:
        """Forget what was cached in the step before."""
        super().begin_step()
        for fresh in self._states:
            fresh.clear()

    def expect(self, request: Request) -> None:
        """Give a new request a table for each group."""
        self.begin_tables(request)

    def begin_tables(self, request: Request) -> None:
        """Give a request new, empty block tables."""
        request.reset_blocks(len(self.groups))

    def num_new_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that a running request lacks for its first ``num_tokens`` tokens and its proposer's lookahead."""
        num_slots = self._num_slots(request, num_tokens)
        return sum([group.num_new_blocks(request, num_slots, num_tokens) for group in self.groups])

    def _num_slots(self, request: Request, num_tokens: int) -> int:
        """Slots for this many tokens with those that the proposer of drafts writes behind them."""
        if request.frugal or not self._num_lookahead_tokens:
            return num_tokens
        return max(num_tokens, min(num_tokens + self._num_lookahead_tokens, self._max_model_len))

    def remove_skipped_blocks(self, request: Request) -> Sequence[Sequence[int]]:
        """Give back the blocks of a running request that no later row reads; a step in flight still reads them."""
        num_processed = max(0, request.num_kv_computed - request.num_in_flight_tokens)
        return [group.remove_skipped_blocks(request, num_processed) for group in self.groups]

    def allocate_slots(
        self, request: Request, num_tokens: int, hit: PrefixHit | None = None, removed: Sequence[Sequence[int]] = ()
    ) -> list[TableChange] | None:
        """See `KVCacheManager.allocate_slots`."""
        if hit is not None:
            self._begin_with(request, hit)  # in all groups, before any block is handed out
        num_slots = self._num_slots(request, num_tokens)
        num_lacking, changes = 0, []
        for group in self.groups:
            num_lacking += group.num_new_blocks(request, num_slots, num_tokens)
        if num_lacking > self.num_free_blocks and hit is None:
            return None
        for group in self.groups:
            places = removed[group.index] if removed else ()
            changes.append(group.allocate(request, num_slots, num_tokens, places))
        return changes

    def _touch(self, request: Request, hit: PrefixHit) -> None:
        for group in self.groups:
            group.add_cached_blocks(request, hit)

    # -- prefix cache ----------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """See `KVCacheManager.get_computed_blocks`."""
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return self._no_hit
        if request.frugal and self._states:  # a state of a hit is one block more
            return self._no_hit
        num_tokens = len(request.token_ids)
        self._extend_hashes(request, (num_tokens - self.num_hash_lookahead_tokens) // self._hash_block_size)
        if len(self.groups) == 1:
            group = self.groups[0]
            hits, length = group.find(request, self.groups, num_tokens - 1, group.drops_last_block)
            return PrefixHit(length, (hits[0],))
        return self._agree(request, num_tokens - 1)

    def _agree(self, request: Request, longest: int) -> PrefixHit:
        """The longest hit that all groups have: each shortens it to what it can serve, until none does."""
        hits: list[Sequence[int]] = [()] * len(self.groups)
        length, longest_found = longest, 0
        for same in self._full_sets:
            length = self._find(request, same, length, same[0].drops_last_block, hits)
            longest_found = max(longest_found, length)
        dropped: set[int] = set()
        before = sys.maxsize
        while length < before:
            before = length
            for place, same in enumerate(self._other_sets):
                drops = same[0].drops_last_block and place not in dropped
                found = self._find(request, same, length, drops, hits)
                if drops:
                    dropped.add(place)
                elif found < length:
                    dropped.clear()
                length, longest_found = found, max(longest_found, found)
        for manager in (manager for same in self._full_sets for manager in same):
            hits[manager.index] = hits[manager.index][: -(-length // manager.block_size)]
        return PrefixHit(length, tuple(hits), longest_found if longest_found > length else 0)

    def _find(
        self, request: Request, same: list[GroupManager], limit: int, drops: bool, hits: list[Sequence[int]]
    ) -> int:
        """Put the longest hit of groups with the same specification into ``hits``, and return its length.

        Attention that drops its last block looks one block further.
        """
        first = same[0]
        if drops and first.group.is_attention:
            limit = min(limit + first.block_size, len(request.block_hashes) * self._hash_block_size)
        found, length = first.find(request, same, limit, drops)
        for manager, blocks in zip(same, found):
            hits[manager.index] = blocks
        return length

    def cache_full_blocks(self, request: Request, num_computed: int) -> None:
        """See `KVCacheManager.cache_full_blocks`.

        Drafts are never hashed before they are accepted: their tokens are not the request's yet.
        """
        if not self.enable_prefix_caching:
            return
        pool, newly_cached = self.block_pool, self.newly_cached
        num_tokens = len(request.token_ids)
        num_known = num_tokens - self.num_hash_lookahead_tokens
        self._extend_hashes(request, num_known // self._hash_block_size)
        if num_computed < num_tokens:
            num_tokens = num_computed
        for group in self.groups:
            num_usable = num_tokens if len(self.groups) == 1 else group.num_cacheable_tokens(num_tokens)
            first = request.num_cached_blocks[group.index]
            last = (num_usable if num_usable < num_known else num_known) // group.block_size
            if last > first:
                table = request.block_tables[group.index]
                for index, kept in zip(range(first, last), group.keeps(request, first, last)):
                    if kept and (block := table[index]):
                        key = group.key(request, index)
                        pool.cache(block, key)
                        newly_cached.append(block)
                        if group.fresh is not None:
                            group.fresh.add(key)
                request.num_cached_blocks[group.index] = last
            if group.hashes_per_block > 1:
                tail = group.unfinished_block(request, num_usable)
                if tail is not None and pool.hash_of(tail[0]) is None:
                    pool.cache(*tail)
                    newly_cached.append(tail[0])

    # -- admission -------------------------------------------------------------------------------------------

    def _num_needed(self, request: Request, num_tokens: int, hit: PrefixHit, *, whole: bool) -> int:
        """Free blocks that an admission takes; the lookahead counts for its first chunk alone."""
        num_slots = num_tokens if whole else self._num_slots(request, num_tokens)
        return sum(
            [group.num_admission_blocks(request, num_slots, num_tokens, hit, whole=whole) for group in self.groups]
        )

    def _refusal(self, needed: int, num_tokens: int, reserve: int) -> Reason:
        if needed > self.block_pool.num_blocks and self._states:
            return Reason("state_boundary", rule="same_step")
        return super()._refusal(needed, num_tokens, reserve)


def _specification(group: KVCacheGroup) -> tuple[object, ...]:
    return (group.kind, group.block_size, group.sliding_window)
