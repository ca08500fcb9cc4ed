"""A recording of KV cache events: one batch per line, as JSON, after a first line that names the format."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from workbench.base.outside_files import open_bytes
from workbench.trace.errors import TraceError
from workbench.trace.file import split_lines
from workbench.trace.formats.kv_events.events import BlockHash, KVEventBatch
from workbench.trace.formats.kv_events.history import CacheHistory, replay

KIND = "kv_events"
"""Value of ``kind`` in the first line of a recording."""

CANNOT = (
    "why a request was slow, which request hit a block or missed it, how many blocks are in use, or another setting "
    "(whatif, tune): events name blocks of the prefix cache, not requests or steps"
)


class KVEventHeader(msgspec.Struct, frozen=True):
    """The first line of a recording."""

    kind: str = KIND
    version: int = 1
    endpoint: str = ""


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
        for cache in replay(self.batches):
            if cache.rank == rank:
                whole += cache.held
        return whole

    def histories(self) -> list[CacheHistory]:
        """The prefix caches, by rank, medium and group."""
        return [cache.history() for cache in replay(self.batches)]

    def __repr__(self) -> str:
        lines = [f"{len(self.batches)} batches of KV events of {self.name} over {self.seconds:.1f} s"]
        if self.num_lost:
            lines.append(f"{self.num_lost} batches were lost: blocks may be missing, and counts are too small")
        if not self.batches:
            lines.append(
                "nothing was received: vLLM publishes with --kv-events-config "
                '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\', and binds only '
                "an address with a *; to any other it connects, as the subscriber does, and neither hears the other"
            )
            return "\n".join(lines)
        lines += map(str, self.histories())
        lines += [
            "can answer: how full the prefix cache is, how long blocks stay, and how much more memory would have kept "
            "the blocks that were recomputed",
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
    with open_bytes(path) as file:
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
                raise TraceError(f"{path} is not a recording of KV events of version 1: it is {header}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
            if is_whole:
                raise TraceError(f"{path}, line {number}: no batch of KV events: {problem}") from None
    if not number:
        raise TraceError(f"{path} is empty: it is not a recording of KV events")
