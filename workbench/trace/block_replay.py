"""Replay the KV blocks of a run from its records, which hold only changes.

The rules are those of vLLM's V1 block pool (0.33), but for the last one, which vLLM does not have:

- A new block is taken from the head of the free queue, and its content is evicted from the prefix cache.
- A prefix-cache hit takes a block from any place in the queue, or shares it with the requests that hold it.
- A request that ends or is preempted frees its blocks from the last to the first. Cached blocks go to the tail of the
  queue, the others to its head.
- The blocks that only a failed request holds leave the prefix cache.

With several KV cache groups a request frees its tables one after another, and the blocks that no later row reads at the
beginning of its chunk. If a step both preempts and removes such blocks, the order of the free queue can differ from the
scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.lines import Keyframe
from workbench.trace.records import Chunk, StepRecord, TableChange

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


class BlockReplay:
    """Follow block tables, holders, prefix cache and free queue, one record at a time.

    Nothing raises: a run with other rules shows as a wrong number of free blocks.

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
        for request_id in record.aborted:
            self._release(request_id)
        for request_id in record.preempted:
            if gained := record.unscheduled_block_ids.get(request_id):
                self._take(request_id, gained, 0)
            for group, change in enumerate(record.unscheduled_changes.get(request_id, ()), 1):
                self._take(request_id, change.new_block_ids, 0, group)
            self._release(request_id)
        for chunk in record.chunks:
            if chunk.removed or chunk.other_groups:
                self._change_groups(chunk)
            elif chunk.new_block_ids:
                hits = chunk.num_cached_tokens // self._groups[0].block_size
                self._take(chunk.request_id, chunk.new_block_ids, hits)
        if self._progress:
            self.num_computed.update([(chunk.request_id, chunk.start + chunk.num_tokens) for chunk in record.chunks])
        if published := record.cached_block_ids:
            self.num_cached_free += sum(block in self.free and block not in self.cached for block in published)
            self.cached.update(published)
            if self.touched is not None:
                self.touched.update(dict.fromkeys(published))

    def finish(self, record: StepRecord) -> None:
        """Apply the rest of the step: finished requests free their blocks."""
        for request_id in record.finished:
            self._release(request_id, keep_content=record.finish_reasons.get(request_id) != "error")

    def _change_groups(self, chunk: Chunk) -> None:
        """Apply a chunk's changes to the tables of all groups: every group gives back before any takes."""
        changes = [TableChange(chunk.new_block_ids, chunk.removed), *chunk.other_groups]
        for group, change in enumerate(changes):
            if change.removed:
                table = self._table(chunk.request_id, group)
                blocks = [table[place] for place in change.removed]
                for place in change.removed:
                    table[place] = 0
                self._give_back(chunk.request_id, blocks)
        for group, change in enumerate(changes):
            hits = chunk.num_cached_tokens // self._groups[group].block_size
            self._take(chunk.request_id, change.new_block_ids, hits, group)

    def _table(self, request_id: str, group: int) -> list[int]:
        if group == 0:
            return self.tables.setdefault(request_id, [])
        return self.other_tables.setdefault(request_id, [[] for _ in self._groups[1:]])[group - 1]

    def _take(self, request_id: str, blocks: Sequence[int], num_hits: int, group: int = 0) -> None:
        """Add blocks to a request's table; the first ``num_hits`` are prefix-cache hits."""
        free, cached, holders, holder = self.free, self.cached, self.holders, (request_id,)
        for index, block in enumerate(blocks):
            if block in cached:
                self.num_cached_free -= block in free
                if index >= num_hits:
                    cached.discard(block)
            if block in free:
                del free[block]
                holders[block] = holder
            elif block:  # block 0 is never handed out: in a table it stands for no block
                holders[block] = holders.get(block, ()) + holder
        self._table(request_id, group).extend(blocks)
        if self.touched is not None:
            self.touched.update(dict.fromkeys(blocks))

    def _release(self, request_id: str, *, keep_content: bool = True) -> None:
        self.num_computed.pop(request_id, None)
        self._give_back(request_id, self.tables.pop(request_id, []), keep_content=keep_content)
        for table in self.other_tables.pop(request_id, ()):
            self._give_back(request_id, table, keep_content=keep_content)

    def _give_back(self, request_id: str, table: Sequence[int], *, keep_content: bool = True) -> None:
        """Free the blocks of a table, or of a part of it, from the last to the first."""
        cached, all_holders = self.cached, self.holders
        tail: list[int] = []
        head: list[int] = []
        for block in reversed(table):
            holders = all_holders.pop(block, ())
            if not holders:
                continue  # block 0
            if len(holders) > 1:
                place = holders.index(request_id)
                all_holders[block] = holders[:place] + holders[place + 1 :]
            elif block not in cached:
                head.append(block)
            elif keep_content:
                tail.append(block)
            else:
                cached.discard(block)
                head.append(block)
        self.free.update(dict.fromkeys(tail))
        self.num_cached_free += len(tail)
        for block in reversed(head):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
        if self.touched is not None:
            for block in reversed(table):
                self.touched.pop(block, None)
                self.touched[block] = None
