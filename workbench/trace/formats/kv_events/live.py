"""The KV events of a running server, counted as they come; blocks that have left the cache are forgotten."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict

from workbench.trace.errors import TraceError
from workbench.trace.formats.kv_events.events import AllBlocksCleared, BlockHash, BlockStored, KVEventBatch
from workbench.trace.formats.kv_events.subscriber import subscribe

MAX_REMOVED = 2**16
"""Removed blocks of a cache that are remembered, the newest."""


class LiveEvents:
    """The prefix caches of a running server, by its KV events, read on a separate thread.

    Args:
        endpoint: Address of vLLM's publisher, such as "tcp://127.0.0.1:5557".

    Attributes:
        endpoint: This address.
        num_batches: Number of batches that came.
        num_lost: Number of batches that are missing between others.
        num_stored: Number of blocks that entered a cache.
        num_removed: Number of blocks that left one.
        num_again: Number of blocks that entered again after they had left.
        problem: Why the reading ended; "" while it lasts.

    Raises:
        ValueError: The address is malformed.
        ModuleNotFoundError: pyzmq, of the extra ``serve``, is not installed; vLLM brings it.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.problem = endpoint, ""
        self.num_batches = self.num_lost = self.num_stored = self.num_removed = self.num_again = 0
        self._held: defaultdict[tuple[int, str, int], Counter[BlockHash]] = defaultdict(Counter)
        self._left: defaultdict[tuple[int, str, int], OrderedDict[BlockHash, None]] = defaultdict(OrderedDict)
        self._last_seq: dict[int, int] = {}
        self._stop = threading.Event()
        self._batches = subscribe(endpoint, stop=self._stop.is_set)
        self._thread = threading.Thread(target=self._follow, name="workbench-kv-events", daemon=True)

    def __enter__(self) -> LiveEvents:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _follow(self) -> None:
        try:
            for batch in self._batches:
                self.take(batch)
        except (TraceError, OSError) as problem:
            self.problem = str(problem)

    def take(self, batch: KVEventBatch) -> None:
        """Count a batch."""
        last = self._last_seq.get(batch.rank)
        if last is not None and batch.seq > last:
            self.num_lost += batch.seq - last - 1
        elif last is not None:  # the server was restarted, with an empty cache
            self._clear(batch.rank)
        self._last_seq[batch.rank] = batch.seq
        self.num_batches += 1
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(batch.rank)
                continue
            key = batch.rank, event.medium or "GPU", event.group_idx or 0
            held, left = self._held[key], self._left[key]
            for block in event.block_hashes:
                if isinstance(event, BlockStored):
                    self.num_stored += 1
                    self.num_again += block in left
                    left.pop(block, None)
                    held[block] += 1
                    continue
                self.num_removed += 1
                if held[block] > 1:
                    held[block] -= 1
                    continue
                del held[block]
                left[block] = None
                if len(left) > MAX_REMOVED:
                    left.popitem(last=False)

    def _clear(self, rank: int) -> None:
        for key, held in self._held.items():
            if key[0] == rank:
                held.clear()

    @property
    def num_cached(self) -> int:
        """Number of blocks in the caches, as far as they entered since the reading began."""
        return sum(sum(held.values()) for held in tuple(self._held.values()))
