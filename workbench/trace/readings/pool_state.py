"""The KV pool at any step: the owner of each block, cached content, and the order of the free queue."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec

from workbench.base.on_demand import np, picture
from workbench.trace.errors import TraceError
from workbench.trace.fields import FrozenDict, read_only
from workbench.trace.lines import Keyframe
from workbench.trace.readings.block_replay import BlockReplay
from workbench.trace.readings.last_tokens import with_times
from workbench.trace.records import StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

Moment = Literal["scheduled", "end"]
"""A moment in a step: after scheduling, or at the end, after finished requests freed their blocks."""

RESERVED, FREE, CACHED, OWNED = range(4)
"""States of a block. RESERVED is block 0, which is never handed out; CACHED is free, but its content stays in
the prefix cache until the block is handed out again; OWNED is in a block table."""

KEYFRAME_STEPS = 64
"""Number of steps between two keyframes; larger for a large pool, because a keyframe takes up to 8 bytes per block."""


@dataclass(frozen=True, eq=False)
class PoolState:
    """Every KV block at one moment of one step. Arrays are indexed by block id.

    Attributes:
        step: The step.
        moment: "scheduled" (before finished requests freed their blocks) or "end".
        state: RESERVED, FREE, CACHED or OWNED, uint8 [num_blocks].
        owner: Index into ``request_ids`` of the request that holds the block and was admitted first; -1 for none.
            int32 [num_blocks].
        ref_count: Number of block tables that hold the block, int32 [num_blocks].
        cached: Whether the content is in the prefix cache, owned or not, bool [num_blocks].
        free_queue: Free block ids, next to be handed out first, int32 [num_free].
        block_tables: Block table of every request that holds blocks, in order of admission; the first KV cache group's.
        request_ids: Requests in order of arrival; may include requests that arrived after this step.
        other_tables: Their block tables in the groups after the first; empty with one group.
        consistent: Whether the number of free blocks equals the recorded one. False for a trace of an engine with
            other rules; the order of the free queue is not reliable then.
    """

    step: int
    moment: Moment
    state: np.ndarray
    owner: np.ndarray
    ref_count: np.ndarray
    cached: np.ndarray
    free_queue: np.ndarray
    block_tables: Mapping[str, tuple[int, ...]]
    request_ids: Sequence[str]
    consistent: bool
    other_tables: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, block 0 included."""
        return len(self.state)

    @property
    def num_free(self) -> int:
        """Number of free blocks, those with cached content included."""
        return len(self.free_queue)

    @property
    def num_cached_free(self) -> int:
        """Number of free blocks whose content is in the prefix cache."""
        return int((self.state == CACHED).sum())

    @property
    def num_owned(self) -> int:
        """Number of blocks in block tables."""
        return int((self.state == OWNED).sum())

    def owners(self, block: int) -> list[str]:
        """The requests whose block table holds the block, in order of admission."""
        names = [name for name, table in self.block_tables.items() if block in table]
        return names or [name for name, tables in self.other_tables.items() if any(block in table for table in tables)]

    def __repr__(self) -> str:
        plain = self.num_free - self.num_cached_free
        return (
            f"PoolState(step {self.step}, {self.moment}: {self.num_owned} owned, {self.num_cached_free} cached, "
            f"{plain} free of {self.num_blocks - 1} blocks)"
        )

    def _repr_html_(self) -> str | None:
        return picture("PoolState", self)


class _CompactKeyframe:
    """The state of a replay in 4 bytes per block id, which a seek reads faster than a tuple."""

    def __init__(self, replay: BlockReplay) -> None:
        self._free, self._cached = array("i", replay.free), array("i", replay.cached)
        self._tables = {request_id: tuple(table) for request_id, table in replay.tables.items()}
        self._others = {rid: tuple([tuple(table) for table in tables]) for rid, tables in replay.other_tables.items()}

    def replay(self, trace: Trace) -> BlockReplay:
        free, cached = (tuple(block_ids) for block_ids in (self._free, self._cached))
        keyframe = Keyframe(0, self._tables, free_block_ids=free, cached_block_ids=cached, other_tables=self._others)
        return BlockReplay(trace.block_size, None, keyframe, progress=False, groups=trace.kv_cache_groups)


class PoolHistory:
    """The pool at every step of a trace, growing or not. A seek replays the steps since the nearest keyframe.

    Args:
        trace: A whole trace, not a slice.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._num_blocks = trace.num_blocks or 0
        self._interval = max(KEYFRAME_STEPS, self._num_blocks // KEYFRAME_STEPS)
        self._request_ids: tuple[str, ...] = ()
        self._request_index: dict[str, int] = {}
        self._lock = threading.Lock()
        self._replay = BlockReplay.at_start_of(trace, progress=False)
        self._num_applied = 0
        self._keyframes = [_CompactKeyframe(self._replay)]
        self._latest: dict[tuple[int, Moment], PoolState] = {}

    def state(self, index: int, moment: Moment = "scheduled") -> PoolState:
        """The pool at the step with this index in the trace.

        Raises:
            TraceError: The trace does not say how many blocks its pool has.
            ValueError: ``moment`` is neither "scheduled" nor "end".
        """
        if not self._num_blocks:
            raise TraceError("the trace's config has no num_blocks: the KV pool cannot be drawn without its size")
        if moment not in ("scheduled", "end"):
            raise ValueError(f'moment must be "scheduled" or "end", got {moment!r}')
        with self._lock:
            if (index, moment) not in self._latest:
                self._seek(index)
                record = self._trace[index]
                self._replay.schedule(record)
                scheduled = self._snapshot(record, "scheduled") if moment == "scheduled" else None
                self._replay.finish(record)
                self._applied()
                self._latest = {(index, moment): scheduled or self._snapshot(record, "end")}
            return self._latest[index, moment]

    def keyframe_before(self, index: int) -> Keyframe:
        """The scheduler's state before a step, so that a trace can begin there."""
        with self._lock:
            self._seek(index)
            keyframe = with_times(self._replay.keyframe(self._trace[index].step), self._trace)
            return msgspec.structs.replace(keyframe, num_kv_computed=self._progress_before(index))

    def _progress_before(self, index: int) -> dict[str, int]:
        """KV progress of the requests that hold blocks before a step, from their latest chunks."""
        tables = self._replay.tables
        computed: dict[str, int] = {}
        for position in range(index - 1, -1, -1):
            for chunk in self._trace[position].chunks:
                if chunk.request_id in tables:
                    computed.setdefault(chunk.request_id, chunk.end)
            if len(computed) == len(tables):
                return computed
        before = self._trace.keyframe.num_kv_computed if self._trace.keyframe else {}  # not scheduled since
        return {request_id: before[request_id] for request_id in tables if request_id in before} | computed

    def _seek(self, index: int) -> None:
        """Move the replay to the end of the step before ``index``."""
        nearest = min(index // self._interval, len(self._keyframes) - 1)
        if self._num_applied > index or nearest * self._interval > self._num_applied:
            self._replay = self._keyframes[nearest].replay(self._trace)
            self._num_applied = nearest * self._interval
        while self._num_applied < index:
            record = self._trace[self._num_applied]
            self._replay.schedule(record)
            self._replay.finish(record)
            self._applied()

    def _applied(self) -> None:
        self._num_applied += 1
        if self._num_applied == len(self._keyframes) * self._interval:
            self._keyframes.append(_CompactKeyframe(self._replay))

    def _snapshot(self, record: StepRecord, moment: Moment) -> PoolState:
        requests = self._trace.requests
        if len(self._request_ids) < len(requests):
            new = tuple(requests)[len(self._request_ids) :]
            self._request_index.update((rid, len(self._request_ids) + i) for i, rid in enumerate(new))
            self._request_ids += new
        replay = self._replay
        free = np.fromiter(replay.free, np.int32, len(replay.free))
        cached = np.zeros(self._num_blocks, bool)
        cached[np.fromiter(replay.cached, np.int64, len(replay.cached))] = True
        tables = {request_id: tuple(table) for request_id, table in replay.tables.items()}
        own = {request_id: replay.held(request_id) for request_id in tables}
        blocks = np.fromiter(chain.from_iterable(own.values()), np.int64)
        holders = np.array([self._request_index.get(request_id, -1) for request_id in tables], np.int32)
        owner = np.full(self._num_blocks, -1, np.int32)
        # In reverse, so that the first owner is written last.
        owner[blocks[::-1]] = np.repeat(holders, [len(table) for table in own.values()])[::-1]
        state = np.full(self._num_blocks, OWNED, np.uint8)
        state[free] = np.where(cached[free], CACHED, FREE)
        state[0] = RESERVED
        expected = record.free_blocks if moment == "scheduled" else record.free_blocks_end
        others = {name: tuple([tuple(table) for table in held]) for name, held in replay.other_tables.items()}
        return PoolState(
            step=record.step,
            moment=moment,
            state=read_only(state),
            owner=read_only(owner),
            ref_count=read_only(np.bincount(blocks, minlength=self._num_blocks).astype(np.int32)),
            cached=read_only(cached),
            free_queue=read_only(free),
            block_tables=FrozenDict(tables),
            request_ids=self._request_ids,
            consistent=len(free) == expected,
            other_tables=FrozenDict(others),
        )


def _history(trace: Trace) -> PoolHistory:
    return trace.whole.reading("pool", PoolHistory)


def pool_state(trace: Trace, index: int, moment: Moment = "scheduled") -> PoolState:
    """The state of every KV block at a step.

    Args:
        trace: The trace.
        index: Index into the trace; negative counts from the end.
        moment: "scheduled" for the state after scheduling, in which the step's tables hold; "end" for the state after
            finished requests gave their blocks back.

    Raises:
        IndexError: There is no such step.
    """
    try:
        place = trace.offset + range(len(trace))[index]
    except IndexError:
        raise IndexError(f"step {index} of a trace of {len(trace)} steps") from None
    return _history(trace).state(place, moment)


def keyframe_before(trace: Trace, index: int) -> Keyframe:
    """The scheduler's memory before a step of the trace.

    Args:
        trace: The trace.
        index: Index into the trace; negative counts from the end.

    Raises:
        IndexError: There is no such step.
    """
    return _history(trace).keyframe_before(trace.offset + range(len(trace))[index])
