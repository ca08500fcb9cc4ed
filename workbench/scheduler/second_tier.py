"""A second tier of the prefix cache, simulated: host memory or a disk that keeps content which the pool has evicted.

Every full block is copied to it when the step that computed it has ended, as vLLM's offloading does, beside the
computation and at no cost in time. A waiting request whose prefix continues there waits until its blocks have been
loaded, one request after another over one link; others may overtake it. Loaded blocks then lie in the prefix cache, and
the request is admitted with them. They take their places in the pool when the load ends. A request whose load would
find no place is computed instead.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Self

from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.chain import OrderOver, Owner
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.queues import Queues, ServiceOrder
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason
from workbench.trace.records import Load


class Transfer(NamedTuple):
    """Blocks on their way, in the places ``[first, last)`` of a request's block table, until the time ``end``."""

    first: int
    last: int
    end: float
    reason: Reason


class SecondTier:
    """The content of the tier and its link; the least recently used content goes, the end of a prefix first.

    Args:
        limits: ``EngineConfig.second_tier``.
        block_size: Tokens of a block.

    Attributes:
        transfers: Loads that have not ended, by request.
    """

    def __init__(self, limits: Mapping[str, Any], block_size: int) -> None:
        self.transfers: dict[str, Transfer] = {}
        self._block_size = block_size
        self._num_blocks: int = limits["num_blocks"]
        self._latency: float = limits["latency"]
        self._block_seconds = block_size * limits["kv_bytes_per_token"] / limits["bandwidth"]
        self._link_free = 0.0
        self._contents: OrderedDict[bytes, None] = OrderedDict()

    def copy(self) -> SecondTier:
        """A tier in the same state that can be changed without changing this one."""
        clone = copy.copy(self)
        clone.transfers, clone._contents = self.transfers.copy(), self._contents.copy()
        return clone

    @property
    def next_end(self) -> float | None:
        """The moment at which the first transfer ends; None without one."""
        return min((transfer.end for transfer in self.transfers.values()), default=None)

    def store(self, digest: bytes) -> None:
        """Keep the content of a block."""
        self._contents[digest] = None
        self._contents.move_to_end(digest)
        if len(self._contents) > self._num_blocks:
            self._contents.popitem(last=False)

    def use(self, digests: Sequence[bytes]) -> None:
        """A request uses a prefix: its content goes last, and its end before its beginning."""
        for digest in reversed(digests):
            if digest in self._contents:
                self._contents.move_to_end(digest)

    def num_kept(self, digests: Sequence[bytes]) -> int:
        """Leading blocks whose content is kept."""
        return sum(1 for _ in takewhile(self._contents.__contains__, digests))

    def load(self, request_id: str, first: int, last: int, now: float) -> Transfer:
        """Begin to load the blocks in the places ``[first, last)`` of a request's block table."""
        num_tokens = (last - first) * self._block_size
        begin = max(now, self._link_free)
        end = self._link_free = begin + self._latency + (last - first) * self._block_seconds
        reason = Reason("transfer", "second_tier", needed=num_tokens, num_tokens=num_tokens)
        self.transfers[request_id] = transfer = Transfer(first, last, end, reason)
        return transfer


class TransferOrder(OrderOver):
    """Lets requests wait for their content of the second tier."""

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        assert self.config.second_tier is not None
        self._tier = SecondTier(self.config.second_tier, self.config.block_size)
        self._before: ScheduledBatch | None = None

    @property
    def tier(self) -> SecondTier:
        """The second tier."""
        return self._tier

    def carry_on(self, before: Self) -> None:
        """The same tier."""
        self._tier = before._tier

    def running_order(self, batch: ScheduledBatch) -> Iterable[Request]:
        """The order below; the content of the step before is stored first."""
        if self._before is not None:
            pool = self.kv_cache.block_pool
            for block in self._before.cached_block_ids:
                if (digest := pool.hash_of(block)) is not None:
                    self._tier.store(digest)
            for chunk in self._before.chunks:
                if chunk.request.status == "finished":
                    self._tier.use(chunk.request.block_hashes)
        self._before = batch
        for request_id in batch.aborted:
            self._tier.transfers.pop(request_id, None)
        return self._order.running_order(batch)

    def waiting_order(self, batch: ScheduledBatch, budget: int, num_seats: int) -> Iterable[Request]:
        """The order below, without those that wait for their content."""
        for request in self._order.waiting_order(batch, budget, len(self.queues.waiting)):
            if (transfer := self._transfer(request, batch.time)) is None:
                yield request
            elif batch.time < transfer.end:
                batch.passed_over[request.request_id] = transfer.reason
            else:
                del self._tier.transfers[request.request_id]
                hits, blocks = self.kv_cache.take_in(request, transfer.last * self.config.block_size)
                if blocks:
                    batch.loads += (Load(request.request_id, tuple(hits), tuple(blocks)),)
                yield request

    def _transfer(self, request: Request, now: float) -> Transfer | None:
        """A request's transfer, which begins now if it has none and needs one."""
        tier, kv_cache, size = self._tier, self.kv_cache, self.config.block_size
        if (transfer := tier.transfers.get(request.request_id)) is not None:
            return transfer
        if request.frugal or request.sampling.prompt_logprobs is not None:
            return None
        hit = kv_cache.get_computed_blocks(request)
        prefix = request.block_hashes[: (len(request.token_ids) - 1) // size]
        first = hit.num_tokens // size
        last = first + tier.num_kept(prefix[first:])
        places = last + sum(transfer.last - transfer.first for transfer in tier.transfers.values())
        if last == first or kv_cache.refuse(request, hit, places * size, others_run=bool(self.queues.running)):
            return None  # nothing is there, or it would find no place
        tier.use(prefix)
        return tier.load(request.request_id, first, last, now)

    def rehearsal(self, queues: Queues, kv_cache: KVCacheManager) -> Self:
        """The same order over a copy of the queues, of the KV blocks and of the tier."""
        clone = super().rehearsal(queues, kv_cache)
        clone._tier = self._tier.copy()
        return clone
