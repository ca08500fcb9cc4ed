"""KV cache groups: the blocks that a request needs, finds in the prefix cache, keeps and gives back.

One manager per group, in the order of the configuration, over one pool of blocks; here that of full attention, in
`sliding_window` and `recurrent_state` those of the other kinds. The rules are vLLM 0.33.0's
``single_type_kv_cache_manager``. A request has a block table per group; a place whose block is not held is 0. Records
refer to tables, so a table only grows in place, and gets a copy before one of its places becomes 0.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Self

from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.request import Request
from workbench.trace.records import TableChange

if TYPE_CHECKING:
    from workbench.trace.kv_groups import KVCacheGroup

NUM_HASH_BYTES = 32
"""Length of the hash of a block's tokens; in the prefix cache the number of the group follows."""

Found = tuple[list[list[int]], int]
"""The cached blocks of each of several groups, and the tokens of the hit that they make."""


class PrefixHit(NamedTuple):
    """The cached blocks with which a request can begin.

    Attributes:
        num_tokens: Tokens that need not be computed.
        blocks: The blocks that hold them, for each group; 0 if none is needed.
        shared_prefix_boundary: End of a longer prefix that some groups hold and others did not keep; 0 for none.
    """

    num_tokens: int
    blocks: tuple[Sequence[int], ...]
    shared_prefix_boundary: int = 0


class Retention(NamedTuple):
    """The states and windows that the prefix cache keeps.

    Attributes:
        interval: 0 keeps what a hit needs at the ends of a prompt, more also at each multiple of it, None at every
            multiple of the alignment ("dense").
        alignment: Every hit ends on a multiple of this: the least common multiple of the block sizes.
        drops_last_block: Hits of an EAGLE drafter's groups lose their last block.
    """

    interval: int | None
    alignment: int
    drops_last_block: bool

    def boundaries(self, request: Request, block_size: int, drops: bool) -> list[int]:
        """Positions at which a later request can begin that repeats this prompt or shares a prefix with it."""
        num_tokens, unit = request.num_prompt_tokens, self.alignment
        if self.drops_last_block:
            ends = [(num_tokens - 1) // unit * unit - unit, num_tokens // unit * unit - unit]
        else:
            ends = [num_tokens - 1]
        if request.shared_prefix_boundary:
            ends.append(request.shared_prefix_boundary)
            if drops:
                ends.append(request.shared_prefix_boundary - block_size)
        return [max(0, end) // unit * unit for end in ends]


class Shared(NamedTuple):
    """Settings that the managers of all groups share.

    Attributes:
        pool: The blocks of all groups.
        hash_block_size: Tokens per hash of a request's tokens; it divides every block size.
        retention: The blocks that are kept for later requests.
        num_drafts: Maximum number of drafts of a request in a step.
        max_in_flight: Maximum number of tokens in the steps that are scheduled and not complete.
        max_model_len: Maximum number of tokens of a request.
    """

    pool: BlockPool
    hash_block_size: int
    retention: Retention
    num_drafts: int
    max_in_flight: int
    max_model_len: int


class GroupManager(ABC):
    """The block tables of one group, and the blocks of it that are cached.

    Args:
        index: Place of the group in the configuration.
        group: Its kind and block size.
        shared: The pool and the limits of all groups.
        drops_last_block: A hit of this group loses its last block.

    Attributes:
        hashes_per_block: Hashes of a request's tokens per block.
        max_admission_blocks: Maximum number of blocks that the check of a whole request counts; None for no cap.
        fresh: Keys of the states that were cached in this step. They are not computed yet, so nobody may begin there.
            None if the group has no states.
    """

    max_admission_blocks: int | None = None
    fresh: set[bytes] | None = None

    def __init__(self, index: int, group: KVCacheGroup, shared: Shared, drops_last_block: bool) -> None:
        self.index = index
        self.group = group
        self.block_size = group.block_size
        self.drops_last_block = drops_last_block
        self._pool = shared.pool
        self._retention = shared.retention
        self._num_drafts = shared.num_drafts
        self.hashes_per_block = group.block_size // shared.hash_block_size
        self._suffix = index.to_bytes(2, "big") if index else b""

    def copy(self, pool: BlockPool) -> Self:
        """The same manager over a copy of the pool."""
        clone = copy.copy(self)
        clone._pool = pool
        return clone

    # -- blocks ----------------------------------------------------------------------------------------------

    def num_skipped_blocks(self, num_computed: int) -> int:
        """Blocks at the beginning of a table that no row after ``num_computed`` tokens reads."""
        return 0

    def num_scratch(self, request: Request) -> int:
        """Blocks that a request holds beside those of its tokens."""
        return 0

    def num_new_blocks(self, request: Request, num_slots: int, num_tokens: int) -> int:
        """Blocks that a running request lacks.

        Args:
            request: The request.
            num_slots: Tokens with the slots that the proposer of drafts writes behind them.
            num_tokens: Tokens alone.
        """
        lacking = -(-num_slots // self.block_size) - len(request.block_tables[self.index])
        return lacking if lacking > 0 else 0

    def num_admission_blocks(
        self, request: Request, num_slots: int, num_tokens: int, hit: PrefixHit, *, whole: bool
    ) -> int:
        """Free blocks that an admission takes, those of its hit that nobody holds included."""
        required = -(-num_slots // self.block_size) + self.num_scratch(request)
        if whole and self.max_admission_blocks is not None:
            required = min(required, self.max_admission_blocks)
        skipped, cached = self.num_skipped_blocks(hit.num_tokens), hit.blocks[self.index]
        return max(0, required - max(skipped, len(cached))) + self._pool.num_free_among(cached[skipped:])

    def add_cached_blocks(self, request: Request, hit: PrefixHit) -> None:
        """Begin the table of an admission with the blocks of its hit."""
        skipped = self.num_skipped_blocks(hit.num_tokens)
        cached = hit.blocks[self.index][skipped:]
        self._pool.touch(cached)
        table = request.block_tables[self.index]
        table += [0] * skipped
        table += cached
        request.num_cached_blocks[self.index] = len(table)
        request.num_removed_blocks[self.index] = skipped

    def allocate(self, request: Request, num_slots: int, num_tokens: int, removed: Sequence[int]) -> TableChange:
        """Extend a table, whose places ``removed`` have become 0 before, and return both changes."""
        if (num_blocks := self.num_new_blocks(request, num_slots, num_tokens)) <= 0:
            return TableChange((), tuple(removed))
        blocks = self._pool.get_new_blocks(num_blocks)
        request.block_tables[self.index] += blocks
        return TableChange(tuple(blocks), tuple(removed))

    def remove_skipped_blocks(self, request: Request, num_processed: int) -> Sequence[int]:
        """Give back the blocks that no later row reads.

        Args:
            request: The request.
            num_processed: Tokens whose KV is computed, steps in flight not counted.

        Returns:
            The places of its table that became 0.
        """
        first = request.num_removed_blocks[self.index]
        last = min(self.num_skipped_blocks(num_processed), len(request.block_tables[self.index]))
        if last <= first:
            return ()
        request.num_removed_blocks[self.index] = last
        table = request.block_tables[self.index] = request.block_tables[self.index].copy()
        places = [place for place in range(first, last) if table[place]]
        self._pool.free_blocks([table[place] for place in places])
        for place in places:
            table[place] = 0
        return places

    # -- prefix cache ----------------------------------------------------------------------------------------

    def is_cached(self, block: int) -> bool:
        """Whether a block is cached as one of this group."""
        digest = self._pool.hash_of(block)
        return digest is not None and digest[NUM_HASH_BYTES:] == self._suffix

    def key(self, request: Request, block: int) -> bytes:
        """The hash under which a block of a request is cached."""
        return request.block_hashes[(block + 1) * self.hashes_per_block - 1] + self._suffix

    def keys(self, request: Request, first: int, last: int) -> list[bytes]:
        """The hashes under which the blocks ``[first, last)`` of a request are cached, as far as they are known."""
        count = self.hashes_per_block
        hashes = request.block_hashes[(first + 1) * count - 1 : last * count : count]
        return [digest + self._suffix for digest in hashes] if self._suffix else hashes

    def unfinished_block(self, request: Request, num_tokens: int) -> tuple[int, bytes] | None:
        """A block that is cached though it is not full, with its hash."""
        return None

    def num_cacheable_tokens(self, num_computed: int) -> int:
        """Leading tokens whose blocks a hit could use that is aligned, because it is one of several groups."""
        aligned = num_computed - num_computed % self._retention.alignment
        if self.drops_last_block and aligned > 0:  # a hit needs the block behind it, and drops it
            return min(num_computed, aligned + self.block_size)
        return aligned

    def keeps(self, request: Request, first: int, last: int) -> Iterable[bool]:
        """Whether each of the blocks ``[first, last)`` is cached."""
        return repeat(True)

    def first_block_of_hit(self, end: int, found: int) -> int:
        """The first block that a hit needs, if it ends after ``end`` blocks and ``found`` blocks were found."""
        return found

    @abstractmethod
    def find(self, request: Request, same: Sequence[GroupManager], num_tokens: int, drops: bool) -> Found:
        """The longest hit within the first ``num_tokens``, for this group and those with the same specification.

        Args:
            request: The request; its tokens are hashed.
            same: This group and the others: a block counts only if all of them have it.
            num_tokens: Maximum length of the hit.
            drops: Whether it loses its last block.

        Returns:
            The blocks of each group, and the length of the hit.
        """

    def _lookup(self, request: Request, same: Sequence[GroupManager], block: int) -> list[int] | None:
        found = []
        for manager in same:
            if (hit := self._pool.get_cached_block(manager.key(request, block))) is None:
                return None
            found.append(hit)
        return found


class FullAttention(GroupManager):
    """A group whose rows attend to every token before them."""

    def unfinished_block(self, request: Request, num_tokens: int) -> tuple[int, bytes] | None:
        """A block that is cached by the last hash of the prompt, which ends inside it, with that hash.

        No hit of whole blocks finds it, but it is kept longer than a block without a hash.
        """
        num_hashes = request.num_prompt_tokens if self.drops_last_block else request.num_prompt_tokens - 1
        num_hashes = min(num_hashes * self.hashes_per_block // self.block_size, len(request.block_hashes))
        place, inside = divmod(num_hashes, self.hashes_per_block)
        table = request.block_tables[self.index]
        if not inside or num_hashes * self.block_size > num_tokens * self.hashes_per_block or place >= len(table):
            return None
        return table[place], request.block_hashes[num_hashes - 1] + self._suffix

    def find(self, request: Request, same: Sequence[GroupManager], num_tokens: int, drops: bool) -> Found:
        """From the left, all blocks up to the first that is not cached."""
        num_blocks = num_tokens // self.block_size
        hits = [self._pool.get_cached_blocks(manager.keys(request, 0, num_blocks)) for manager in same]
        length = min(map(len, hits)) * self.block_size
        if drops and length:
            length -= self.block_size
        length -= length % self._retention.alignment
        return [blocks[: length // self.block_size] for blocks in hits], length
