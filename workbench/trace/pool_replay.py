"""The KV pool rebuilt from the records, which hold only what changed, by the rules of vLLM's V1 block pool (0.33).

- A block is taken from the head of the free queue; what the prefix cache knew of it is forgotten then.
- A prefix-cache hit takes a block from wherever it stands in the queue, or shares it with those who hold it.
- A request that ends or is preempted gives its blocks back from the last to the first. Blocks whose content is in
  the prefix cache go to the tail of the queue, the others to its head.
- A request that ends with an error takes what nobody else holds out of the prefix cache; vLLM has no such rule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from workbench.trace.records import StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


class PoolReplay:
    """The block pool of a run, one record at a time. Never raises: what does not fit shows as a wrong count.

    Args:
        block_size: Tokens per block.
        free_block_ids: The free queue at the beginning.
        cached_block_ids: Blocks whose content is in the prefix cache.
        block_tables: Tables of the requests that hold blocks.
    """

    def __init__(
        self,
        block_size: int,
        free_block_ids: Iterable[int],
        cached_block_ids: Iterable[int] = (),
        block_tables: Iterable[tuple[str, list[int]]] = (),
    ) -> None:
        self._block_size = block_size
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(free_block_ids)
        self.cached = set(cached_block_ids)
        self.tables = dict(block_tables)
        self._num_sharers: dict[int, int] = {}  # for blocks in more than one table, tables beyond the first
        held: set[int] = set()
        for table in self.tables.values():
            for block in table:
                if block in held:
                    self._num_sharers[block] = self._num_sharers.get(block, 0) + 1
                held.add(block)
        self.num_cached_free = len(self.cached.intersection(self.free))

    @classmethod
    def at_start_of(cls, trace: Trace) -> PoolReplay:
        """The pool before a trace's first step: untouched, or as its keyframe says."""
        keyframe = trace.keyframe
        if keyframe is None:
            return cls(trace.block_size, range(1, trace.num_blocks or 1))
        tables = [(request_id, list(table)) for request_id, table in keyframe.block_tables.items()]
        return cls(trace.block_size, keyframe.free_block_ids, keyframe.cached_block_ids, tables)

    def schedule(self, record: StepRecord) -> None:
        """Apply a step up to the end of scheduling."""
        for request_id in record.aborted:
            self._release(self.tables.pop(request_id, ()))
        for request_id in record.preempted:
            table = self.tables.pop(request_id, [])
            if gained := record.unscheduled_block_ids.get(request_id):
                self._allocate(gained)
                table = [*table, *gained]
            self._release(table)
        for chunk in record.chunks:
            if new := chunk.new_block_ids:
                num_hits = chunk.num_cached_tokens // self._block_size
                self._share(new[:num_hits])
                self._allocate(new[num_hits:])
                # A new list, because keyframes keep references to the old ones.
                self.tables[chunk.request_id] = [*self.tables.get(chunk.request_id, ()), *new]
        published = record.cached_block_ids
        if published:
            self.num_cached_free += sum(block in self.free and block not in self.cached for block in published)
            self.cached.update(published)

    def finish(self, record: StepRecord) -> None:
        """Apply the rest of the step: requests that ended give their blocks back."""
        for request_id in record.finished:
            failed = record.finish_reasons.get(request_id) == "error"
            self._release(self.tables.pop(request_id, ()), keep_content=not failed)

    def _share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self.free:
                del self.free[block]
                self.num_cached_free -= block in self.cached
            else:
                self._num_sharers[block] = self._num_sharers.get(block, 0) + 1

    def _allocate(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self.cached:
                self.num_cached_free -= block in self.free
                self.cached.discard(block)
            if block in self.free:
                del self.free[block]
            else:
                self._num_sharers[block] = self._num_sharers.get(block, 0) + 1

    def _release(self, table: Sequence[int], *, keep_content: bool = True) -> None:
        tail = []
        head = []
        for block in reversed(table):
            if sharers := self._num_sharers.get(block):
                self._num_sharers[block] = sharers - 1
            else:
                if not keep_content:
                    self.cached.discard(block)
                (tail if block in self.cached else head).append(block)
        self.free.update(dict.fromkeys(tail))
        self.num_cached_free += len(tail)
        for block in reversed(head):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
