"""The history of a prefix cache, from its events: how long blocks stayed, and which ones were needed again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from workbench.trace.formats.kv_events.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from workbench.trace.readings.metrics import amount


@dataclass(frozen=True)
class Return:
    """A block that was stored again after it had been removed: its tokens were computed a second time.

    Attributes:
        at: When it was stored again, in seconds since the epoch.
        after: Seconds since it was removed.
        num_blocks: Number of blocks that the cache would have needed in addition to keep it until then: the different
            blocks that entered since its removal and were not cached at that time. Exact for a cache that removes the
            least recently used block first.
        num_tokens: Tokens in the block.
    """

    at: float
    after: float
    num_blocks: int
    num_tokens: int


@dataclass(frozen=True)
class CacheHistory:
    """One prefix cache: that of a rank, in a medium and a KV cache group.

    Attributes:
        rank: Data-parallel rank.
        medium: "GPU", "CPU" and so on.
        group: KV cache group.
        block_size: Tokens in a block; 0 if no block was stored.
        num_stored: Number of blocks that entered.
        num_removed: Number of blocks that left.
        num_unknown: Removed blocks that entered before the recording began.
        num_cleared: Number of times that all blocks left.
        num_cached: Number of blocks at the end, as far as they entered in the recording.
        peak_cached: Their maximum.
        lifetimes: Seconds from entering to leaving, of each block that left.
        returns: Blocks that were needed again, in order of time.
    """

    rank: int
    medium: str
    group: int
    block_size: int
    num_stored: int
    num_removed: int
    num_unknown: int
    num_cleared: int
    num_cached: int
    peak_cached: int
    lifetimes: tuple[float, ...]
    returns: tuple[Return, ...]

    def num_saved(self, num_blocks: int) -> int:
        """Tokens that would not have been recomputed with this many more blocks."""
        return sum(each.num_tokens for each in self.returns if each.num_blocks <= num_blocks)

    def blocks_to_save(self, fraction: float) -> int | None:
        """Number of additional blocks that turn this fraction of the returns into hits; None without returns.

        Args:
            fraction: In (0, 1].
        """
        needed = sorted(each.num_blocks for each in self.returns)
        return needed[max(1, math.ceil(fraction * len(needed))) - 1] if needed else None

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank}, {self.medium}, group {self.group}: {self.num_stored} blocks of {self.block_size} tokens"
            f" stored, {self.num_removed} removed, {self.num_cached} cached at the end (at most {self.peak_cached})"
        ]
        if self.num_cleared:
            lines.append(f"  cleared {self.num_cleared} times")
        if self.num_unknown:
            lines.append(f"  {self.num_unknown} removed blocks were stored before the recording began")
        if self.lifetimes:
            lines.append(f"  a removed block was cached for {amount(median(self.lifetimes), 's')} (median)")
        if self.returns:
            tokens = sum(each.num_tokens for each in self.returns)
            gap = amount(median(each.after for each in self.returns), "s")
            blocks = f"{len(self.returns)} blocks ({tokens} tokens)"
            lines.append(f"  {blocks} were stored again after their removal, {gap} later (median)")
            enough = [(share, self.blocks_to_save(share)) for share in (0.5, 0.9, 1.0)]
            lines.append(
                "  to keep them: " + ", ".join(f"{number} more blocks for {share:.0%}" for share, number in enough)
            )
        elif self.num_removed:
            lines.append("  no block was stored again after its removal: more memory would not have helped")
        return "\n".join(lines)


class _PrefixSums:
    """Counts by number, and their sums from 0 on, each in logarithmic time (a Fenwick tree).

    Args:
        size: The largest number.
    """

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 2)

    def add(self, number: int) -> None:
        number += 1
        while number < len(self._sums):
            self._sums[number] += 1
            number += number & -number

    def up_to(self, number: int) -> int:
        number, total = number + 1, 0
        while number:
            total += self._sums[number]
            number -= number & -number
        return total


class CacheReplay:
    """A prefix cache while its events are read. The same content can be in two blocks, so hashes are counted.

    A block that is stored again and had been removed as number m would have needed as many more blocks as different
    ones entered in between: those whose own removal, if any, was before number m.

    Args:
        rank: Data-parallel rank.
        medium: "GPU", "CPU" and so on.
        group: KV cache group.
        num_removals: Maximum number of removals to come.

    Attributes:
        rank: Data-parallel rank.
        held: The blocks in the cache, by hash.
    """

    def __init__(self, rank: int, medium: str, group: int, *, num_removals: int) -> None:
        self.rank, self._medium, self._group = rank, medium, group
        self.held: Counter[BlockHash] = Counter()
        self._stored_at: dict[BlockHash, float] = {}
        self._removed: dict[BlockHash, tuple[float, int, int]] = {}  # time, its number, and the entries before it
        self._lifetimes: list[float] = []
        self._returns: list[Return] = []
        self._block_size = self._num_stored = self._num_removed = self._num_unknown = self._num_cleared = 0
        self._num_cached = self._peak_cached = self._num_entered = 0
        self._entered = _PrefixSums(num_removals)  # by the number of the removal before; 0 for none

    def store(self, event: BlockStored, at: float) -> None:
        """Take in blocks that entered, at a time in seconds."""
        self._block_size = max(self._block_size, event.block_size)
        for block in event.block_hashes:
            self._num_stored += 1
            if not self.held[block]:
                self._stored_at[block] = at
                removed_at, number, num_before = self._removed.pop(block, (at, 0, 0))
                if number:
                    needed = self._entered.up_to(number) - num_before
                    self._returns.append(Return(at, at - removed_at, max(1, needed), event.block_size))
                self._entered.add(number)
                self._num_entered += 1
            self.held[block] += 1
            self._num_cached += 1
        self._peak_cached = max(self._peak_cached, self._num_cached)

    def remove(self, event: BlockRemoved, at: float) -> None:
        """Take in blocks that left, at a time in seconds."""
        for block in event.block_hashes:
            self._num_removed += 1
            if self.held[block]:
                self.held[block] -= 1
                self._num_cached -= 1
            else:
                self._num_unknown += 1
            if not self.held[block]:
                del self.held[block]
                self._removed[block] = at, self._num_removed, self._num_entered
                if (since := self._stored_at.pop(block, None)) is not None:
                    self._lifetimes.append(at - since)

    def clear(self) -> None:
        """Empty the cache."""
        self._num_cleared += 1
        self.held.clear()
        self._stored_at.clear()
        self._removed.clear()
        self._num_cached = 0

    def history(self) -> CacheHistory:
        """The history up to the last event."""
        return CacheHistory(
            rank=self.rank,
            medium=self._medium,
            group=self._group,
            block_size=self._block_size,
            num_stored=self._num_stored,
            num_removed=self._num_removed,
            num_unknown=self._num_unknown,
            num_cleared=self._num_cleared,
            num_cached=self._num_cached,
            peak_cached=self._peak_cached,
            lifetimes=tuple(self._lifetimes),
            returns=tuple(self._returns),
        )


def replay(batches: Sequence[KVEventBatch]) -> list[CacheReplay]:
    """The prefix caches after these batches, by rank, medium and group."""
    removals = [event for batch in batches for event in batch.events if isinstance(event, BlockRemoved)]
    num_removals = sum(len(event.block_hashes) for event in removals)
    caches: dict[tuple[int, str, int], CacheReplay] = {}
    for batch in batches:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                for cleared in caches.values():
                    if cleared.rank == batch.rank:
                        cleared.clear()
                continue
            key = batch.rank, event.medium or "GPU", event.group_idx or 0
            if (cache := caches.get(key)) is None:
                cache = caches[key] = CacheReplay(*key, num_removals=num_removals)
            if isinstance(event, BlockStored):
                cache.store(event, batch.ts)
            else:
                cache.remove(event, batch.ts)
    return [cache for _, cache in sorted(caches.items())]
