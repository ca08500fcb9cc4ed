"""KV blocks: which are held, which are free and in what order, and which hold a prefix that can be found again.

The rules, the block ids and the order of the free queue are those of vLLM 0.33 V1:

- Block 0 is never handed out. Free blocks are taken from the head of the queue, at first 1, 2, 3, ...
- A freed block that is cached goes to the tail and can be found there until it is handed out again, so the queue is
  in least-recently-used order. Any other block goes to the head.
- A request's blocks are freed from its last to its first, because a prefix serves more requests than its end.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.trace.pool_change import PoolChange, PoolLog

if TYPE_CHECKING:
    from workbench.scheduler.eviction import Eviction

_ROOT_HASH = hashlib.sha256(b"workbench KV block").digest()
"""Parent of the first block of every sequence."""


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    num_blocks: int,
    block_size: int,
    num_lookahead_tokens: int = 0,
    cache_salt: str = "",
    adapter: str = "",
) -> None:
    """Append the hashes of full blocks until there are ``num_blocks`` of them.

    A block's hash covers its tokens and its parent's hash, so that equal hashes mean equal prefixes. A collision would
    serve another prompt's KV; sha256 rules it out. It also covers the ``num_lookahead_tokens`` after the block: the KV
    of an EAGLE drafter depends on them. The hashes of requests with different values of ``cache_salt``, or
    with different adapters, whose names have no null character, differ.
    """
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else _ROOT_HASH + f"{adapter}\0{cache_salt}".encode("utf-8", "surrogatepass")
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size + num_lookahead_tokens])
        hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())


class BlockPool:
    """Reference counts, the free queue and the prefix cache of ``num_blocks`` KV blocks.

    Args:
        num_blocks: Blocks of the pool, the null block 0 included.
        eviction: Chooses the cached block that is handed out next; None for the order of the free queue, vLLM's.
    """

    def __init__(self, num_blocks: int, eviction: Eviction | None = None) -> None:
        self.eviction = eviction
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # A queue that is taken from the head, fed at both ends and, on a cache hit, robbed in the middle.
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._hash_of: dict[int, bytes] = {}
        # Blocks with the same content, in the order in which they were cached: the first one is found.
        self._blocks_of: dict[bytes, tuple[int, ...]] = {}
        self._log = PoolLog()

    def copy(self) -> BlockPool:
        """A pool in the same state that can be changed without changing this one."""
        clone = copy.copy(self)
        clone._ref_counts, clone._free = self._ref_counts.copy(), self._free.copy()
        clone._hash_of, clone._blocks_of = self._hash_of.copy(), self._blocks_of.copy()
        clone._log = PoolLog()
        clone.eviction = self.eviction and self.eviction.copy()
        return clone

    def restore(self, held: Iterable[int], free: Iterable[int], content: Mapping[int, bytes]) -> None:
        """Take over a recorded state.

        Args:
            held: The blocks of all block tables, one that several hold as often. A block that is neither held nor free
                stays out of reach.
            free: The free queue; the first is the next one to be handed out.
            content: The hash of each cached block.
        """
        self._ref_counts = [0] * self.num_blocks
        for block in held:
            self._ref_counts[block] += 1
        self._free = OrderedDict.fromkeys(free)
        self._hash_of, self._blocks_of = {}, {}
        for block, digest in content.items():
            self.cache(block, digest)
        if self.eviction is not None:
            for block in filter(content.__contains__, self._free):
                self.eviction.release(block, content[block])

    def take_change(self) -> PoolChange:
        """Changes to the pool since the last call, for the record of a step."""
        return self._log.take(self._free.__contains__)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._free)

    @property
    def free_queue(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return list(self._free)

    @property
    def cached_blocks(self) -> dict[int, bytes]:
        """Blocks whose content can be found, held or free, with its hash."""
        return dict(self._hash_of)

    def ref_count(self, block: int) -> int:
        """Number of block tables that hold a block."""
        return self._ref_counts[block]

    def get_new_blocks(self, count: int) -> list[int]:
        """Hand out blocks from the head of the free queue, and evict those that are cached."""
        free = self._free
        if count > len(free):
            raise ValueError(f"cannot allocate {count} KV blocks, {len(free)} of {self.num_blocks - 1} are free")
        blocks = []
        for _ in range(count):
            block = free.popitem(last=False)[0]
            if block in self._hash_of:
                if self.eviction is not None:
                    free[block] = None  # back to its place
                    free.move_to_end(block, last=False)
                    block = self.eviction.victim()
                    del free[block]
                self.evict(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def free_blocks(self, block_table: Sequence[int], *, keep_cached: bool = True) -> None:
        """Give back one reference to each block of a table; ``keep_cached=False`` evicts those that become free."""
        counts, free, hash_of = self._ref_counts, self._free, self._hash_of
        front: list[int] = []
        back: list[int] = []
        for block in reversed(block_table):
            counts[block] -= 1
            if counts[block]:
                continue
            if not keep_cached and block in hash_of:
                self.evict(block)
            (back if block in hash_of else front).append(block)
        if self.eviction is not None:
            for block in back:
                self.eviction.release(block, hash_of[block])
        free.update(dict.fromkeys(back))
        for block in reversed(front):
            free[block] = None
            free.move_to_end(block, last=False)
        self._log.give_back(front, back)

    # -- prefix cache ----------------------------------------------------------------------------------------

    def get_cached_block(self, digest: bytes) -> int | None:
        """The block that has been cached under this hash for the longest time; None without one."""
        blocks = self._blocks_of.get(digest)
        return None if blocks is None else blocks[0]

    def hash_of(self, block: int) -> bytes | None:
        """The hash of a cached block; None for any other."""
        return self._hash_of.get(block)

    def get_cached_blocks(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest cached prefix of a chain of hashes."""
        hits = []
        for digest in hashes:
            blocks = self._blocks_of.get(digest)
            if blocks is None:
                break
            hits.append(blocks[0])
        return hits

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Number of these blocks that are free, so that touching them uses up free blocks."""
        return sum(not self._ref_counts[block] for block in blocks if block)

    def touch(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block that ``get_cached_blocks`` returned."""
        for block in blocks:
            if not block:
                continue  # no block is held here
            if self.eviction is not None:
                if block in self._free:
                    self.eviction.remove(block, self._hash_of[block])
                self.eviction.hit(block, self._hash_of[block])
            self._free.pop(block, None)
            self._ref_counts[block] += 1

    def cache(self, block: int, digest: bytes) -> None:
        """Let a held block be found by the hash of its content, and no longer by another one that ended inside it."""
        if block in self._hash_of:
            self.evict(block)
        self._hash_of[block] = digest
        self._blocks_of[digest] = (*self._blocks_of.get(digest, ()), block)
        if self.eviction is not None:
            self.eviction.cache(block, digest)

    def evict(self, block: int) -> None:
        """Remove a block from the prefix cache: its content is no longer, or never was, what its hash says."""
        digest = self._hash_of.pop(block)
        if self.eviction is not None:
            if not self._ref_counts[block]:
                self.eviction.remove(block, digest)
            self.eviction.forget(block, digest)
        self._log.evict(block)
        others = tuple(other for other in self._blocks_of[digest] if other != block)
        if others:
            self._blocks_of[digest] = others
        else:
            del self._blocks_of[digest]
