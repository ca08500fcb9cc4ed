"""KV cache events of vLLM: which blocks entered its prefix cache, which ones left it, and which were needed again.

vLLM publishes them with ``--kv-events-config '{"enable_kv_cache_events": true}'`` over ZMQ, as msgpack. A recording of
them (`workbench.trace.kv_subscriber`) holds one batch per line, as JSON, after a first line that names the format.

Source: vLLM 0.33.0, vllm/distributed/kv_events.py. A batch is an array; an event is a map with its type, or, up to
2025, an array that begins with it.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from workbench.trace.errors import TraceError
from workbench.trace.file import split_lines
from workbench.trace.metrics import amount

KIND = "kv_events"
"""Value of ``kind`` in the first line of a recording."""

CANNOT = (
    "why a request was slow, which request hit a block or missed it, how many blocks are in use, or another setting "
    "(whatif, tune): events name blocks of the prefix cache, not requests or steps"
)

BlockHash = int | str
"""A block's hash: a number, or its bytes as hexadecimal digits."""


class KVEventHeader(msgspec.Struct, frozen=True):
    """The first line of a recording."""

    kind: str = KIND
    version: int = 1
    endpoint: str = ""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks that entered the prefix cache, each the continuation of the one before.

    Attributes:
        block_hashes: Their hashes; each stands for all tokens up to the end of its block.
        parent_block_hash: The block before the first one; None at the beginning of a prompt.
        token_ids: Their tokens; empty if they were not recorded.
        block_size: Tokens in a block.
        medium: "GPU", "CPU" and so on; None if vLLM does not say.
        group_idx: KV cache group; None if vLLM does not say.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks that left the prefix cache, because their memory was needed.

    Attributes:
        block_hashes: Their hashes.
        medium: See `BlockStored`.
        group_idx: See `BlockStored`.
    """

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The prefix cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

_ARRAY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Order of the fields in vLLM's older events, which are arrays."""


class KVEventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The events of one step of one engine.

    Attributes:
        seq: Number of the batch, one more than the one before; a gap is a lost batch.
        ts: Seconds since the epoch.
        events: The events, in order.
        rank: Data-parallel rank.
    """

    seq: int
    ts: float
    events: list[KVEvent]
    rank: int = 0


def decode_batch(seq: int, payload: bytes) -> KVEventBatch:
    """A batch as vLLM publishes it.

    Args:
        seq: Number of the batch, from its own frame.
        payload: msgpack of vLLM's ``KVEventBatch``.

    Raises:
        TraceError: The payload is something else.

    Example:
        >>> events = [{"type": "BlockStored", "block_hashes": [7], "block_size": 16}]
        >>> decode_batch(0, msgspec.msgpack.encode([12.5, events])).events[0].block_hashes
        [7]
    """
    try:
        ts, events, *rank = msgspec.msgpack.decode(payload)
        facts = {"seq": seq, "ts": ts, "events": [_as_map(each) for each in events], "rank": (rank or [None])[0] or 0}
        return msgspec.convert(_without_bytes(facts), KVEventBatch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, KeyError) as problem:
        raise TraceError(f"batch {seq} holds no KV events of vLLM: {type(problem).__name__}: {problem}") from None


def _as_map(event: Any) -> Mapping[str, Any]:
    if isinstance(event, Mapping):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(_ARRAY_FIELDS[kind], values))}


def _without_bytes(value: Any) -> Any:
    """Hashes as hexadecimal digits: JSON has no bytes."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: _without_bytes(each) for key, each in value.items()}
    return [_without_bytes(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Return:
    """A block that was stored again after it had been removed: its tokens were computed a second time.

    Attributes:
        at: When it was stored again, in seconds since the epoch.
        after: Seconds since it was removed.
        num_blocks: Number of blocks that the cache would have needed in addition to keep it until then: the different
            blocks that entered since its removal and were not cached at that time. Exact for a cache that removes the
            least recently used block first.
        num_tokens: Tokens in the block.
    """

    at: float
    after: float
    num_blocks: int
    num_tokens: int


@dataclass(frozen=True)
class CacheHistory:
    """One prefix cache: that of a rank, in a medium and a KV cache group.

    Attributes:
        rank: Data-parallel rank.
        medium: "GPU", "CPU" and so on.
        group: KV cache group.
        block_size: Tokens in a block; 0 if no block was stored.
        num_stored: Number of blocks that entered.
        num_removed: Number of blocks that left.
        num_unknown: Removed blocks that entered before the recording began.
        num_cleared: Number of times that all blocks left.
        num_cached: Number of blocks at the end, as far as they entered in the recording.
        peak_cached: Their maximum.
        lifetimes: Seconds from entering to leaving, of each block that left.
        returns: Blocks that were needed again, in order of time.
    """

    rank: int
    medium: str
    group: int
    block_size: int
    num_stored: int
    num_removed: int
    num_unknown: int
    num_cleared: int
    num_cached: int
    peak_cached: int
    lifetimes: tuple[float, ...]
    returns: tuple[Return, ...]

    def num_saved(self, num_blocks: int) -> int:
        """Tokens that would not have been computed again with this many more blocks."""
        return sum(each.num_tokens for each in self.returns if each.num_blocks <= num_blocks)

    def blocks_to_save(self, fraction: float) -> int | None:
        """Number of additional blocks that turn this fraction of the returns into hits; None without returns.

        Args:
            fraction: In (0, 1].
        """
        needed = sorted(each.num_blocks for each in self.returns)
        return needed[max(1, math.ceil(fraction * len(needed))) - 1] if needed else None

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank}, {self.medium}, group {self.group}: {self.num_stored} blocks of {self.block_size} tokens"
            f" stored, {self.num_removed} removed, {self.num_cached} cached at the end (at most {self.peak_cached})"
        ]
        if self.num_cleared:
            lines.append(f"  cleared {self.num_cleared} times")
        if self.num_unknown:
            lines.append(f"  {self.num_unknown} removed blocks were stored before the recording began")
        if self.lifetimes:
            lines.append(f"  a removed block was cached for {amount(median(self.lifetimes), 's')} (median)")
        if self.returns:
            tokens = sum(each.num_tokens for each in self.returns)
            gap = amount(median(each.after for each in self.returns), "s")
            blocks = f"{len(self.returns)} blocks ({tokens} tokens)"
            lines.append(f"  {blocks} were stored again after their removal, {gap} later (median)")
            enough = [(share, self.blocks_to_save(share)) for share in (0.5, 0.9, 1.0)]
            lines.append(
                "  to keep them: " + ", ".join(f"{number} more blocks for {share:.0%}" for share, number in enough)
            )
        elif self.num_removed:
            lines.append("  no block was stored again after its removal: more memory would not have helped")
        return "\n".join(lines)


class _PrefixSums:
    """Counts by number, and their sums from 0 on, each in logarithmic time (a Fenwick tree).

    Args:
        size: The largest number.
    """

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 2)

    def add(self, number: int) -> None:
        number += 1
        while number < len(self._sums):
            self._sums[number] += 1
            number += number & -number

    def up_to(self, number: int) -> int:
        number, total = number + 1, 0
        while number:
            total += self._sums[number]
            number -= number & -number
        return total


class _Cache:
    """A prefix cache while its events are read. The same content can be in two blocks, so hashes are counted.

    A block that is stored again and had been removed as number m would have needed as many more blocks as different
    ones entered in between: those whose own removal, if any, was before number m.

    Args:
        num_removals: Maximum number of removals to come.
    """

    def __init__(self, num_removals: int) -> None:
        self.held: Counter[BlockHash] = Counter()
        self.stored_at: dict[BlockHash, float] = {}
        self.removed: dict[BlockHash, tuple[float, int, int]] = {}  # time, its number, and the entries before it
        self.lifetimes: list[float] = []
        self.returns: list[Return] = []
        self.block_size = self.num_stored = self.num_removed = self.num_unknown = self.num_cleared = 0
        self.num_cached = self.peak_cached = self._num_entered = 0
        self._entered = _PrefixSums(num_removals)  # by the number of the removal before; 0 for none

    def store(self, event: BlockStored, at: float) -> None:
        self.block_size = max(self.block_size, event.block_size)
        for block in event.block_hashes:
            self.num_stored += 1
            if not self.held[block]:
                self.stored_at[block] = at
                removed_at, number, num_before = self.removed.pop(block, (at, 0, 0))
                if number:
                    needed = self._entered.up_to(number) - num_before
                    self.returns.append(Return(at, at - removed_at, max(1, needed), event.block_size))
                self._entered.add(number)
                self._num_entered += 1
            self.held[block] += 1
            self.num_cached += 1
        self.peak_cached = max(self.peak_cached, self.num_cached)

    def remove(self, event: BlockRemoved, at: float) -> None:
        for block in event.block_hashes:
            self.num_removed += 1
            if self.held[block]:
                self.held[block] -= 1
                self.num_cached -= 1
            else:
                self.num_unknown += 1
            if not self.held[block]:
                del self.held[block]
                self.removed[block] = at, self.num_removed, self._num_entered
                if (since := self.stored_at.pop(block, None)) is not None:
                    self.lifetimes.append(at - since)

    def clear(self) -> None:
        self.num_cleared += 1
        self.held.clear()
        self.stored_at.clear()
        self.removed.clear()
        self.num_cached = 0


@dataclass(frozen=True, eq=False)
class KVEvents:
    """Recorded KV cache events.

    Attributes:
        name: Name of the file or of the address.
        batches: The batches, in the order of their numbers for each rank.
        num_lost: Number of batches that are missing between others.
    """

    name: str
    batches: tuple[KVEventBatch, ...]
    num_lost: int

    @property
    def seconds(self) -> float:
        """From the first batch to the last."""
        return self.batches[-1].ts - self.batches[0].ts if self.batches else 0.0

    def cached_blocks(self, rank: int = 0) -> Counter[BlockHash]:
        """The blocks of a rank in the prefix cache at the end, by hash: in how many places each of them is."""
        whole: Counter[BlockHash] = Counter()
        for (of_rank, _, _), cache in self._caches().items():
            if of_rank == rank:
                whole += cache.held
        return whole

    def histories(self) -> list[CacheHistory]:
        """The prefix caches, by rank, medium and group."""
        return [
            CacheHistory(
                *key,
                cache.block_size,
                cache.num_stored,
                cache.num_removed,
                cache.num_unknown,
                cache.num_cleared,
                cache.num_cached,
                cache.peak_cached,
                tuple(cache.lifetimes),
                tuple(cache.returns),
            )
            for key, cache in sorted(self._caches().items())
        ]

    def _caches(self) -> dict[tuple[int, str, int], _Cache]:
        removals = sum(
            len(event.block_hashes)
            for batch in self.batches
            for event in batch.events
            if isinstance(event, BlockRemoved)
        )
        caches: defaultdict[tuple[int, str, int], _Cache] = defaultdict(lambda: _Cache(removals))
        for batch in self.batches:
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    for (rank, _, _), cache in caches.items():
                        if rank == batch.rank:
                            cache.clear()
                    continue
                cache = caches[batch.rank, event.medium or "GPU", event.group_idx or 0]
                if isinstance(event, BlockStored):
                    cache.store(event, batch.ts)
                else:
                    cache.remove(event, batch.ts)
        return caches

    def __repr__(self) -> str:
        lines = [f"{len(self.batches)} batches of KV events of {self.name} over {self.seconds:.1f} s"]
        if self.num_lost:
            lines.append(f"{self.num_lost} batches were lost: blocks may be missing, and counts are too small")
        lines += map(str, self.histories())
        lines += [
            "can answer: how full the prefix cache is, how long blocks stay, and how much more memory would have kept "
            "the blocks that were computed again",
            f"cannot answer: {CANNOT}",
        ]
        return "\n".join(lines)


def collect(name: str, batches: Iterable[KVEventBatch]) -> KVEvents:
    """Batches in order, each once, with the number of those that are missing.

    Args:
        name: Name of the file or of the address.
        batches: Batches; a repeated number is left out.
    """
    by_number = {(batch.rank, batch.seq): batch for batch in batches}
    ordered = [batch for _, batch in sorted(by_number.items())]
    num_lost = 0
    for rank in {batch.rank for batch in ordered}:
        numbers = [batch.seq for batch in ordered if batch.rank == rank]
        num_lost += numbers[-1] - numbers[0] + 1 - len(numbers)
    return KVEvents(name, tuple(sorted(ordered, key=lambda batch: (batch.ts, batch.rank, batch.seq))), num_lost)


def is_kv_events(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a recording of KV cache events, by its first line."""
    with Path(path).open("rb") as file:
        return f'"kind":"{KIND}"'.encode() in file.read(200)


def read_kv_events(path: str | os.PathLike[str]) -> KVEvents:
    """A recording of KV cache events.

    Args:
        path: The file. A last line that was cut off is left out.

    Raises:
        TraceError: The file is something else, or a line is malformed; the message names it.
        OSError: The file cannot be read.
    """
    return collect(Path(path).name, _read(path))


def _read(path: str | os.PathLike[str]) -> Iterator[KVEventBatch]:
    number = 0
    for number, (raw, is_whole) in enumerate(split_lines(path), start=1):
        try:
            if number > 1:
                yield msgspec.json.decode(raw, type=KVEventBatch)
            elif (header := msgspec.json.decode(raw, type=KVEventHeader)).kind != KIND or header.version != 1:
                raise TraceError(f"{path} is no recording of KV events of version 1: it is {header}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
            if is_whole:
                raise TraceError(f"{path}, line {number}: no batch of KV events: {problem}") from None
    if not number:
        raise TraceError(f"{path} is empty: it is no recording of KV events")
