"""Between requests and KV blocks: what a request finds in the prefix cache, what it needs, what it publishes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from workbench.engine.block_pool import BlockPool, extend_block_hashes
from workbench.engine.config import EngineConfig
from workbench.engine.request import Request


class KVCacheManager:
    """Gives requests their KV blocks.

    Args:
        config: Size of the pool and of a block, prefix caching, watermark and the admission gate.

    Attributes:
        block_pool: The blocks themselves.
        published: Blocks in the order in which they were published to the prefix cache in this step.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.block_pool = BlockPool(config.num_blocks)
        self.published: list[int] = []
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        """Take over the settings that may change while blocks are in use."""
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self._admit_whole_requests = config.scheduler_reserve_full_isl
        self._num_watermark_blocks = int(config.watermark * config.num_blocks)

    def copy(self) -> KVCacheManager:
        """A manager in the same state that can be changed without changing this one."""
        clone = KVCacheManager.__new__(KVCacheManager)
        clone.__dict__.update(self.__dict__)
        clone.block_pool = self.block_pool.copy()
        clone.published = self.published.copy()
        return clone

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self.block_pool.num_free

    def num_new_blocks(self, request: Request, num_computed: int) -> int:
        """Blocks a request lacks before its first ``num_computed`` tokens have a place."""
        return -(-num_computed // self.block_size) - len(request.block_table)

    def allocate(self, request: Request, num_computed: int) -> tuple[int, ...]:
        """Extend the block table to ``num_computed`` tokens and return the new blocks."""
        blocks = self.block_pool.allocate(self.num_new_blocks(request, num_computed))
        request.block_table += blocks
        return tuple(blocks)

    def free(self, request: Request, *, keep_content: bool = True) -> None:
        """Give all blocks of a request back. Its block table stays readable.

        Args:
            request: The request.
            keep_content: Let later requests find what the blocks hold. False for one that ended with an error: its
                KV may be what was wrong, and whoever found it in the cache would fail in turn.
        """
        self.block_pool.free(request.block_table, keep_content=keep_content)

    # -- prefix cache ----------------------------------------------------------------------------------------

    def find_cached_blocks(self, request: Request) -> list[int]:
        """Blocks of the prefix cache that hold the request's first tokens.

        The last token is never taken from the cache: its row has to run, because its logits are wanted.
        """
        if not self.enable_prefix_caching:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        extend_block_hashes(request.block_hashes, request.token_ids, num_blocks, self.block_size)
        return self.block_pool.find(islice(request.block_hashes, num_blocks))

    def take_cached_blocks(self, request: Request, hits: list[int]) -> None:
        """Begin the block table of a request that is admitted with what ``find_cached_blocks`` returned."""
        self.block_pool.take(hits)
        request.block_table += hits
        request.num_published_blocks = len(hits)

    def publish_full_blocks(self, request: Request, num_computed: int) -> None:
        """Let others find the blocks that this step fills.

        Before the forward pass has run: a request of the same step may share them, because in every layer the KV
        of all rows is written before any row reads.
        """
        first, num_full = request.num_published_blocks, num_computed // self.block_size
        if num_full <= first or not self.enable_prefix_caching:
            return
        extend_block_hashes(request.block_hashes, request.token_ids, num_full, self.block_size)
        for index in range(first, num_full):
            block = request.block_table[index]
            self.block_pool.publish(block, request.block_hashes[index])
            self.published.append(block)
        request.num_published_blocks = num_full

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Unpublish those of the blocks that were published in this step: their KV will not be computed."""
        for block in set(blocks).intersection(self.published):
            self.published.remove(block)
            self.block_pool.withdraw(block)

    # -- admission -------------------------------------------------------------------------------------------

    def shortage(self, request: Request, hits: list[int], num_computed: int, *, others_run: bool) -> str:
        """Why a waiting request cannot get its blocks now; empty when it can.

        With ``scheduler_reserve_full_isl`` all of its tokens have to fit, not only its first chunk; that is a
        check and reserves nothing. Cached blocks that nobody holds count as free, and taking them uses them up.

        Args:
            request: The head of the waiting queue.
            hits: Its blocks in the prefix cache.
            num_computed: Tokens that have their KV after its first chunk.
            others_run: Any request runs, so that the watermark is kept free for it.
        """
        num_tokens = request.num_tokens if self._admit_whole_requests else num_computed
        needed = -(-num_tokens // self.block_size) - len(hits) + self.block_pool.num_free_of(hits)
        reserve = self._num_watermark_blocks if others_run else 0
        if needed <= self.num_free - reserve:
            return ""
        kept = f", {reserve} of them kept by the watermark" if reserve else ""
        return f"no free KV blocks: needs {needed} for {num_tokens} tokens, {self.num_free} free{kept}"
