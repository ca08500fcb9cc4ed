"""Which KV blocks change in each step: what a view needs to keep a picture of the pool up to date."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from workbench.trace.pool_state import CACHED, FREE, OWNED, PoolReplay
from workbench.trace.records import StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


class BlockChange(NamedTuple):
    """The state of a block after the scheduling of a step, given because it differs from the step before.

    Attributes:
        block: Physical block id.
        state: FREE, CACHED or OWNED of ``workbench.trace.pool_state``.
        owner: The request that holds the block and was admitted first, None for none.
        references: Block tables that hold it.
    """

    block: int
    state: int
    owner: str | None
    references: int


class PoolChanges:
    """Follows a trace step by step.

    Attributes:
        num_cached: Free blocks whose content the prefix cache still finds, after the last step's scheduling.
        num_unused_slots: KV slots that are in a block table but hold no token (internal fragmentation).
    """

    def __init__(self, trace: Trace) -> None:
        self._block_size = trace.block_size
        self._replay = PoolReplay.at_start_of(trace)
        computed = trace.keyframe.num_kv_computed if trace.keyframe else {}
        self._holders: dict[int, list[str]] = {}
        self._unused: dict[str, int] = {}
        self._seen: dict[int, BlockChange] = {}
        # Blocks to look at with the next step, in the order in which they came to the free queue's tail.
        self._touched: dict[int, None] = dict.fromkeys(self._replay.cached)
        for request_id, table in self._replay.tables.items():
            self._take(request_id, table)
            self._unused[request_id] = len(table) * self._block_size - computed.get(request_id, 0)
        self.num_cached = self._replay.num_cached_free
        self.num_unused_slots = sum(self._unused.values())

    def advance(self, record: StepRecord) -> list[BlockChange]:
        """Apply a step; returns the blocks that differ, a freed block before one that was freed after it."""
        for request_id in (*record.aborted, *record.preempted):
            self._give_back(request_id)
        for chunk in record.chunks:
            if chunk.new_block_ids:
                self._take(chunk.request_id, chunk.new_block_ids)
        self._touched.update(dict.fromkeys(record.cached_block_ids))
        self._replay.schedule(record)
        for chunk in record.chunks:
            table = self._replay.tables.get(chunk.request_id, ())
            self._unused[chunk.request_id] = len(table) * self._block_size - chunk.end
        self.num_cached = self._replay.num_cached_free
        self.num_unused_slots = sum(self._unused.values())
        changes = self._changes()
        for request_id in record.finished:
            self._give_back(request_id)
        self._replay.finish(record)
        return changes

    def _take(self, request_id: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holders.setdefault(block, []).append(request_id)
            self._touched[block] = None

    def _give_back(self, request_id: str) -> None:
        self._unused.pop(request_id, None)
        for block in reversed(self._replay.tables.get(request_id, ())):
            self._holders[block].remove(request_id)
            self._touched.pop(block, None)
            self._touched[block] = None

    def _changes(self) -> list[BlockChange]:
        changes = []
        for block in self._touched:
            holders = self._holders.get(block)
            state = OWNED if holders else CACHED if block in self._replay.cached else FREE
            change = BlockChange(block, state, holders[0] if holders else None, len(holders or ()))
            if self._seen.get(block, BlockChange(block, FREE, None, 0)) != change:
                self._seen[block] = change
                changes.append(change)
        self._touched.clear()
        return changes
