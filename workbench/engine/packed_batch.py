"""One packed varlen batch: the arrays a single forward pass is handed.

Sequences lie one after another without padding. Sequence i owns rows ``[cu_seqlens_q[i], cu_seqlens_q[i + 1])``;
a decode is a sequence of one row, a prompt chunk one of many, and nothing else tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.base.field_checks import MAX_INT32
from workbench.kernels.attention.metadata import AttentionMetadata

if TYPE_CHECKING:
    from workbench.models.paged_cache import Kept
    from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk
    from workbench.trace.kv_groups import KVCacheGroup


class Segment(NamedTuple):
    """Tokens ``[start, start + num_tokens)`` of one sequence, to be packed.

    Attributes:
        block_ids: The sequence's block table, physical block ids in logical order.
        start: Position of the first token; everything before it is in the KV cache.
        num_tokens: Tokens to compute.
        token_ids: Those tokens, ``num_tokens`` of them.
        samples: Number of last rows whose logits are wanted: True or 1 for the next token, one more for each draft; all
            of them where log-probabilities of the prompt are asked for.
        request_id: Named in errors.
    """

    block_ids: Sequence[int]
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    samples: int = True
    request_id: str = ""


@dataclass(frozen=True, eq=False)
class GroupTables:
    """The block tables of one KV cache group for a packed batch.

    Attributes:
        block_table: Physical block ids, padded with 0, int32 [num_seqs, max_blocks]; 0 too for a block that the group
            has given back.
        slot_mapping: KV slot (block id * block_size + offset) each row writes, int64 [T].
        block_size: Tokens per block of the group.
        tables: Each sequence's own block table list, by which the next step finds the rows it can reuse.
        table_lengths: The length each of them had, int64 [num_seqs].
    """

    block_table: np.ndarray
    slot_mapping: np.ndarray
    block_size: int
    tables: Sequence[Sequence[int]] = field(default=(), repr=False)
    table_lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A packed batch of T rows and ``num_seqs`` sequences; valid by construction.

    MLX does not check gather indices (an index out of range reads another sequence's memory, or none at all), so
    an instance that breaks a rule cannot be made.

    Attributes:
        token_ids: int32 [T].
        positions: Position of each row in its own sequence, int32 [T].
        slot_mapping: KV slot (block id * block_size + offset) each row writes, int64 [T]; [0] in a model without
            attention, as for every group of recurrent state.
        cu_seqlens_q: Cumulative query lengths, int32 [num_seqs + 1].
        seqused_k: KV length of each sequence with this step's tokens, int32 [num_seqs].
        block_table: Physical block ids, padded with 0, int32 [num_seqs, max_blocks].
        logits_rows: Rows whose logits are wanted, int32 [num_samples].
        block_size: Tokens per KV block.
        num_blocks: Size of the pool; None when it is not known, then only the lower bound is checked.
        request_ids: Names of the sequences in errors.
        tables: Each sequence's own block table list, by which the next step finds the rows it can reuse.
        table_lengths: The length each of them had, int64 [num_seqs].
        by_group: The tables of every KV cache group, if there are several; the fields above are the first attention
            group's.
        kept: The recurrent states that a later step may begin from; None without any.
        adapters: The adapter of each sequence, "" for none; empty if no sequence has one.

    Raises:
        ValueError: A rule is broken; the message names the sequence and its request.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens_q: np.ndarray
    seqused_k: np.ndarray
    block_table: np.ndarray
    logits_rows: np.ndarray
    block_size: int
    num_blocks: int | None = None
    request_ids: Sequence[str] = ()
    tables: Sequence[Sequence[int]] = field(default=(), repr=False)
    table_lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    by_group: tuple[GroupTables, ...] = ()
    kept: Kept | None = field(default=None, repr=False)
    adapters: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self._is_valid():
            raise ValueError(what_is_wrong(self))

    def _is_valid(self) -> bool:
        """Whether every rule is obeyed; cheap enough for every step."""
        cu, used, table, slots = self.cu_seqlens_q, self.seqused_k, self.block_table, np.sort(self.slot_mapping)
        num_tokens, num_seqs, rows = len(self.token_ids), len(used), self.logits_rows
        if num_tokens != len(self.positions) or len(slots) not in (0, num_tokens) or len(cu) != num_seqs + 1:
            return False
        if num_seqs == 0 or num_tokens == 0 or table.size == 0:
            return what_is_wrong(self) == ""
        limit = self.num_blocks if self.num_blocks is not None else MAX_INT32
        lengths = np.diff(cu)
        return bool(
            (cu[0] == 0 and cu[-1] == num_tokens and lengths.min() >= 0)
            and ((used >= lengths).all() and used.max() <= table.shape[1] * self.block_size)
            and (table.min() >= 0 and table.max() < limit)
            and (not len(slots) or (slots[0] >= 0 and slots[-1] < limit * self.block_size))
            and (slots[1:] != slots[:-1]).all()
            and (len(rows) == 0 or (rows.min() >= 0 and rows.max() < num_tokens))
        )

    @cached_property
    def metadata(self) -> tuple[AttentionMetadata, ...]:
        """The batch as attention needs it, with the tables of each KV cache group."""
        return tuple(
            AttentionMetadata(
                self.cu_seqlens_q, self.seqused_k, tables.block_table, tables.slot_mapping, tables.block_size
            )
            for tables in self.by_group or (self,)
        )

    @property
    def num_kept(self) -> np.ndarray:
        """For each sequence the rows after which its recurrent state is kept: the last, or those that sample."""
        sequences = np.searchsorted(self.cu_seqlens_q, self.logits_rows, side="right") - 1
        return np.maximum(1, np.bincount(sequences, minlength=self.num_seqs))

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, T."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.seqused_k)

    def sequence_name(self, index: int) -> str:
        """The name of sequence ``index`` in errors."""
        request = f" (request {self.request_ids[index]!r})" if len(self.request_ids) > index else ""
        return f"sequence {index}{request}"


def prepare_unified(
    batch: ScheduledBatch,
    block_size: int,
    *,
    num_blocks: int | None = None,
    previous: PackedBatch | None = None,
    groups: Sequence[KVCacheGroup] = (),
    kept: Kept | None = None,
) -> PackedBatch:
    """Pack what the scheduler chose, in its order, decodes and prompt chunks alike.

    Args:
        batch: The step's chunks; ``num_tokens`` tokens from ``start`` of each request's ``token_ids``.
        block_size: Tokens per KV block of the first attention group.
        num_blocks: Size of the block pool.
        previous: The batch packed before this one. Block tables only grow, so its rows are reused if the same
            requests come again; the result is the same without it.
        groups: The KV cache groups, if there are several.
        kept: See `PackedBatch`.

    Raises:
        ValueError: A chunk cannot be packed; the message names its request.
    """
    first = (batch.layout.group or 0) if len(groups) > 1 else 0
    tables = [chunk.request.block_tables[first] for chunk in batch.chunks]
    segments = [
        (table, chunk.start, chunk.num_tokens, tokens, chunk.num_logits, chunk.request.request_id)
        if len(tokens := chunk.request.token_ids[chunk.start : chunk.start + chunk.num_tokens]) == chunk.num_tokens
        else _segment_ahead(chunk, table)
        for chunk, table in zip(batch.chunks, tables)
    ]
    has_slots = kept is None or any(group.is_attention for group in groups)
    packed = pack(segments, block_size, num_blocks=num_blocks, previous=previous, has_slots=has_slots)
    if len(groups) > 1:
        packed = _with_groups(packed, batch, groups, previous)
    adapters = names if any(names := [chunk.request.adapter for chunk in batch.chunks]) else ()
    return replace(packed, kept=kept, adapters=adapters) if adapters or kept is not None else packed


def _with_groups(
    packed: PackedBatch, batch: ScheduledBatch, groups: Sequence[KVCacheGroup], previous: PackedBatch | None
) -> PackedBatch:
    """The same batch with the tables of every group.

    Raises:
        ValueError: A group lacks a block for a row; the message names the request.
    """
    row_seq = np.repeat(np.arange(packed.num_seqs), np.diff(packed.cu_seqlens_q))
    before = (
        previous.by_group if previous is not None and len(previous.by_group) == len(groups) else [None] * len(groups)
    )
    by_group = []
    for index, group in enumerate(groups):
        tables = tuple(chunk.request.block_tables[index] for chunk in batch.chunks)
        lengths = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
        short = packed.seqused_k > lengths * group.block_size
        if not short.any():
            rows = (packed.positions, row_seq) if group.is_attention else None
            made = _tables_of(tables, lengths, rows, group.block_size, before[index])
            if group.is_attention:
                short = np.bincount(row_seq, made.slot_mapping < group.block_size, packed.num_seqs) > 0
        if short.any():
            name = packed.sequence_name(int(short.argmax()))
            raise ValueError(f"{name}: a row has no block in KV cache group {index}; allocate its blocks first")
        by_group.append(made)
    return replace(packed, by_group=tuple(by_group))


def _segment_ahead(chunk: ScheduledChunk, block_table: Sequence[int]) -> Segment:
    """A chunk that was scheduled before all of its tokens were known: with drafts, or with asynchronous steps.

    Drafts follow the known tokens; an unknown one runs as token 0. If ``start`` counts drafts that have been rejected
    since, the rows begin before it. A request that has ended since has no more tokens: its rows are thrown away.
    """
    request, start, drafts = chunk.request, chunk.start - chunk.ahead, chunk.drafts
    tokens = request.token_ids[start : start + chunk.num_tokens - len(drafts)]
    tokens += [0] * (chunk.num_tokens - len(drafts) - len(tokens)) if request.status == "finished" else []
    tokens += [max(0, token) for token in drafts]
    return Segment(block_table, start, chunk.num_tokens, tokens, chunk.num_logits, request.request_id)


def pack(
    segments: Sequence[Segment] | Sequence[tuple],
    block_size: int,
    *,
    num_blocks: int | None = None,
    previous: PackedBatch | None = None,
    has_slots: bool = True,
) -> PackedBatch:
    """Pack segments, or plain tuples of their fields, in the order given; see `prepare_unified` for the arguments.

    ``has_slots`` is False if the blocks are those of recurrent states.

    Raises:
        ValueError: There are no segments, or a rule of `PackedBatch` is broken.
    """
    if not segments:
        raise ValueError("segments is empty: a step packs one sequence or more")
    block_ids, starts, lengths, token_ids, samples, request_ids = zip(*segments)
    num_seqs = len(segments)
    start = np.array(starts, dtype=np.int64)
    length = np.array(lengths, dtype=np.int64)
    table_lengths = np.fromiter(map(len, block_ids), dtype=np.int64, count=num_seqs)
    token_counts = np.fromiter(map(len, token_ids), dtype=np.int64, count=num_seqs)
    bad = (start < 0) | (length < 1) | (token_counts != length) | (start + length > table_lengths * block_size)
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(_why_not_packed(index, Segment(*segments[index]), block_size))

    bounds = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(length, out=bounds[1:])
    total = int(bounds[-1])
    row_seq = np.repeat(np.arange(num_seqs), length)
    positions = np.arange(total) + (start - bounds[:-1])[row_seq]
    made = _tables_of(block_ids, table_lengths, (positions, row_seq) if has_slots else None, block_size, previous)
    return PackedBatch(
        token_ids=np.fromiter(chain.from_iterable(token_ids), dtype=np.int32, count=total),
        positions=positions.astype(np.int32),
        slot_mapping=made.slot_mapping,
        cu_seqlens_q=bounds,
        seqused_k=(start + length).astype(np.int32),
        block_table=made.block_table,
        logits_rows=_logits_rows(bounds, np.array(samples, dtype=np.int32)),
        block_size=block_size,
        num_blocks=num_blocks,
        request_ids=request_ids,
        tables=block_ids,
        table_lengths=table_lengths,
    )


def _tables_of(
    tables: tuple[Sequence[int], ...],
    lengths: np.ndarray,
    rows: tuple[np.ndarray, np.ndarray] | None,
    block_size: int,
    previous: PackedBatch | GroupTables | None,
) -> GroupTables:
    """Pad the block tables of a group, and find the slot of each row in them, by its position and sequence."""
    block_table = _block_table(tables, lengths, previous)
    if rows is None:
        return GroupTables(block_table, np.zeros(0, np.int64), block_size, tables, lengths)
    positions, row_seq = rows
    block, offset = np.divmod(positions, block_size)
    slots = block_table[row_seq, block] * np.int64(block_size) + offset
    return GroupTables(block_table, slots, block_size, tables, lengths)


def _logits_rows(bounds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last ``counts[i]`` rows of each sequence, int32."""
    if counts.max() <= 1:
        return (bounds[1:] - 1)[counts > 0]
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(bounds[1:] - ends, counts) + np.arange(ends[-1], dtype=np.int32)


def _why_not_packed(index: int, segment: Segment, block_size: int) -> str:
    """Why a segment has no packed form."""
    name = f"sequence {index} (request {segment.request_id!r})"
    start, end = segment.start, segment.start + segment.num_tokens
    if start < 0 or segment.num_tokens < 1:
        return f"{name}: tokens [{start}, {end}): start must be at least 0 and num_tokens at least 1"
    if len(segment.token_ids) != segment.num_tokens:
        return f"{name}: {len(segment.token_ids)} token ids for {segment.num_tokens} scheduled tokens [{start}, {end})"
    return (
        f"{name}: position {end - 1} lies outside its block table of {len(segment.block_ids)} blocks "
        f"of {block_size} tokens; allocate {-(-end // block_size)} blocks first"
    )


def _block_table(
    tables: tuple[Sequence[int], ...], lengths: np.ndarray, previous: PackedBatch | GroupTables | None
) -> np.ndarray:
    """Pad block tables with 0 to int32 [num_seqs, max_blocks], reusing the previous step's rows.

    A table is an append-only list, so the same list at the same row still begins with the ids it had before. A table
    that loses a block is another list from then on.
    """
    table = np.zeros((len(tables), int(lengths.max())), dtype=np.int32)
    if (
        previous is None
        or len(previous.tables) != len(tables)
        or not all(map(is_, tables, previous.tables))
        or (lengths < previous.table_lengths).any()
    ):
        filled = np.arange(table.shape[1]) < lengths[:, None]
        table[filled] = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(lengths.sum()))
        return table
    table[:, : previous.block_table.shape[1]] = previous.block_table
    for index in np.flatnonzero(lengths != previous.table_lengths).tolist():
        ids = tables[index][previous.table_lengths[index] :]
        table[index, lengths[index] - len(ids) : lengths[index]] = ids
    return table


def what_is_wrong(packed: PackedBatch) -> str:
    """The first rule that a packed batch breaks, with the sequence and its request; empty when there is none."""
    cu, used = packed.cu_seqlens_q, packed.seqused_k
    num_tokens, num_seqs = packed.num_tokens, packed.num_seqs
    lengths = np.diff(cu)
    if len(cu) != num_seqs + 1 or cu[0] != 0 or cu[-1] != num_tokens:
        return (
            f"cu_seqlens_q has {len(cu)} entries from {cu[:1]} to {cu[-1:]}: it must have {num_seqs + 1} for "
            f"{num_seqs} sequences, start at 0 and end at the {num_tokens} packed tokens"
        )
    if num_seqs and lengths.min() < 0:
        index = int(np.argmin(lengths))
        return f"cu_seqlens_q falls from {cu[index]} to {cu[index + 1]} at {packed.sequence_name(index)}"
    for name in ("positions", "slot_mapping"):
        if len(getattr(packed, name)) not in ((0, num_tokens) if name == "slot_mapping" else (num_tokens,)):
            return f"{name} has {len(getattr(packed, name))} entries for {num_tokens} packed tokens"
    if num_seqs and (used < lengths).any():
        index = int(np.argmax(used < lengths))
        return f"{packed.sequence_name(index)}: seqused_k is {used[index]}, less than its {lengths[index]} query tokens"
    capacity = packed.block_table.shape[1] * packed.block_size
    if num_seqs and used.max() > capacity:
        index = int(np.argmax(used))
        return f"{packed.sequence_name(index)}: seqused_k is {used[index]}, its block table holds {capacity} tokens"
    if problem := _what_is_wrong_with_slots(packed):
        return problem
    rows = packed.logits_rows
    if len(rows) and (rows.min() < 0 or rows.max() >= num_tokens):
        return f"logits_rows {rows.min()}..{rows.max()} leave the packed rows [0, {num_tokens})"
    return ""


def _what_is_wrong_with_slots(packed: PackedBatch) -> str:
    """Block ids and slots have to lie inside the pool, and no slot may be written twice."""
    limit = packed.num_blocks if packed.num_blocks is not None else MAX_INT32
    table, slots = packed.block_table, packed.slot_mapping
    if table.size and (table.min() < 0 or table.max() >= limit):
        index = int(np.argmax(((table < 0) | (table >= limit)).any(axis=1)))
        return f"{packed.sequence_name(index)}: block ids {table[index].tolist()} leave the pool [0, {limit})"
    outside = (slots < 0) | (slots >= limit * packed.block_size)
    if outside.any():
        row = int(np.argmax(outside))
        return (
            f"{_owner(packed, row)}: row {row} writes slot {slots[row]}, outside the pool of "
            f"{limit} blocks of {packed.block_size}"
        )
    ordered = np.sort(slots)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        slot = int(ordered[:-1][twice][0])
        owners = [f"row {row} of {_owner(packed, row)}" for row in np.flatnonzero(slots == slot)[:2].tolist()]
        return f"slot {slot} is written twice in one step: by {owners[0]} and {owners[1]}"
    return ""


def _owner(packed: PackedBatch, row: int) -> str:
    return packed.sequence_name(int(np.searchsorted(packed.cu_seqlens_q, row, side="right")) - 1)
