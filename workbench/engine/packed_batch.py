"""One packed varlen batch: the arrays a single forward pass is handed.

Sequences lie one after another without padding. Sequence i owns rows ``[cu_seqlens_q[i], cu_seqlens_q[i + 1])``;
a decode is a sequence of one row, a prompt chunk one of many, and nothing else tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from workbench.engine.scheduler import ScheduledBatch


class Segment(NamedTuple):
    """Tokens ``[start, start + num_tokens)`` of one sequence, to be packed.

    Attributes:
        block_ids: The sequence's block table, physical block ids in logical order.
        start: Position of the first token; everything before it is in the KV cache.
        num_tokens: Tokens to compute.
        token_ids: Those tokens, ``num_tokens`` of them.
        samples: Whether the last row's logits are wanted.
        request_id: Named in errors.
    """

    block_ids: Sequence[int]
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    samples: bool = True
    request_id: str = ""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A packed batch of T rows and ``num_seqs`` sequences; valid by construction.

    MLX does not check gather indices (an index out of range reads another sequence's memory, or none at all), so
    an instance that breaks a rule cannot be made.

    Attributes:
        token_ids: int32 [T].
        positions: Position of each row in its own sequence, int32 [T].
        slot_mapping: KV slot (block id * block_size + offset) each row writes, int64 [T].
        cu_seqlens_q: Cumulative query lengths, int32 [num_seqs + 1].
        seqused_k: KV length of each sequence with this step's tokens, int32 [num_seqs].
        block_table: Physical block ids, padded with 0, int32 [num_seqs, max_blocks].
        logits_rows: Rows whose logits are wanted, int32 [num_samples].
        block_size: Tokens per KV block.
        num_blocks: Size of the pool; None when it is not known, then only the lower bound is checked.
        request_ids: Names of the sequences in errors.
        tables: Each sequence's own block table list, by which the next step finds the rows it can reuse.
        table_lengths: The length each of them had, int64 [num_seqs].

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

    def __post_init__(self) -> None:
        validate(self)

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, T."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.seqused_k)

    def sequence_name(self, index: int) -> str:
        """How an error names sequence ``index``."""
        request = f" (request {self.request_ids[index]!r})" if len(self.request_ids) > index else ""
        return f"sequence {index}{request}"


def prepare_unified(
    batch: ScheduledBatch,
    block_size: int,
    *,
    num_blocks: int | None = None,
    previous: PackedBatch | None = None,
) -> PackedBatch:
    """Pack what the scheduler chose, in its order, decodes and prompt chunks alike.

    Args:
        batch: The step's chunks; ``num_tokens`` tokens from ``start`` of each request's ``token_ids``.
        block_size: Tokens per KV block.
        num_blocks: Size of the block pool.
        previous: The batch packed before this one. Block tables only grow, so its rows are reused where the
            same requests come again; the result is the same without it.

    Raises:
        ValueError: A chunk cannot be packed; the message names its request.
    """
    segments = [
        (
            (request := chunk.request).block_table,
            (start := chunk.start),
            (num_tokens := chunk.num_tokens),
            request.token_ids[start : start + num_tokens],
            chunk.samples,
            request.request_id,
        )
        for chunk in batch.chunks
    ]
    return pack(segments, block_size, num_blocks=num_blocks, previous=previous)


def pack(
    segments: Sequence[Segment] | Sequence[tuple],
    block_size: int,
    *,
    num_blocks: int | None = None,
    previous: PackedBatch | None = None,
) -> PackedBatch:
    """Pack segments in the order given; see `prepare_unified` for the arguments.

    Plain tuples of a Segment's fields will do.

    Raises:
        ValueError: There are no segments, or a rule of `PackedBatch` is broken.
    """
    if not segments:
        raise ValueError("segments is empty: a step packs at least one sequence")
    block_ids, starts, lengths, token_ids, samples, request_ids = zip(*segments)
    num_seqs = len(segments)
    start = np.array(starts, dtype=np.int64)
    length = np.array(lengths, dtype=np.int64)
    table_lengths = np.fromiter(map(len, block_ids), dtype=np.int64, count=num_seqs)
    token_counts = np.fromiter(map(len, token_ids), dtype=np.int64, count=num_seqs)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: it must be at least 1")
    bad = (start < 0) | (length < 1) | (token_counts != length) | (start + length > table_lengths * block_size)
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(_what_is_wrong(index, Segment(*segments[index]), block_size))

    bounds = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(length, out=bounds[1:])
    total = int(bounds[-1])
    row_seq = np.repeat(np.arange(num_seqs), length)
    positions = np.arange(total) + (start - bounds[:-1])[row_seq]
    block_table = _block_table(block_ids, table_lengths, previous)
    block, offset = np.divmod(positions, block_size)
    return PackedBatch(
        token_ids=np.fromiter(chain.from_iterable(token_ids), dtype=np.int32, count=total),
        positions=positions.astype(np.int32),
        slot_mapping=block_table[row_seq, block] * np.int64(block_size) + offset,
        cu_seqlens_q=bounds,
        seqused_k=(start + length).astype(np.int32),
        block_table=block_table,
        logits_rows=(bounds[1:] - 1)[np.array(samples, dtype=bool)],
        block_size=block_size,
        num_blocks=num_blocks,
        request_ids=request_ids,
        tables=block_ids,
        table_lengths=table_lengths,
    )


def _what_is_wrong(index: int, segment: Segment, block_size: int) -> str:
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


def _block_table(tables: tuple[Sequence[int], ...], lengths: np.ndarray, previous: PackedBatch | None) -> np.ndarray:
    """Pad block tables with 0 to int32 [num_seqs, max_blocks], reusing the previous step's rows.

    A table is an append-only list, so the same list at the same row still begins with the ids it had before.
    """
    table = np.zeros((len(tables), int(lengths.max())), dtype=np.int32)
    same_lists = (
        previous is not None
        and len(previous.tables) == len(tables)
        and all(map(is_, tables, previous.tables))
        and bool((lengths >= previous.table_lengths).all())
    )
    if not same_lists:
        filled = np.arange(table.shape[1]) < lengths[:, None]
        table[filled] = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(lengths.sum()))
        return table
    table[:, : previous.block_table.shape[1]] = previous.block_table
    for index in np.flatnonzero(lengths != previous.table_lengths).tolist():
        ids = tables[index][previous.table_lengths[index] :]
        table[index, lengths[index] - len(ids) : lengths[index]] = ids
    return table


def validate(packed: PackedBatch) -> None:
    """Check every rule a packed batch obeys; cheap enough for every step (see `PackedBatch`)."""
    cu, used = packed.cu_seqlens_q, packed.seqused_k
    num_tokens, num_seqs = packed.num_tokens, packed.num_seqs
    lengths = np.diff(cu)
    if len(cu) != num_seqs + 1 or cu[0] != 0 or cu[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens_q has {len(cu)} entries from {cu[:1]} to {cu[-1:]}: it must have {num_seqs + 1} for "
            f"{num_seqs} sequences, start at 0 and end at the {num_tokens} packed tokens"
        )
    if num_seqs and lengths.min() < 0:
        index = int(np.argmin(lengths))
        raise ValueError(f"cu_seqlens_q falls from {cu[index]} to {cu[index + 1]} at {packed.sequence_name(index)}")
    for name in ("positions", "slot_mapping"):
        if len(getattr(packed, name)) != num_tokens:
            raise ValueError(f"{name} has {len(getattr(packed, name))} entries for {num_tokens} packed tokens")
    if num_seqs and (used < lengths).any():
        index = int(np.argmax(used < lengths))
        raise ValueError(
            f"{packed.sequence_name(index)}: seqused_k is {used[index]}, less than its {lengths[index]} query tokens"
        )
    capacity = packed.block_table.shape[1] * packed.block_size
    if num_seqs and used.max() > capacity:
        index = int(np.argmax(used))
        raise ValueError(
            f"{packed.sequence_name(index)}: seqused_k is {used[index]}, its block table holds {capacity} tokens"
        )
    _check_slots(packed)
    rows = packed.logits_rows
    if len(rows) and (rows.min() < 0 or rows.max() >= num_tokens):
        raise ValueError(f"logits_rows {rows.min()}..{rows.max()} leave the packed rows [0, {num_tokens})")


def _check_slots(packed: PackedBatch) -> None:
    """Block ids and slots lie inside the pool, and no slot is written twice."""
    limit = packed.num_blocks if packed.num_blocks is not None else np.iinfo(np.int32).max
    table, slots = packed.block_table, packed.slot_mapping
    if table.size and (table.min() < 0 or table.max() >= limit):
        index = int(np.argmax(((table < 0) | (table >= limit)).any(axis=1)))
        raise ValueError(
            f"{packed.sequence_name(index)}: block ids {table[index].tolist()} leave the pool [0, {limit})"
        )
    ordered = np.sort(slots)
    if len(slots) and (ordered[0] < 0 or ordered[-1] >= limit * packed.block_size):
        row = int(np.argmax((slots < 0) | (slots >= limit * packed.block_size)))
        raise ValueError(
            f"{_owner(packed, row)}: row {row} writes slot {slots[row]}, outside the pool of "
            f"{limit} blocks of {packed.block_size}"
        )
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        slot = int(ordered[:-1][twice][0])
        owners = [f"row {row} of {_owner(packed, row)}" for row in np.flatnonzero(slots == slot)[:2].tolist()]
        raise ValueError(f"slot {slot} is written twice in one step: by {owners[0]} and {owners[1]}")


def _owner(packed: PackedBatch, row: int) -> str:
    return packed.sequence_name(int(np.searchsorted(packed.cu_seqlens_q, row, side="right")) - 1)
