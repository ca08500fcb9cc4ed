"""Replay the KV blocks of a run from its records, which hold only changes.

A record says which blocks its requests were given, which cached blocks lost their content, and which blocks came back
to which end of the free queue. Nothing here is derived from the rules of a scheduler: a run with other rules, or a
faulty one, is shown as it was. A block may then be in the free queue and in a block table at once, or in neither.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.lines import Keyframe
from workbench.trace.pool_change import NO_CHANGE, PoolChange
from workbench.trace.records import Chunk, StepRecord, TableChange

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


class BlockReplay:
    """Follow block tables, holders, prefix cache and free queue, one record at a time.

    Nothing raises. If a recorder could not know what the pool did (``StepRecord.pool`` is None), blocks that no request
    holds any more go to the end of the queue, and blocks that were handed out lose their content.

    Args:
        block_size: Tokens per block.
        num_blocks: Number of blocks in the pool, block 0 included; None if it is unknown.
        keyframe: The initial state; None for an unused pool.
        progress: Follow ``num_computed`` too, which doubles the time.
        groups: The KV cache groups; None for one of full attention.

    Attributes:
        tables: Block table of every request that holds blocks, in order of admission; the first group's.
        other_tables: Their block tables in the groups after the first; empty with one group.
        num_computed: KV progress of every running request; empty without ``progress``.
        holders: The requests whose table holds a block, in order of admission, by block.
        free: Free blocks, next to be handed out first.
        cached: Blocks whose content is in the prefix cache, free or not.
        num_cached_free: Number of free blocks among them.
        touched: Blocks whose state may have changed; freed blocks stand in the order in which they were freed. A user
            who needs them sets this to a dict and clears it between steps; None otherwise.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int | None,
        keyframe: Keyframe | None,
        *,
        progress: bool,
        groups: Sequence[KVCacheGroup] | None = None,
    ) -> None:
        if keyframe is None:
            keyframe = Keyframe(0, free_block_ids=tuple(range(1, num_blocks or 1)))
        self._block_size = block_size
        self._progress = progress
        self._groups = groups or (KVCacheGroup(block_size=block_size),)
        self.tables = {request_id: list(table) for request_id, table in keyframe.block_tables.items()}
        self.other_tables = {
            request_id: [list(table) for table in tables] for request_id, tables in keyframe.other_tables.items()
        }
        holders: dict[int, tuple[str, ...]] = {}
        for request_id in self.tables:
            for block in self.held(request_id):
                holders[block] = holders[block] + (request_id,) if block in holders else (request_id,)
        self.holders = holders
        computed = keyframe.num_kv_computed
        self.num_computed = {request_id: computed.get(request_id, 0) for request_id in self.tables} if progress else {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(keyframe.free_block_ids)
        self.cached = set(keyframe.cached_block_ids)
        self.num_cached_free = len(self.cached.intersection(self.free))
        self.touched: dict[int, None] | None = None
        self._released: list[int] = []
        self._handed_out: list[int] = []

    @classmethod
    def at_start_of(cls, trace: Trace, *, progress: bool = True) -> BlockReplay:
        """The state before a trace's first step."""
        groups = trace.kv_cache_groups
        return cls(trace.block_size, trace.num_blocks, trace.keyframe, progress=progress, groups=groups)

    def held(self, request_id: str) -> list[int]:
        """The blocks that a request holds in all groups."""
        tables = (self.tables[request_id], *self.other_tables.get(request_id, ()))
        return [block for table in tables for block in table if block]

    @property
    def num_unused_slots(self) -> int:
        """Number of KV slots in block tables that hold no token yet (internal fragmentation)."""
        num_computed, unused = sum(self.num_computed.values()), 0
        for index, group in enumerate(self._groups):
            if group.is_attention:
                tables = (
                    self.tables.values() if not index else [tables[index - 1] for tables in self.other_tables.values()]
                )
                unused += sum(map(len, tables)) * group.block_size - num_computed
        return unused

    def keyframe(self, step: int) -> Keyframe:
        """The present state as a keyframe.

        Args:
            step: The step that follows.
        """
        return Keyframe(
            step=step,
            block_tables={request_id: tuple(table) for request_id, table in self.tables.items()},
            num_kv_computed=self.num_computed.copy(),
            free_block_ids=tuple(self.free),
            cached_block_ids=tuple(sorted(self.cached)),
            other_tables={
                request_id: tuple([tuple(table) for table in tables])
                for request_id, tables in self.other_tables.items()
            },
        )

    def schedule(self, record: StepRecord) -> None:
        """Apply a step up to the end of scheduling."""
        for request_id in (*record.aborted, *record.preempted):
            self._release(request_id)
        for chunk in [c for c in record.chunks if c.new_block_ids or c.removed or c.other_groups]:
            if chunk.removed or chunk.other_groups:
                self._change_groups(chunk)
            else:
                hits = chunk.num_cached_tokens // self._groups[0].block_size
                self._take(chunk.request_id, chunk.new_block_ids, hits)
        if self._progress:
            self.num_computed.update([(chunk.request_id, chunk.start + chunk.num_tokens) for chunk in record.chunks])
        published = record.cached_block_ids
        if record.num_cached_end:
            published = published[: -record.num_cached_end]
        self._apply(record.pool, published)

    def finish(self, record: StepRecord) -> None:
        """Apply the rest of the step."""
        for request_id in record.finished:
            self._release(request_id)
        published = record.cached_block_ids[-record.num_cached_end :] if record.num_cached_end else ()
        self._apply(record.pool_end, published)

    def _apply(self, change: PoolChange | None, published: Sequence[int]) -> None:
        """Apply what the pool did."""
        free, cached = self.free, self.cached
        if change is None:
            change = self._assumed()
        self._released.clear()
        self._handed_out.clear()
        if change is not NO_CHANGE:
            evicted, front, back = change.evicted, change.front, change.back
            for block in evicted:
                if block in cached:
                    cached.remove(block)
                    self.num_cached_free -= block in free
            for block in (*front, *back):
                if block not in free:
                    self.num_cached_free += block in cached
                    free[block] = None
            for block in reversed(front):
                free.move_to_end(block, last=False)
            for block in back:
                free.move_to_end(block)
            self._touch((*evicted, *front, *back))
        if published:
            self.num_cached_free += sum(block in free and block not in cached for block in published)
            cached.update(published)
            self._touch(published)

    def _assumed(self) -> PoolChange:
        unheld = [block for block in self._released if block not in self.holders and block not in self.free]
        return PoolChange.of(self._handed_out, back=unheld)

    def _touch(self, blocks: Iterable[int]) -> None:
        if self.touched is not None:
            for block in blocks:
                self.touched.pop(block, None)
                self.touched[block] = None

    def _change_groups(self, chunk: Chunk) -> None:
        """Apply a chunk's changes to the tables of all groups: every group gives back before any takes."""
        changes = [TableChange(chunk.new_block_ids, chunk.removed), *chunk.other_groups]
        for group, change in enumerate(changes):
            if change.removed:
                table = self._table(chunk.request_id, group)
                blocks = [table[place] for place in change.removed]
                for place in change.removed:
                    table[place] = 0
                self._let_go(chunk.request_id, blocks)
        for group, change in enumerate(changes):
            hits = chunk.num_cached_tokens // self._groups[group].block_size
            self._take(chunk.request_id, change.new_block_ids, hits, group)

    def _table(self, request_id: str, group: int) -> list[int]:
        if group == 0:
            return self.tables.setdefault(request_id, [])
        return self.other_tables.setdefault(request_id, [[] for _ in self._groups[1:]])[group - 1]

    def _take(self, request_id: str, blocks: Sequence[int], num_hits: int, group: int = 0) -> None:
        """Add blocks to a request's table; the first ``num_hits`` are prefix-cache hits."""
        free, cached, holders = self.free, self.cached, self.holders
        for block in blocks:
            if block in free:
                del free[block]
                self.num_cached_free -= block in cached
            if block:  # block 0 is never handed out: in a table it stands for no block
                holders[block] = (*holders.get(block, ()), request_id)
        self._handed_out += blocks[num_hits:]
        self._table(request_id, group).extend(blocks)
        if self.touched is not None:
            self.touched.update(dict.fromkeys(blocks))

    def _release(self, request_id: str) -> None:
        """A request no longer holds blocks."""
        self.num_computed.pop(request_id, None)
        self._let_go(request_id, self.tables.pop(request_id, ()))
        for table in self.other_tables.pop(request_id, ()):
            self._let_go(request_id, table)

    def _let_go(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request no longer holds these blocks; whether the pool has them back is another question."""
        all_holders = self.holders
        for block in reversed(blocks):
            if holders := all_holders.pop(block, ()):  # none for block 0
                place = holders.index(request_id)
                if others := holders[:place] + holders[place + 1 :]:
                    all_holders[block] = others
        self._released += reversed(blocks)
        self._touch(reversed(blocks))
