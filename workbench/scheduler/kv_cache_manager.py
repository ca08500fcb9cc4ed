"""KV blocks for requests: what a request finds in the prefix cache, what it needs, what it leaves for others."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.scheduler.block_pool import BlockPool, extend_block_hashes
from workbench.scheduler.kv_cache_groups import FullAttention, GroupManager, PrefixHit, Retention, Shared
from workbench.scheduler.request import Request
from workbench.trace.pool_change import PoolChange
from workbench.trace.reasons import Reason
from workbench.trace.records import Layout, TableChange

if TYPE_CHECKING:
    from workbench.config import EngineConfig
    from workbench.trace.kv_groups import KVCacheGroup


class KVCacheManager:
    """Gives requests their KV blocks, which all KV cache groups take from one pool.

    Args:
        config: Size of the pool and of a block, KV cache groups, prefix caching, watermark and the admission gate.

    Attributes:
        block_pool: The blocks themselves.
        groups: One manager per KV cache group.
        layout: The group whose slots a record shows.
        rests_inside_blocks: A chunk that stays before the end of its request's last block changes no block: there is
            one group, of full attention, and no step runs ahead of the known tokens.
        alignment: Every hit ends on a multiple of this number of tokens.
        num_hash_lookahead_tokens: Tokens after a block that its hash covers too.
        newly_cached: Blocks that were put into the prefix cache in this part of a step, in order.
    """

    def __init__(self, config: EngineConfig) -> None:
        eviction = None
        if config.eviction != "lru":
            from workbench.scheduler.eviction import make_eviction

            eviction = make_eviction(config.eviction)
        self.block_pool = BlockPool(config.num_pool_blocks, eviction)
        self.newly_cached: list[int] = []
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        """Apply the settings that may change while blocks are in use."""
        self.enable_prefix_caching = config.enable_prefix_caching
        self._admit_whole_requests = config.scheduler_reserve_full_isl
        self._watermark, self._num_watermark_blocks = config.watermark, int(config.watermark * config.num_pool_blocks)
        self._num_lookahead_tokens = config.speculation.num_lookahead_tokens
        self.num_hash_lookahead_tokens = config.speculation.num_hash_lookahead_tokens
        self._drops_last_cached_block = config.speculation.drops_last_cached_block
        self._max_model_len = config.max_model_len or sys.maxsize
        self._make_groups(config)

    def _make_groups(self, config: EngineConfig) -> None:
        groups = config.cache_groups
        sizes = [group.block_size for group in groups]
        self.alignment = math.lcm(*sizes)
        self._hash_block_size = math.gcd(*sizes)
        interval = None if config.prefix_cache_retention_interval == "dense" else config.prefix_cache_retention_interval
        assert not isinstance(interval, str)
        drops = self._drops_last_cached_block
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
        steps_ahead = config.async_scheduling or config.num_speculative_tokens > 0
        self.rests_inside_blocks = [group.kind for group in groups] == ["full_attention"] and not steps_ahead
        self.block_size = self.groups[0].block_size
        attention = [(group.index, group.block_size) for group in self.groups if group.group.is_attention]
        self.layout = Layout(*attention[0]) if attention else Layout(None, config.block_size)
        self._states = [group.fresh for group in self.groups if group.fresh is not None]
        sets: dict[object, list[GroupManager]] = {}
        for manager in self.groups:
            sets.setdefault(_specification(manager.group), []).append(manager)
        # Full attention bounds the others, and is looked up once: a part of its hit is a hit.
        self._full_sets = [same for same in sets.values() if same[0].group.kind == "full_attention"]
        self._other_sets = [same for same in sets.values() if same[0].group.kind != "full_attention"]
        self._no_hit = PrefixHit(0, ((),) * len(groups))

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
        """A manager in the same state that can be changed without changing this one."""
        clone = copy.copy(self)
        clone.block_pool, clone.newly_cached = self.block_pool.copy(), self.newly_cached.copy()
        clone.groups = [manager.copy(clone.block_pool) for manager in self.groups]
        clone._states = [group.fresh for group in clone.groups if group.fresh is not None]
        clone._full_sets = [[clone.groups[manager.index] for manager in same] for same in self._full_sets]
        clone._other_sets = [[clone.groups[manager.index] for manager in same] for same in self._other_sets]
        return clone

    def restore(
        self, held: Iterable[int], free: Iterable[int], origins: Mapping[int, tuple[Request, int, int]]
    ) -> None:
        """Take over a recorded state of the pool; see `BlockPool.restore`.

        Args:
            held: The blocks of all block tables.
            free: The free queue.
            origins: For each cached block a request whose tokens it holds, the KV cache group, and the place in that
                group's table.
        """
        content = {}
        for block, (request, index, place) in origins.items():
            group = self.groups[index]
            self._extend_hashes(request, (place + 1) * group.hashes_per_block)
            content[block] = group.key(request, place)
        self.block_pool.restore(held, free, content)

    def foresee(self, requests: Iterable[Request]) -> None:
        """Tell the eviction policy which requests will come, in their order."""
        if self.block_pool.eviction is not None:
            self.block_pool.eviction.foresee(self._findable(request) for request in requests)

    def _findable(self, request: Request) -> list[bytes]:
        """Hashes of the full blocks that a request can find: those that end before the last token of its prompt."""
        num_blocks = (request.num_prompt_tokens - 1) // self._hash_block_size
        self._extend_hashes(request, num_blocks)
        return request.block_hashes[:num_blocks]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self.block_pool.num_free_blocks

    def begin_step(self) -> None:
        """Forget what was cached in the step before."""
        self.newly_cached.clear()
        for fresh in self._states:
            fresh.clear()

    def take_change(self) -> tuple[PoolChange, tuple[int, ...]]:
        """Changes to the pool since the last call, and the blocks that were put into the prefix cache."""
        change, cached = self.block_pool.take_change(), self.newly_cached
        if cached:
            self.newly_cached = []
            if change.evicted:  # perhaps one of them
                cached = [block for block in cached if self.block_pool.hash_of(block) is not None]
        return change, tuple(cached)

    def num_new_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that a running request lacks for its first ``num_tokens`` tokens and its proposer's lookahead."""
        num_slots = self._num_slots(request, num_tokens)
        return sum([group.num_new_blocks(request, num_slots, num_tokens) for group in self.groups])

    def _num_slots(self, request: Request, num_tokens: int) -> int:
        """Slots for this many tokens with those that the proposer of drafts writes behind them."""
        if request.frugal:
            return num_tokens
        return max(num_tokens, min(num_tokens + self._num_lookahead_tokens, self._max_model_len))

    def remove_skipped_blocks(self, request: Request) -> Sequence[Sequence[int]]:
        """Give back the blocks of a running request that no later row reads.

        A step in flight still reads them.

        Returns:
            For each group the places of its table that became 0; empty if no group ever gives any back.
        """
        if self.rests_inside_blocks:
            return ()
        num_processed = max(0, request.num_kv_computed - request.num_in_flight_tokens)
        return [group.remove_skipped_blocks(request, num_processed) for group in self.groups]

    def allocate_slots(
        self, request: Request, num_tokens: int, hit: PrefixHit | None = None, removed: Sequence[Sequence[int]] = ()
    ) -> list[TableChange] | None:
        """Extend the block tables to ``num_tokens`` tokens, by the blocks that an admission found and by new ones.

        Args:
            request: The request.
            num_tokens: Its tokens after the step.
            hit: The blocks found; for an admission.
            removed: The places that ``remove_skipped_blocks()`` returned.

        Returns:
            The change of each group's table; None, and nothing has changed, if too few blocks are free for a running
            request.
        """
        if hit is not None and self.block_pool.eviction is not None and not request.num_preemptions:
            self.block_pool.eviction.admit(self._findable(request))
        if hit is not None and hit.num_tokens:
            for group in self.groups:  # all of them before any block is handed out
                group.add_cached_blocks(request, hit)
        num_slots = self._num_slots(request, num_tokens) if self._num_lookahead_tokens else num_tokens
        num_lacking, changes = 0, []
        for group in self.groups:
            num_lacking += group.num_new_blocks(request, num_slots, num_tokens)
        if num_lacking > self.num_free_blocks and hit is None:
            return None
        for group in self.groups:
            places = removed[group.index] if removed else ()
            changes.append(group.allocate(request, num_slots, num_tokens, places))
        if self.rests_inside_blocks:
            request.block_boundary = len(request.block_tables[0]) * self.block_size
        return changes

    def take_in(self, request: Request, num_tokens: int) -> tuple[list[int], list[int]]:
        """Take KV of a request's full blocks into the prefix cache, as if it had been computed here.

        Args:
            request: A request that holds no blocks.
            num_tokens: Its first tokens, whose KV has come.

        Returns:
            The blocks of its prefix that were here before, and those after them that were taken in: all that found a
            place.
        """
        hit = self.get_computed_blocks(request)
        room = self.num_free_blocks // len(self.groups) - len(hit.blocks[0])
        num_tokens = min(num_tokens, hit.num_tokens + room * self.block_size) // self.alignment * self.alignment
        first = hit.num_tokens // self.block_size
        if num_tokens <= hit.num_tokens:
            return [], []
        for group in self.groups:
            group.add_cached_blocks(request, hit)
        if self.allocate_slots(request, num_tokens) is not None:
            self.cache_full_blocks(request, num_tokens)
        blocks = request.block_tables[0][: num_tokens // self.block_size]
        self.free(request)
        request.reset_blocks(len(self.groups))
        return blocks[:first], blocks[first:]

    def free(self, request: Request, *, keep_cached: bool = True) -> None:
        """Give back all blocks of a request; its block tables stay readable.

        With ``keep_cached=False`` they are evicted: the KV of a request that ended with an error may have caused it.
        """
        for table in request.block_tables:
            self.block_pool.free_blocks(list(filter(None, table)), keep_cached=keep_cached)

    # -- prefix cache ----------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Cached blocks with which a request can begin.

        The last token is never taken from the cache: its row has to run, because its logits are needed. With
        ``prompt_logprobs`` those of all rows are.
        """
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
        """Let other requests find the blocks that this step fills with tokens that are known.

        The forward pass has not run yet. A request of the same step may share the blocks all the same, because in
        every layer the KV of all rows is written before any row reads. Drafts are never hashed before they are
        accepted: their tokens are not the request's yet.
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

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes, tokens = request.block_hashes, request.token_ids
        size, lookahead = self._hash_block_size, self.num_hash_lookahead_tokens
        extend_block_hashes(hashes, tokens, num_blocks, size, lookahead, request.cache_salt, request.adapter)

    def evict_newly_cached(self, blocks: Iterable[int]) -> set[int]:
        """Evict the blocks among these that were cached in this step: their KV will not be computed.

        Returns:
            These blocks.
        """
        withdrawn = set(blocks).intersection(self.newly_cached)
        for block in withdrawn:
            self.newly_cached.remove(block)
            self.block_pool.evict(block)
        return withdrawn

    def evict(self, blocks: Iterable[int]) -> None:
        """Evict blocks whose KV was never written."""
        for block in set(blocks).intersection(self.block_pool.cached_blocks):
            self.block_pool.evict(block)

    # -- admission -------------------------------------------------------------------------------------------

    def refuse(self, request: Request, hit: PrefixHit, num_tokens: int, *, others_run: bool) -> Reason | None:
        """Whether a waiting request cannot get its blocks now; None when it can.

        ``num_tokens`` have to fit with the lookahead; with ``scheduler_reserve_full_isl`` also all tokens of the
        request without it, which is a check and reserves nothing. Cached blocks that are free count as free, and
        touching them uses them up. The watermark is kept free while others run.
        """
        reserve = self._num_watermark_blocks if others_run else 0
        num_free = self.num_free_blocks
        whole = len(request.token_ids)
        if self._admit_whole_requests and not request.frugal:
            needed = self._num_admission_blocks(request, whole, whole, hit, whole=True)
            if needed > num_free - reserve:
                return self._refusal(needed, whole, reserve)
        num_slots = self._num_slots(request, num_tokens) if self._num_lookahead_tokens else num_tokens
        needed = self._num_admission_blocks(request, num_slots, num_tokens, hit, whole=False)
        return None if needed <= num_free - reserve else self._refusal(needed, num_tokens, reserve)

    def _num_admission_blocks(
        self, request: Request, num_slots: int, num_tokens: int, hit: PrefixHit, *, whole: bool
    ) -> int:
        return sum(
            [group.num_admission_blocks(request, num_slots, num_tokens, hit, whole=whole) for group in self.groups]
        )

    def _refusal(self, needed: int, num_tokens: int, reserve: int) -> Reason:
        if needed > self.block_pool.num_blocks and self._states:
            return Reason("state_boundary", rule="same_step")
        num_free = self.num_free_blocks
        reserved = min(reserve, num_free)
        limit: str = "num_blocks"
        value: float = self.block_pool.num_blocks
        if needed <= num_free:
            limit, value = "watermark", self._watermark
        return Reason("kv_blocks", limit, value, needed, num_free - reserved, num_tokens=num_tokens, reserved=reserved)


def _specification(group: KVCacheGroup) -> tuple[object, ...]:
    return (group.kind, group.block_size, group.sliding_window)
