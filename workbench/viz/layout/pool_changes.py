"""The KV blocks that change in each step, from which a view keeps its picture of the pool up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from workbench.trace.readings.block_replay import BlockReplay
from workbench.trace.readings.pool_state import CACHED, FREE, OWNED
from workbench.trace.records import StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


class BlockChange(NamedTuple):
    """The new state of a block, after the scheduling of a step or at its end.

    Attributes:
        block: Physical block id.
        state: FREE, CACHED or OWNED of ``workbench.trace.readings.pool_state``.
        owner: The request that holds the block and was admitted first; None for a free block.
        references: Number of block tables that hold it.
    """

    block: int
    state: int
    owner: str | None
    references: int


class PoolChanges:
    """Follow a trace step by step.

    Attributes:
        num_cached: Number of free blocks whose content is in the prefix cache, after the last step's scheduling.
        num_unused_slots: Number of KV slots in block tables that hold no token (internal fragmentation).
    """

    def __init__(self, trace: Trace) -> None:
        self._blocks = BlockReplay.at_start_of(trace)
        self._seen: dict[int, BlockChange] = {}
        cached, holders = self._blocks.cached, self._blocks.holders
        # Those in the free queue in its order: the first of them is evicted next.
        at_start = dict.fromkeys([*(block for block in self._blocks.free if block in cached), *cached, *holders])
        self._touched = self._blocks.touched = at_start
        self.num_cached = self._blocks.num_cached_free
        self.num_unused_slots = self._blocks.num_unused_slots

    def advance(self, record: StepRecord) -> tuple[list[BlockChange], list[BlockChange]]:
        """Apply a step; returns what had changed before it, and what its scheduling changed.

        The first are what the end of the step before gave back, and before the first step the blocks that are cached or
        in use. Freed blocks stand in the order in which they were freed.
        """
        earlier = self._changes()
        self._blocks.schedule(record)
        self.num_cached = self._blocks.num_cached_free
        self.num_unused_slots = self._blocks.num_unused_slots
        changes = self._changes()
        self._blocks.finish(record)
        return earlier, changes

    def _changes(self) -> list[BlockChange]:
        """The blocks that have changed since the last call."""
        changes, seen, all_holders, cached = [], self._seen, self._blocks.holders, self._blocks.cached
        for block in self._touched:
            if holders := all_holders.get(block):
                change = BlockChange(block, OWNED, holders[0], len(holders))
            else:
                change = BlockChange(block, CACHED if block in cached else FREE, None, 0)
            before = seen.get(block)
            if before != change and (before is not None or change.state != FREE):
                seen[block] = change
                changes.append(change)
        self._touched.clear()
        return changes
