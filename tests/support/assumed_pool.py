"""The changes of the pool of KV blocks that follow from the tables of a trace: an oracle for what records say of it.

The rules are those of vLLM's V1 block pool (0.33), but for the last one, which vLLM does not have:

- A new block is taken from the head of the free queue, and its content is evicted from the prefix cache.
- A request that ends or is preempted frees its blocks from the last to the first. Cached blocks go to the end of the
  queue, the others to its beginning. So do blocks that no later row reads, at the beginning of a chunk.
- The blocks that only a failed request holds leave the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.lines import Keyframe
from workbench.trace.pool_change import PoolLog
from workbench.trace.records import StepRecord, TableChange


class AssumedPool:
    """Follows the tables of a trace and adds to each record what its pool must have done.

    Args:
        groups: The KV cache groups of the trace.
    """

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self._groups = groups
        self._tables: dict[str, list[list[int]]] = {}
        self._counts: Counter[int] = Counter()
        self._cached: set[int] = set()
        self._log = PoolLog()

    def start_from(self, keyframe: Keyframe) -> None:
        """Begin in the middle of a run."""
        self._cached.update(keyframe.cached_block_ids)
        for request_id, table in keyframe.block_tables.items():
            tables = (table, *keyframe.other_tables.get(request_id, ()))
            self._take(request_id, [TableChange(tuple(its)) for its in tables], None)

    def complete(self, record: StepRecord) -> StepRecord:
        """The record with the changes of the pool."""
        for request_id in record.aborted:
            self._release(request_id)
        for request_id in record.preempted:
            gained = [TableChange(record.unscheduled_block_ids.get(request_id, ()))]
            self._take(request_id, [*gained, *record.unscheduled_changes.get(request_id, ())], 0)
            self._release(request_id)
        for chunk in record.chunks:
            changes = [TableChange(chunk.new_block_ids, chunk.removed), *chunk.other_groups]
            for table, change in zip(self._tables.get(chunk.request_id, ()), changes):
                places = [place for place in change.removed if place < len(table)]
                self._give_back([table[place] for place in places])
                for place in places:
                    table[place] = 0
            self._take(chunk.request_id, changes, chunk.num_cached_tokens)
        self._cached.update(record.cached_block_ids)
        pool = self._log.take(self._is_free)
        for request_id in record.finished:
            self._release(request_id, keep_cached=record.finish_reasons.get(request_id) != "error")
        return msgspec.structs.replace(record, pool=pool, pool_end=self._log.take(self._is_free))

    def _is_free(self, block: int) -> bool:
        return block not in self._counts

    def _take(self, request_id: str, changes: Sequence[TableChange], num_cached_tokens: int | None) -> None:
        """Add blocks to tables; those behind the tokens of a hit lose their content, None for none of them."""
        tables = self._tables.setdefault(request_id, [[] for _ in self._groups])
        for group, table, change in zip(self._groups, tables, changes):
            blocks = change.new_block_ids
            table += blocks
            self._counts.update(filter(None, blocks))
            for block in () if num_cached_tokens is None else blocks[num_cached_tokens // group.block_size :]:
                if block in self._cached:
                    self._cached.remove(block)
                    self._log.evict(block)

    def _release(self, request_id: str, *, keep_cached: bool = True) -> None:
        for table in self._tables.pop(request_id, ()):
            self._give_back(table, keep_cached=keep_cached)

    def _give_back(self, table: Sequence[int], *, keep_cached: bool = True) -> None:
        front: list[int] = []
        back: list[int] = []
        for block in filter(None, reversed(table)):
            self._counts[block] -= 1
            if self._counts[block] > 0:
                continue
            del self._counts[block]
            if not keep_cached and block in self._cached:
                self._cached.remove(block)
                self._log.evict(block)
            (back if block in self._cached else front).append(block)
        self._log.give_back(front, back)
