"""KV blocks for requests: what a request finds in the prefix cache, what it needs, what it leaves for others.

`KVCacheManager` is that of most models: one group of full attention, and steps that know their tokens. For others
`KVCacheManager(config)` makes a `workbench.scheduler.cache_groups.CacheGroups`, with the same methods.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from workbench.scheduler.block_pool import BlockPool, extend_block_hashes
from workbench.scheduler.kv_cache_groups import FullAttention, GroupManager, PrefixHit, Retention, Shared
from workbench.scheduler.request import Request
from workbench.trace.pool_change import PoolChange
from workbench.trace.reasons import Reason
from workbench.trace.records import Layout, TableChange

if TYPE_CHECKING:
    from workbench.config import EngineConfig


def is_plain(config: EngineConfig) -> bool:
    """Whether there is one group, of full attention, and no step runs ahead of the known tokens."""
    kinds = [group.kind for group in config.cache_groups]
    return kinds == ["full_attention"] and not (config.async_scheduling or config.num_speculative_tokens)


class KVCacheManager:
    """Gives requests their KV blocks, and lets them find those of others.

    Args:
        config: Size of the pool and of a block, KV cache groups, prefix caching, watermark and the admission gate.

    Attributes:
        block_pool: The blocks themselves.
        groups: One manager per KV cache group.
        layout: The group whose slots a record shows.
        block_size: Tokens of a block of the first group.
        alignment: Every hit ends on a multiple of this number of tokens.
        num_hash_lookahead_tokens: Tokens after a block that its hash covers too.
        newly_cached: Blocks that were put into the prefix cache in this part of a step, in order.
        rests_inside_blocks: A chunk that stays before the end of its request's last block changes no block.
    """

    rests_inside_blocks = True
    num_hash_lookahead_tokens = 0
    groups: list[GroupManager]

    def __new__(cls, config: EngineConfig | None = None) -> KVCacheManager:
        """The manager of a configuration; the copy of one has its class, and no configuration."""
        kind: Any = cls
        if cls is KVCacheManager and config is not None and not is_plain(config):
            kind = import_module("workbench.scheduler.cache_groups").CacheGroups
        return super().__new__(kind)

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
        self._make_groups(config)
        self.block_size = self.groups[0].block_size
        self.layout = Layout.of(config.cache_groups, config.block_size)
        self._no_hit = PrefixHit(0, ((),) * len(self.groups))

    def _make_groups(self, config: EngineConfig) -> None:
        (group,) = config.cache_groups
        self.alignment = self._hash_block_size = group.block_size
        retention = Retention(None, self.alignment, drops_last_block=False)
        longest = config.max_model_len or sys.maxsize
        shared = Shared(self.block_pool, self.alignment, retention, 0, config.max_num_batched_tokens, longest)
        self.groups = [FullAttention(0, group, shared, drops_last_block=False)]

    def copy(self) -> KVCacheManager:
        """A manager in the same state that can be changed without changing this one."""
        clone = copy.copy(self)
        clone.block_pool, clone.newly_cached = self.block_pool.copy(), self.newly_cached.copy()
        clone.groups = [manager.copy(clone.block_pool) for manager in self.groups]
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

    def take_change(self) -> tuple[PoolChange, tuple[int, ...]]:
        """Changes to the pool since the last call, and the blocks that were put into the prefix cache."""
        change, cached = self.block_pool.take_change(), self.newly_cached
        if cached:
            self.newly_cached = []
            if change.evicted:  # perhaps one of them
                cached = [block for block in cached if self.block_pool.hash_of(block) is not None]
        return change, tuple(cached)

    def expect(self, request: Request) -> None:
        """Give a new request its tables; it is made with one."""

    def begin_tables(self, request: Request) -> None:
        """Give a request new, empty block tables."""
        request.reset_blocks(1)

    def num_new_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that a running request lacks for its first ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(request.block_tables[0]))

    def remove_skipped_blocks(self, request: Request) -> Sequence[Sequence[int]]:
        """Give back the blocks of a running request that no later row reads.

        Returns:
            For each group the places of its table that became 0; empty if no group ever gives any back.
        """
        return ()

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
        if hit is not None:
            self._begin_with(request, hit)
        table, blocks = request.block_tables[0], []
        num_lacking = -(-num_tokens // self.block_size) - len(table)
        if num_lacking > 0:
            if num_lacking > self.num_free_blocks and hit is None:
                return None
            blocks = self.block_pool.get_new_blocks(num_lacking)
            table += blocks
        request.block_boundary = len(table) * self.block_size
        return [TableChange(tuple(blocks))]

    def _begin_with(self, request: Request, hit: PrefixHit) -> None:
        """Begin the tables of an admission with the blocks of its hit."""
        if self.block_pool.eviction is not None and not request.num_preemptions:
            self.block_pool.eviction.admit(self._findable(request))
        if hit.num_tokens:
            self._touch(request, hit)

    def _touch(self, request: Request, hit: PrefixHit) -> None:
        self.block_pool.touch(hit.blocks[0])
        request.block_tables[0] += hit.blocks[0]
        request.num_cached_blocks[0] = len(hit.blocks[0])

    def take_in(self, request: Request, num_tokens: int) -> tuple[list[int], list[int]]:
        """Take KV of a request's full blocks into the prefix cache, as if it had been computed here.

        Args:
            request: A request that holds no blocks, in a cache of one group.
            num_tokens: Its first tokens, whose KV has come.

        Returns:
            The blocks of its prefix that were here before, and those after them that were taken in: all that found a
            place.
        """
        hit = self.get_computed_blocks(request)
        room = self.num_free_blocks - len(hit.blocks[0])
        num_tokens = min(num_tokens, hit.num_tokens + room * self.block_size) // self.alignment * self.alignment
        first = hit.num_tokens // self.block_size
        if num_tokens <= hit.num_tokens:
            return [], []
        self._touch(request, hit)
        if self.allocate_slots(request, num_tokens) is not None:
            self.cache_full_blocks(request, num_tokens)
        blocks = request.block_tables[0][: num_tokens // self.block_size]
        self.free(request)
        self.begin_tables(request)
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
        num_tokens, size = len(request.token_ids), self.block_size
        self._extend_hashes(request, num_tokens // size)
        blocks = self.block_pool.get_cached_blocks(request.block_hashes[: (num_tokens - 1) // size])
        return PrefixHit(len(blocks) * size, (blocks,))

    def cache_full_blocks(self, request: Request, num_computed: int) -> None:
        """Let other requests find the blocks that this step fills with tokens that are known.

        The forward pass has not run yet. A request of the same step may share the blocks all the same, because in
        every layer the KV of all rows is written before any row reads.
        """
        if not self.enable_prefix_caching:
            return
        num_known, first = len(request.token_ids), request.num_cached_blocks[0]
        self._extend_hashes(request, num_known // self.block_size)
        last = min(num_computed, num_known) // self.block_size
        if last > first:
            blocks = request.block_tables[0][first:last]
            for block, digest in zip(blocks, request.block_hashes[first:last]):
                self.block_pool.cache(block, digest)
            self.newly_cached += blocks
            request.num_cached_blocks[0] = last

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes, tokens = request.block_hashes, request.token_ids
        if num_blocks > len(hashes):
            size, lookahead = self._hash_block_size, self.num_hash_lookahead_tokens
            extend_block_hashes(hashes, tokens, num_blocks, size, lookahead, request.cache_salt, request.adapter)

    def evict_newly_cached(self, request: Request, num_computed: int) -> set[int]:
        """Evict the blocks of a request that were cached in this step and whose KV will not be computed.

        A block whose tokens became known in this step may lie before the chunk that filled it: an earlier step
        computes it.

        Args:
            request: The request, whose chunk is taken back.
            num_computed: Number of its tokens before this chunk.

        Returns:
            These blocks.
        """
        behind = [table[num_computed // group.block_size :] for group, table in zip(self.groups, request.block_tables)]
        withdrawn = set(chain.from_iterable(behind)).intersection(self.newly_cached)
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

        ``num_tokens`` have to fit, and with ``scheduler_reserve_full_isl`` also all tokens of the request, which is a
        check and reserves nothing. Cached blocks that are free count as free, and touching them uses them up. The
        watermark is kept free while others run.
        """
        reserve = self._num_watermark_blocks if others_run else 0
        num_free = self.num_free_blocks
        whole = len(request.token_ids)
        if self._admit_whole_requests and not request.frugal:
            needed = self._num_needed(request, whole, hit, whole=True)
            if needed > num_free - reserve:
                return self._refusal(needed, whole, reserve)
        needed = self._num_needed(request, num_tokens, hit, whole=False)
        return None if needed <= num_free - reserve else self._refusal(needed, num_tokens, reserve)

    def _num_needed(self, request: Request, num_tokens: int, hit: PrefixHit, *, whole: bool) -> int:
        """Free blocks that an admission takes, those of its hit that nobody holds included."""
        required, cached = -(-num_tokens // self.block_size), hit.blocks[0]
        return max(0, required - len(cached)) + self.block_pool.num_free_among(cached)

    def _refusal(self, needed: int, num_tokens: int, reserve: int) -> Reason:
        num_free = self.num_free_blocks
        reserved = min(reserve, num_free)
        limit: str = "num_blocks"
        value: float = self.block_pool.num_blocks
        if needed <= num_free:
            limit, value = "watermark", self._watermark
        return Reason("kv_blocks", limit, value, needed, num_free - reserved, num_tokens=num_tokens, reserved=reserved)
