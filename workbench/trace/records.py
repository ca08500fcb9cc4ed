"""The record of one step: the chosen tokens with the reasons, their places in memory, and the result.

Every view, metric and export reads these records and nothing else. A record is small because it holds *changes*: a
chunk carries the KV blocks that were added to its request's block table in this step. The full table is still at hand
(`StepRecord.block_tables`), because lists of blocks only ever grow: a record keeps a reference to the request's
append-only list and the length that the list had. A preempted request starts a new list when it resumes, and a table
whose places become 0 is a new list too.

A record never changes. Facts that become known after a step has ended are lines of the trace (`Supplement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec

from workbench.base.on_demand import find, np, picture
from workbench.base.short_repr import short_repr
from workbench.trace.fields import (
    EMPTY,
    BlockId,
    Count,
    DraftId,
    FrozenDict,
    Offset,
    Rows,
    Seconds,
    TokenId,
    Tokens,
    V,
    Window,
    read_only,
)
from workbench.trace.pool_change import NO_CHANGE, PoolChange
from workbench.trace.reasons import UNKNOWN, Reason

if TYPE_CHECKING:
    from workbench.trace.kv_groups import KVCacheGroup

    StatedReason = Reason
else:  # in a file, the number n stands for the n-th different reason of its mapping, counted from 0
    StatedReason = Reason | Count

MAX_MASK_CELLS = 2**28
"""Maximum size of an attention mask that is built, in cells (256 MiB)."""

Arm = Literal["decode", "new_final", "intermediate", "cached_final"]
"""The role of a chunk in its request: what follows after the forward pass.

``decode``: one new token of a request whose prefill is complete; samples.
``new_final``: the whole remaining prompt of a request first scheduled in this step; samples.
``intermediate``: a prompt chunk with more prompt to follow; samples nothing.
``cached_final``: the last chunk of a prompt, of a request admitted in an earlier step (or resumed); samples. "Cached"
means that its earlier chunks are in the KV cache; it has nothing to do with the prefix cache.
"""

LimitedBy = Literal[
    "complete",
    "token_budget",
    "long_prefill_token_threshold",
    "partial_prefill_slot",
    "max_model_len",
    "policy",
    "state_boundary",
    "kv_blocks",
]
"""Why a chunk is not longer. ``complete`` means it reaches the request's last known token, ``state_boundary`` that it
ends where the state of recurrent layers can be cached, ``kv_blocks`` that no more blocks are free for a request that is
served frugally (docs/limits.md)."""


class Frozen(msgspec.Struct, frozen=True):
    """A struct whose mappings never change either: it takes copies of those that somebody else may hold.

    Attributes:
        mappings: Names of the fields that are mappings.
    """

    _mappings: ClassVar[tuple[str, ...]] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in self._mappings:
            if type(value := getattr(self, name)) is not FrozenDict:
                msgspec.structs.force_setattr(self, name, FrozenDict(value) if value else EMPTY)


class TableChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The change that a step made to one block table of a request.

    Attributes:
        new_block_ids: Entries appended; 0 for a place whose block is not held.
        removed: Places that became 0: their blocks were given back, or moved to the end of the table.
    """

    new_block_ids: tuple[BlockId, ...] = ()
    removed: tuple[Count, ...] = ()


class Layout(NamedTuple):
    """The KV cache group whose slots a record shows: the first one of attention.

    Attributes:
        group: Its index; None when no group is of attention.
        block_size: Tokens per block of it.
        window: Tokens that a row of it may attend to, itself included; 0 for all up to itself.
        windows: The same for each group; None for recurrent state, which has no mask.
    """

    group: int | None
    block_size: int
    window: int = 0
    windows: tuple[int | None, ...] = (0,)

    @classmethod
    def of(cls, groups: Sequence[KVCacheGroup], block_size: int) -> Layout:
        """That of some groups; without one of attention it has this block size."""
        windows = tuple([group.sliding_window if group.is_attention else None for group in groups])
        for index, group in enumerate(groups):
            if group.is_attention:
                return cls(index, group.block_size, group.sliding_window, windows)
        return cls(None, block_size, windows=windows)


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens ``[start, start + num_tokens)`` of one request, computed in one step.

    Attributes:
        request_id: The request.
        start: ``num_kv_computed`` of the request before the step.
        num_tokens: Rows of the packed batch that belong to this chunk.
        is_partial_prefill: More of the prompt follows in a later step.
        arm: Role of the chunk: what follows after the forward pass, see `Arm`.
        sampled: The sampled token id, None if the chunk samples nothing.
        limited_by: Why the chunk is not longer.
        new_block_ids: Physical KV blocks appended to the block table in this step. For a request admitted or
            resumed in this step this is the whole table, prefix-cache hits first.
        num_cached_tokens: Tokens found in the prefix cache at this admission (0 when not admitted in this step).
        num_recomputed_tokens: Tokens of this chunk that had been computed before a preemption freed their KV blocks.
        text: Text that this step's tokens added to the output ("" without a tokenizer).
        drafts: Draft tokens in the last rows of this chunk, behind the known token; -1 for one that was not known.
        sampled_before: Tokens that this step appended before ``sampled``: accepted drafts.
        num_accepted: Drafts that were accepted, those cut off behind the end of the request included.
        ahead: Rejected drafts that ``start`` still counts, because with asynchronous scheduling a step is scheduled
            before the drafts of the step before are verified. The rows that ran begin at ``start - ahead``.
        discarded: The request had ended in the meantime, and the output of this chunk was thrown away.
        removed: Places of the first group's block table that became 0 in this step: their blocks were given back.
        other_groups: The changes of the block tables of the KV cache groups after the first.
    """

    request_id: str
    start: Tokens
    num_tokens: Rows
    is_partial_prefill: bool
    arm: Arm
    sampled: TokenId | None
    limited_by: LimitedBy
    new_block_ids: tuple[BlockId, ...] = ()
    num_cached_tokens: Tokens = 0
    num_recomputed_tokens: Tokens = 0
    text: str = ""
    drafts: tuple[DraftId, ...] = ()
    sampled_before: tuple[TokenId, ...] = ()
    num_accepted: Tokens = 0
    ahead: Tokens = 0
    discarded: bool = False
    removed: tuple[Count, ...] = ()
    other_groups: tuple[TableChange, ...] = ()

    __repr__ = short_repr

    @property
    def accepted(self) -> tuple[int, ...]:
        """Tokens that this step appended to the output, in order: accepted drafts, and the token after them.

        They define a request's output: those of all its chunks, in order, are ``RequestOutput.token_ids``, however the
        request ends. ``sampled`` alone lacks the accepted drafts. ``text`` is what was known in the step: together, the
        texts can end with the beginning of a stop string, which the output drops once the rest of it comes, and lack a
        last character that is incomplete.
        """
        return () if self.sampled is None else (*self.sampled_before, self.sampled)

    @property
    def first_position(self) -> int:
        """Position of the first row that ran."""
        return self.start - self.ahead

    @property
    def num_kv(self) -> int:
        """Length of the request's KV as its last row saw it."""
        return self.start - self.ahead + self.num_tokens

    @property
    def end(self) -> int:
        """``num_kv_computed`` of the request after the step."""
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """True for a decode row."""
        return self.arm == "decode"


class Load(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """KV that was loaded from the second tier into blocks of the pool.

    Attributes:
        request_id: The request whose tokens it belongs to.
        hit_ids: The blocks of its prefix that were in the pool, in the places before.
        block_ids: The blocks, in order. They are in the step's ``cached_block_ids``.
    """

    request_id: str
    hit_ids: tuple[BlockId, ...]
    block_ids: tuple[BlockId, ...]


class WorkItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One item of the attention work list: some query rows of a sequence against a range of its KV.

    Attributes:
        seq: Index of the sequence in the packed batch (its chunk's index).
        q_start: First query row, counted in the packed batch.
        num_rows: Query rows of the item.
        kv_start: First KV position read.
        kv_end: One past the last KV position read.
        split: Index of this KV split; partial results of a row are merged when there is more than one.
        num_splits: KV splits of these query rows.
    """

    seq: Count
    q_start: Tokens
    num_rows: Rows
    kv_start: Tokens
    kv_end: Tokens
    split: Count = 0
    num_splits: Rows = 1


class KernelLaunch(Frozen, frozen=True, omit_defaults=True):
    """The launch of a step's attention kernel; it is the same for every layer with the same window.

    Attributes:
        backend: Name of the attention backend that ran.
        grid: Launch grid in threads (x, y, z); empty if the backend has no grid.
        threadgroup: Threads per threadgroup (x, y, z); empty if there are none.
        block_q: Maximum number of query rows per work item.
        block_kv: KV positions per inner tile.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements per head.
        dtype: Element type of q and of the KV cache, such as "float32".
        windows: Sliding window of each layer, -1 for full attention; a single entry when all layers agree.
        work_items: The work list of the layers whose window is ``windows[0]``.
        details: Further facts of a backend (measured bytes, a self-test's result), by name.
    """

    backend: str
    grid: tuple[Count, ...] = ()
    threadgroup: tuple[Count, ...] = ()
    block_q: Count = 1
    block_kv: Count = 1
    num_heads: Count = 0
    num_kv_heads: Count = 0
    head_dim: Count = 0
    dtype: str = ""
    windows: tuple[Window, ...] = (-1,)
    work_items: tuple[WorkItem, ...] = ()
    details: Mapping[str, Any] = EMPTY
    _mappings = ("details",)


class Phase(NamedTuple):
    """A part of a step's work, in seconds since the start of the trace."""

    name: str
    begin: Seconds
    end: Seconds


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a request in a step, with its reason: a row of the event log."""

    step: int
    kind: Literal["arrive", "admit", "resume", "preempt", "finish", "abort"]
    request_id: str
    reason: str = ""


class StepRecord(Frozen, frozen=True, omit_defaults=True, dict=True, tag="step", tag_field="kind"):
    """One engine step. Immutable: mappings are copied and frozen. All sequences are in scheduling order.

    With asynchronous scheduling a record is one iteration: what was scheduled in it (batch k), what ended at its end
    with the output of batch k - 1 (``finished``, ``free_blocks_end``), and the tokens of batch k itself, which are
    known an iteration later. A record is made when it is complete.

    Attributes:
        step: Index of the step.
        time: Start of the step in seconds since the start of the trace; 0 without a clock. An asynchronous step begins
            when the one before it ends (`workbench.trace.step_span`).
        end: The moment at which its tokens existed, on the same clock; by default the end of its phases.
        chunks: The scheduled chunks, in scheduling order; ``chunks[i]`` is sequence ``i`` of the packed batch.
        arrived: Requests added since the previous step.
        admitted: Requests taken from the waiting queue for the first time.
        resumed: Preempted requests taken back from the waiting queue.
        preempted: Requests that lost their KV blocks, in order.
        finished: Requests that ended with this step, in order.
        aborted: Requests aborted before this step was scheduled.
        running: Running requests after scheduling, in admission order.
        waiting: Waiting requests after scheduling, in queue order.
        waiting_reason: Why the waiting requests that are not named in ``passed_over`` were left out; None if the record
            does not know, or none wait.
        passed_over: Individual reasons for waiting requests that ``waiting_reason`` does not explain.
        finish_reasons: "length", "stop", "error" or "abort" for each request in ``finished``.
        preempt_reasons: Why each request in ``preempted`` was chosen.
        unscheduled_block_ids: Blocks that a request in ``preempted`` had been given in this very step, before it was
            taken out of the batch again; they are in no chunk. It may have needed none.
        unscheduled_changes: The same for the KV cache groups after the first.
        free_blocks: Free KV blocks after scheduling, before the blocks of finished requests are freed.
        free_blocks_end: Free KV blocks after the step.
        cached_block_ids: Blocks whose content was published to the prefix cache in this step.
        withdrawn_block_ids: Blocks that were published in this step and withdrawn again, because their chunk was taken
            out of the batch.
        loads: KV that came from the second tier before anything was scheduled (``EngineConfig.second_tier``).
        pool: The blocks that were evicted and given back since the step before, up to the end of scheduling; None if
            the recorder could not know.
        pool_end: The same for the rest of the step.
        num_cached_end: Of ``cached_block_ids``, the last ones that were published after scheduling, with the output.
        token_budget: ``max_num_batched_tokens`` in force.
        long_prefill_cap: Maximum length of a prefill chunk in this step, 0 for none.
        timings: Seconds of each phase, in order: "schedule", "wait", "prepare", "forward", "sample", "draft", "update",
            or others.
        phase_starts: Start of each phase that begins neither where the one before it ends nor, if that is earlier, at
            ``time``: in seconds after ``time``. An asynchronous step is scheduled before its beginning.
        kernel: The launch of the attention kernel; None in a simulation.
    """

    step: Count
    time: Seconds = 0.0
    chunks: tuple[Chunk, ...] = ()
    arrived: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    waiting_reason: Reason | None = None
    passed_over: Mapping[str, StatedReason] = EMPTY
    finish_reasons: Mapping[str, str] = EMPTY
    preempt_reasons: Mapping[str, StatedReason] = EMPTY
    unscheduled_block_ids: Mapping[str, tuple[BlockId, ...]] = EMPTY
    unscheduled_changes: Mapping[str, tuple[TableChange, ...]] = EMPTY
    free_blocks: Count = 0
    free_blocks_end: Count = 0
    cached_block_ids: tuple[BlockId, ...] = ()
    withdrawn_block_ids: tuple[BlockId, ...] = ()
    loads: tuple[Load, ...] = ()
    pool: PoolChange | None = NO_CHANGE
    pool_end: PoolChange | None = NO_CHANGE
    num_cached_end: Count = 0
    token_budget: Count = 0
    long_prefill_cap: Count = 0
    timings: Mapping[str, Seconds] = EMPTY
    kernel: KernelLaunch | None = None
    end: Seconds = 0.0
    phase_starts: Mapping[str, Offset] = EMPTY

    _mappings = (
        "passed_over",
        "finish_reasons",
        "preempt_reasons",
        "unscheduled_block_ids",
        "unscheduled_changes",
        "timings",
        "phase_starts",
    )

    def __post_init__(self) -> None:
        for name, value in zip(self._mappings, _mappings_of(self)):  # of a million records: faster than getattr
            if type(value) is not FrozenDict:
                msgspec.structs.force_setattr(self, name, FrozenDict(value) if value else EMPTY)
        if not self.end and (self.time or self.timings):
            msgspec.structs.force_setattr(self, "end", self.end_of_phases)

    # -- block tables: attached when the record is made by a scheduler or loaded into a trace ------------------

    def attach_block_tables(self, layout: Layout | int, tables: Sequence[list[int]]) -> None:
        """Give the record its full block tables. Called once, by the scheduler or by a trace that is loaded.

        Args:
            layout: The only KV cache group, or its block size.
            tables: For each chunk the request's append-only list of block ids; the present length is kept.
        """
        attached = self.__dict__
        attached["_layout"] = Layout(0, layout) if isinstance(layout, int) else layout
        # Two tuples rather than one of pairs: the cyclic garbage collector then has fewer objects to look at.
        attached["_tables"] = tuple(tables)
        attached["_table_lengths"] = tuple(map(len, tables))

    def share_table_lengths(self, before: StepRecord) -> None:
        """Keep the lengths of its block tables once, if the record before has equal ones: most decodes add no block."""
        if (lengths := before.__dict__["_table_lengths"]) == self.__dict__["_table_lengths"]:
            self.__dict__["_table_lengths"] = lengths

    def attach_tables_of_groups(self, layout: Layout, tables: Sequence[Sequence[tuple[list[int], int]]]) -> None:
        """The same for several KV cache groups, or tables that have grown since.

        Args:
            layout: The group whose slots the record shows.
            tables: For each chunk and group the list of block ids and its length after scheduling.
        """
        attached = self.__dict__
        attached["_layout"] = layout
        attached["_tables"] = tuple([groups[0][0] for groups in tables])
        attached["_table_lengths"] = tuple([groups[0][1] for groups in tables])
        attached["_other_tables"] = tuple([tuple(groups[1:]) for groups in tables])

    @property
    def has_block_tables(self) -> bool:
        """Whether the record is part of a trace, or was made by a scheduler that knows its block tables."""
        return "_tables" in self.__dict__

    @property
    def layout(self) -> Layout:
        """The KV cache group whose slots the record shows.

        Raises:
            AttributeError: The record is not part of a Trace.
        """
        try:
            return self.__dict__["_layout"]
        except KeyError:
            raise AttributeError(
                "this StepRecord is not part of a Trace: block tables come from the records before it; "
                "use Trace.load(path)[step]"
            ) from None

    @property
    def block_size(self) -> int:
        """Tokens per KV block, of the first group of attention."""
        return self.layout.block_size

    def block_table(self, index: int, group: int = 0) -> list[int]:
        """The block table of ``chunks[index]`` after scheduling, as physical block ids in logical order.

        Args:
            index: Index of the chunk.
            group: The KV cache group. A place whose block is not held is 0.
        """
        _ = self.layout
        if group:
            table, length = self.__dict__["_other_tables"][index][group - 1]
            return table[:length]
        return self.__dict__["_tables"][index][: self.__dict__["_table_lengths"][index]]

    @property
    def num_groups(self) -> int:
        """Number of KV cache groups; 1 in a record without chunks."""
        others = self.__dict__.get("_other_tables", ())
        return 1 + len(others[0]) if others else 1

    @property
    def block_tables(self) -> dict[str, list[int]]:
        """Full block table after scheduling, for each scheduled request; with several KV cache groups the first's."""
        return self._by_request("block_tables", {c.request_id: self.block_table(i) for i, c in enumerate(self.chunks)})

    @property
    def block_tables_by_group(self) -> dict[str, tuple[list[int], ...]]:
        """Full block tables after scheduling, one per KV cache group, for each scheduled request."""
        groups = range(self.num_groups)
        tables = {
            chunk.request_id: tuple([self.block_table(i, group) for group in groups])
            for i, chunk in enumerate(self.chunks)
        }
        return self._by_request("block_tables_by_group", tables)

    def _by_request(self, name: str, values: dict[str, V]) -> dict[str, V]:
        from workbench.trace.find_request import ByRequest  # not to be loaded with the scheduler

        found = ByRequest(values)
        found.place = f"{name} of step {self.step}"
        return found

    # -- times -----------------------------------------------------------------------------------------------

    @property
    def duration(self) -> float:
        """Seconds from the beginning of the step to its end; 0 in a simulation without a clock."""
        return self.end - self.time

    @property
    def end_of_phases(self) -> float:
        """The end of the last phase, to the nanosecond if it does not simply follow the others."""
        if self.phase_starts and self.timings:
            return round(self.phases[-1].end, 9)
        return self.time + sum(self.timings.values())

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the step where they were, in order."""
        phases, end = [], self.time
        for name, seconds in self.timings.items():
            begin = self.time + self.phase_starts[name] if name in self.phase_starts else max(end, self.time)
            end = begin + seconds
            phases.append(Phase(name, begin, end))
        return tuple(phases)

    # -- derived from the chunks -----------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Rows of the packed batch, T."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_decode_tokens(self) -> int:
        """Rows that are decodes."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.arm == "decode")

    @property
    def num_prefill_tokens(self) -> int:
        """Rows that belong to prompt chunks (or recomputed output of a resumed request)."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def num_kv_computed(self) -> dict[str, int]:
        """KV progress after this step, for each scheduled request (vLLM's ``num_computed_tokens``)."""
        return self._by_request("num_kv_computed", {chunk.request_id: chunk.end for chunk in self.chunks})

    @property
    def not_scheduled(self) -> dict[str, Reason]:
        """The reason for every waiting request that was left out, in queue order."""
        others = self.waiting_reason or UNKNOWN
        return self._by_request("not_scheduled", {rid: self.passed_over.get(rid, others) for rid in self.waiting})

    @property
    def cu_seqlens_q(self) -> list[int]:
        """Cumulative query lengths, ``[0, n0, n0 + n1, ...]``; sequence i owns rows [cu[i], cu[i + 1])."""
        bounds = [0]
        for chunk in self.chunks:
            bounds.append(bounds[-1] + chunk.num_tokens)
        return bounds

    @property
    def seqused_k(self) -> list[int]:
        """KV length of each sequence, this step's tokens included."""
        return [chunk.num_kv for chunk in self.chunks]

    @cached_property
    def positions(self) -> np.ndarray:
        """Position of every packed row in its own sequence, int32 [T], read-only."""
        parts = [np.arange(chunk.first_position, chunk.num_kv, dtype=np.int32) for chunk in self.chunks]
        return read_only(np.concatenate(parts) if parts else np.zeros(0, np.int32))

    @cached_property
    def slot_mapping(self) -> np.ndarray:
        """KV slot (block id * block_size + offset) that every packed row writes, int64 [T], read-only.

        With several KV cache groups those of the first group of attention; empty when there is none.
        """
        group, size, *_ = self.layout
        if group is None:
            return read_only(np.zeros(0, np.int64))
        parts = []
        for index, chunk in enumerate(self.chunks):
            positions = np.arange(chunk.first_position, chunk.num_kv, dtype=np.int64)
            table = np.asarray(self.block_table(index, group), dtype=np.int64)
            parts.append(table[positions // size] * size + positions % size)
        return read_only(np.concatenate(parts) if parts else np.zeros(0, np.int64))

    @property
    def window(self) -> int:
        """Tokens that a row may attend to, itself included; 0 for all up to itself.

        It is that of the launch's first layer, and without a launch that of the KV cache group that is shown.
        """
        if self.kernel is not None and self.kernel.windows:
            return max(0, self.kernel.windows[0])
        return self.layout.window if self.has_block_tables else 0

    def window_of(self, group: int) -> int:
        """The same for the layers of a KV cache group.

        Raises:
            ValueError: There is no such group, or it holds recurrent state.
            AttributeError: The record is not part of a Trace.
        """
        windows = self.layout.windows
        if not 0 <= group < len(windows):
            raise ValueError(f"group must be from 0 to {len(windows) - 1}, got {group}")
        if (window := windows[group]) is None:
            attending = ", ".join(str(index) for index, each in enumerate(windows) if each is not None) or "none"
            raise ValueError(
                f"group {group} holds recurrent state, which has no mask; groups of attention: {attending}"
            )
        return window

    def mask(self, group: int | None = None) -> np.ndarray:
        """Block-diagonal causal mask, bool [T, total_kv]; True where a row may attend, within its window.

        Columns are the KV positions of the sequences one after another, in the order of ``chunks``.

        Args:
            group: The KV cache group whose layers have the mask; by default its window is that of the record.

        Raises:
            ValueError: The mask would have more than MAX_MASK_CELLS cells; it grows with T times the KV length. Or
                there is no such group, or it holds recurrent state.
        """
        ends = np.asarray(self.seqused_k, dtype=np.int64)
        cells = self.num_tokens * int(ends.sum())
        if cells > MAX_MASK_CELLS:
            raise ValueError(
                f"the mask of step {self.step} would have {cells} cells, allowed are {MAX_MASK_CELLS}: "
                "cu_seqlens_q, positions and seqused_k say the same in less space"
            )
        mask = np.zeros((self.num_tokens, int(ends.sum())), dtype=bool)
        row = column = 0
        window = (self.window if group is None else self.window_of(group)) or int(ends.max(initial=0))
        for chunk in self.chunks:
            rows = np.arange(chunk.first_position, chunk.num_kv)[:, None]
            keys = np.arange(chunk.num_kv)[None, :]
            seen = (keys <= rows) & (keys > rows - window)
            mask[row : row + chunk.num_tokens, column : column + chunk.num_kv] = seen
            row, column = row + chunk.num_tokens, column + chunk.num_kv
        return mask

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that happened to requests in this step, with reasons."""
        is_starting = self.admitted or self.resumed
        hits = {chunk.request_id: chunk.num_cached_tokens for chunk in self.chunks} if is_starting else {}

        def hit(rid: str) -> str:
            return f"{hits[rid]} tokens found in the prefix cache" if hits.get(rid) else ""

        return (
            *(Event(self.step, "arrive", rid) for rid in self.arrived),
            *(Event(self.step, "abort", rid) for rid in self.aborted),
            *(Event(self.step, "preempt", rid, str(self.preempt_reasons.get(rid, ""))) for rid in self.preempted),
            *(Event(self.step, "admit", rid, hit(rid)) for rid in self.admitted),
            *(Event(self.step, "resume", rid, hit(rid)) for rid in self.resumed),
            *(Event(self.step, "finish", rid, self.finish_reasons.get(rid, "")) for rid in self.finished),
        )

    def __str__(self) -> str:
        return find("StepRecord.__str__")(self)

    def __repr__(self) -> str:
        return find("StepRecord.__repr__")(self)

    def _repr_html_(self) -> str | None:
        return picture("StepRecord", self)

    def view(self, name: str) -> Any:
        """One panel as a picture, such as ``step.view("attention_mask")``; see `workbench.viz.step_picture.view`."""
        return find("StepPicture.view")(self, name)

    def kernel_run(self, item: Any = 0, **options: Any) -> Any:
        """The recorded threadgroup of the Metal kernel for a work item of this step, which an open engine has taken.

        See `workbench.engine.engine.Engine.kernel_run`.
        """
        return find("KernelRun.of_step")(self, item, **options)

    def chunk(self, request_id: str) -> Chunk:
        """The chunk of a request in this step.

        Raises:
            KeyError: The request was not scheduled; the message says why.
        """
        for chunk in self.chunks:
            if chunk.request_id == request_id:
                return chunk
        if request_id not in self.not_scheduled:
            raise KeyError(f"no request {request_id!r} runs or waits in step {self.step}")
        raise KeyError(
            f"request {request_id!r} was not scheduled in step {self.step}: {self.not_scheduled[request_id]}"
        )


_mappings_of = attrgetter(*StepRecord._mappings)
