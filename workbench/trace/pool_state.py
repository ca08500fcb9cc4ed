"""The KV pool at any step: who owns each block, what is cached, what comes next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from workbench.trace import display
from workbench.trace.checks import TraceError
from workbench.trace.pool_replay import PoolReplay
from workbench.trace.records import Keyframe, StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

Moment = Literal["scheduled", "end"]
"""When in a step: after scheduling, or after finished requests gave their blocks back."""

RESERVED, FREE, CACHED, OWNED = range(4)
"""States of a block. RESERVED is block 0, which is never handed out; CACHED is free with content that a request
may still find, until the block is handed out again; OWNED is in a block table."""

KEYFRAME_STEPS = 64
"""Steps between two keyframes, more where the pool is large: a keyframe costs up to 8 bytes per block."""


@dataclass(frozen=True, eq=False)
class PoolState:
    """Every KV block at one moment of one step. Arrays are indexed by block id.

    Attributes:
        step: The step.
        moment: "scheduled" (before finished requests gave their blocks back) or "end".
        state: RESERVED, FREE, CACHED or OWNED, uint8 [num_blocks].
        owner: Index into ``request_ids`` of the request that holds the block and was admitted first; -1 for none.
            int32 [num_blocks].
        ref_count: Block tables that hold the block, int32 [num_blocks].
        cached: Content is in the prefix cache, owned or not, bool [num_blocks].
        free_queue: Free block ids, next to be handed out first, int32 [num_free].
        block_tables: Block table of every request that holds blocks, in order of admission.
        request_ids: Requests in order of arrival; may be longer than it was at this step.
        consistent: The number of free blocks is the one that was recorded. False for a trace of an engine with
            other rules, whose queue order is then not to be relied on either.
    """

    step: int
    moment: Moment
    state: np.ndarray
    owner: np.ndarray
    ref_count: np.ndarray
    cached: np.ndarray
    free_queue: np.ndarray
    block_tables: dict[str, tuple[int, ...]]
    request_ids: Sequence[str]
    consistent: bool

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, block 0 included."""
        return len(self.state)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those with cached content included."""
        return len(self.free_queue)

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose content can still be found."""
        return int((self.state == CACHED).sum())

    @property
    def num_owned(self) -> int:
        """Blocks in a block table."""
        return int((self.state == OWNED).sum())

    def owners(self, block: int) -> list[str]:
        """Requests whose table holds the block, in order of admission."""
        return [request_id for request_id, table in self.block_tables.items() if block in table]

    def __repr__(self) -> str:
        plain = self.num_free - self.num_cached_free
        return (
            f"PoolState(step {self.step}, {self.moment}: {self.num_owned} owned, {self.num_cached_free} cached, "
            f"{plain} free of {self.num_blocks - 1} blocks)"
        )

    def _repr_html_(self) -> str | None:
        return display.html("pool", self)


class _ReplayKeyframe:
    """A replay's state after a number of steps, kept small."""

    def __init__(self, replay: PoolReplay) -> None:
        self._free = np.fromiter(replay.free, np.int32, len(replay.free))
        self._cached = np.fromiter(replay.cached, np.int32, len(replay.cached))
        self._tables = tuple(replay.tables.items())

    def replay(self, block_size: int) -> PoolReplay:
        return PoolReplay(block_size, self._free.tolist(), self._cached.tolist(), self._tables)


class PoolHistory:
    """The pool at every step of a trace, growing or not. Seeking costs at most the steps since a keyframe.

    Args:
        trace: A whole trace, not a slice.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._num_blocks = trace.num_blocks or 0
        self._interval = max(KEYFRAME_STEPS, self._num_blocks // KEYFRAME_STEPS)
        self._request_ids: list[str] = []
        self._request_index: dict[str, int] = {}
        self._lock = threading.Lock()
        self._replay = PoolReplay.at_start_of(trace)
        self._num_applied = 0
        self._keyframes = [_ReplayKeyframe(self._replay)]
        self._latest: dict[tuple[int, Moment], PoolState] = {}

    def state(self, index: int, moment: Moment = "scheduled") -> PoolState:
        """The pool at a step, by its index in the trace.

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
        """The scheduler's memory before a step, to begin a trace there."""
        with self._lock:
            self._seek(index)
            tables = {request_id: tuple(table) for request_id, table in self._replay.tables.items()}
            computed: dict[str, int] = {}
            for position in range(index - 1, -1, -1):
                for chunk in self._trace[position].chunks:
                    if chunk.request_id in tables:
                        computed.setdefault(chunk.request_id, chunk.end)
                if len(computed) == len(tables):
                    break
            if self._trace.keyframe is not None:  # for who has not been scheduled since the trace began
                before = self._trace.keyframe.num_kv_computed
                computed = {name: before[name] for name in tables if name in before} | computed
            return Keyframe(
                step=self._trace[index].step,
                block_tables=tables,
                num_kv_computed=computed,
                free_block_ids=tuple(self._replay.free),
                cached_block_ids=tuple(sorted(self._replay.cached)),
            )

    def _seek(self, index: int) -> None:
        """Bring the replay to the end of the step before ``index``."""
        nearest = min(index // self._interval, len(self._keyframes) - 1)
        if self._num_applied > index or nearest * self._interval > self._num_applied:
            self._replay = self._keyframes[nearest].replay(self._trace.block_size)
            self._num_applied = nearest * self._interval
        while self._num_applied < index:
            record = self._trace[self._num_applied]
            self._replay.schedule(record)
            self._replay.finish(record)
            self._applied()

    def _applied(self) -> None:
        self._num_applied += 1
        if self._num_applied == len(self._keyframes) * self._interval:
            self._keyframes.append(_ReplayKeyframe(self._replay))

    def _snapshot(self, record: StepRecord, moment: Moment) -> PoolState:
        requests = self._trace.requests
        if len(self._request_ids) < len(requests):
            new = tuple(requests)[len(self._request_ids) :]
            self._request_index.update((rid, len(self._request_ids) + i) for i, rid in enumerate(new))
            self._request_ids.extend(new)
        replay = self._replay
        free = np.fromiter(replay.free, np.int32, len(replay.free))
        cached = np.zeros(self._num_blocks, bool)
        cached[np.fromiter(replay.cached, np.int64, len(replay.cached))] = True
        owner = np.full(self._num_blocks, -1, np.int32)
        ref_count = np.zeros(self._num_blocks, np.int32)
        for request_id, table in reversed(replay.tables.items()):  # the first owner is written last
            blocks = np.asarray(table, np.int64)
            owner[blocks] = self._request_index.get(request_id, -1)
            np.add.at(ref_count, blocks, 1)
        state = np.full(self._num_blocks, OWNED, np.uint8)
        state[free] = np.where(cached[free], CACHED, FREE)
        state[0] = RESERVED
        expected = record.free_blocks if moment == "scheduled" else record.free_blocks_end
        return PoolState(
            step=record.step,
            moment=moment,
            state=state,
            owner=owner,
            ref_count=ref_count,
            cached=cached,
            free_queue=free,
            block_tables={request_id: tuple(table) for request_id, table in replay.tables.items()},
            request_ids=self._request_ids,
            consistent=len(free) == expected,
        )
