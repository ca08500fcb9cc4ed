"""KV cache groups of recurrent state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.kv_cache_groups import Found, GroupManager, PrefixHit, Shared
from workbench.scheduler.request import Request
from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.records import TableChange


class RecurrentState(GroupManager):
    """A group whose state after a token replaces the state before it, for requests whose prefixes are not cached.

    Its one block, and one more for each draft, lasts until the request ends.
    """

    def num_scratch(self, request: Request) -> int:
        """A block for the state after each draft."""
        return 0 if request.frugal else self._num_drafts

    def _num_places(self, request: Request, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) + self.num_scratch(request)

    def num_new_blocks(self, request: Request, num_slots: int, num_tokens: int) -> int:
        """The blocks of its tokens, and those beside them."""
        return max(0, self._num_places(request, num_slots) - len(request.block_tables[self.index]))

    def find(self, request: Request, same: Sequence[GroupManager], num_tokens: int, drops: bool) -> Found:
        """No hit."""
        return [[] for _ in same], 0


class CachedState(RecurrentState):
    """A group of recurrent state whose prefixes are cached: the state at block boundaries.

    Place i of a table holds the state after block i. A request holds the state that it reads, the one that it writes,
    and one more for each draft; the other places are 0.
    """

    fresh: set[bytes]

    def __init__(self, index: int, group: KVCacheGroup, shared: Shared, drops_last_block: bool) -> None:
        super().__init__(index, group, shared, drops_last_block)
        self.fresh = set()

    def copy(self, pool: BlockPool) -> Self:
        """The same manager over a copy of the pool."""
        clone = super().copy(pool)
        clone.fresh = self.fresh.copy()
        return clone

    def num_skipped_blocks(self, num_computed: int) -> int:
        """All but the state after the last token."""
        return max(0, num_computed - 1) // self.block_size

    def num_new_blocks(self, request: Request, num_slots: int, num_tokens: int) -> int:
        """No more than one block; less than none after drafts were rejected."""
        return min(self._num_places(request, num_tokens) - len(request.block_tables[self.index]), 1)

    def num_admission_blocks(
        self, request: Request, num_slots: int, num_tokens: int, hit: PrefixHit, *, whole: bool
    ) -> int:
        """A block for the state and one for each draft; more than the pool has if the hit is computed in this step."""
        cached = hit.blocks[self.index]
        if cached and self._pool.hash_of(cached[-1]) in self.fresh:
            return self._pool.num_blocks + 1
        required = self._num_places(request, num_tokens) - len(cached)
        return min(required, 1 + self.num_scratch(request)) + self._pool.num_free_among(cached)

    def allocate(self, request: Request, num_slots: int, num_tokens: int, removed: Sequence[int]) -> TableChange:
        """Append places up to the state that is written, move the blocks of the drafts behind it, and add blocks."""
        table, num_scratch = request.block_tables[self.index], self.num_scratch(request)
        required = self._num_places(request, num_tokens)
        num_before = len(table)
        if required <= num_before:
            return TableChange((), tuple(removed))
        num_skipped = required - num_scratch - 1
        appended = [0] * (num_skipped - num_before)
        moved: list[int] = []
        if request.status == "running":
            moved = [place for place in range(num_before - num_scratch, num_before) if place < num_skipped]
            if moved:
                table = request.block_tables[self.index] = table.copy()
            for place in moved:
                appended.append(table[place])
                table[place] = 0
        appended += self._pool.get_new_blocks(max(0, required - num_before - len(appended)))
        table += appended
        return TableChange(tuple(appended), (*removed, *moved))

    def keeps(self, request: Request, first: int, last: int) -> Iterable[bool]:
        """The state at each place where a hit may end."""
        interval = self._retention.interval
        if interval is None or (interval and interval <= self.block_size):
            return [True] * (last - first)
        segment = interval // self.block_size
        boundaries = self._retention.boundaries(request, self.block_size, self.drops_last_block)
        ends = {boundary // self.block_size - 1 for boundary in boundaries}
        if self._retention.drops_last_block:  # the last hash but one, if the chunk ends there
            unit = self.block_size // self.hashes_per_block
            if request.num_prompt_tokens // unit * unit - unit == last * self.block_size:
                ends.add(last - 1)
        return [block in ends or bool(segment and (block + 1) % segment == 0) for block in range(first, last)]

    def first_block_of_hit(self, end: int, found: int) -> int:
        """The last state alone."""
        return max(0, end - 1)

    def find(self, request: Request, same: Sequence[GroupManager], num_tokens: int, drops: bool) -> Found:
        """The last state that is cached; a state is never dropped, because a drafter has no recurrent layers."""
        for block in range(num_tokens // self.block_size - 1, -1, -1):
            length = (block + 1) * self.block_size
            if length % self._retention.alignment == 0 and (found := self._lookup(request, same, block)) is not None:
                return [[0] * block + [hit] for hit in found], length
        return [[] for _ in same], 0
