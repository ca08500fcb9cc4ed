"""The queues of a scheduler, and vLLM V1's order of service on them."""

from __future__ import annotations

import copy
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Self

from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.request import FinishReason, Request
from workbench.trace.reasons import Rule
from workbench.trace.records import LimitedBy

if TYPE_CHECKING:
    from workbench.config import EngineConfig


class FCFSRequestQueue(deque[Request]):
    """First come, first served; a preempted request goes back to the head."""

    add = deque.append
    put_back = deque.appendleft
    pop_head = deque.popleft


def priority_key(request: Request) -> tuple[int, float, str]:
    """Order of the "priority" policy: smaller is served first."""
    return (request.priority, request.arrival_time, request.request_id)


class PriorityRequestQueue(list[Request]):
    """Smaller priority first, then earlier arrival, then request id; a preempted request keeps its place."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        super().__init__(sorted(requests, key=priority_key))

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self, request, key=priority_key)

    put_back = add

    def pop_head(self) -> Request:
        """Remove and return the first request."""
        return self.pop(0)


RequestQueue = FCFSRequestQueue | PriorityRequestQueue
REQUEST_QUEUES: dict[str, type[FCFSRequestQueue] | type[PriorityRequestQueue]] = {
    "fcfs": FCFSRequestQueue,
    "priority": PriorityRequestQueue,
}


class Queues:
    """Every unfinished request, on its way from the waiting queue to the running list and out.

    Args:
        policy: "fcfs" or "priority": the order of the waiting queue.

    Attributes:
        requests: Unfinished requests by id.
        running: Admitted requests in the order of their admission.
        waiting: The waiting queue, ``waiting[0]`` its head.
        arrived: Ids of requests added since the last step was scheduled.
        aborted: Ids of requests aborted since then.
    """

    def __init__(self, policy: str) -> None:
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: RequestQueue = REQUEST_QUEUES[policy]()
        self.arrived: list[str] = []
        self.aborted: list[str] = []
        # The queues as records hold them. They change far less often than steps are taken; None when out of date.
        self._running_ids: tuple[str, ...] | None = None
        self._waiting_ids: tuple[str, ...] | None = None
        self._snapshot: tuple[tuple[Request, ...], tuple[Request, ...]] | None = None

    def running_ids(self) -> tuple[str, ...]:
        """Ids of the running requests in the order of their admission."""
        if self._running_ids is None:
            self._running_ids = tuple([request.request_id for request in self.running])
        return self._running_ids

    def waiting_ids(self) -> tuple[str, ...]:
        """Ids of the waiting requests in queue order."""
        if self._waiting_ids is None:
            self._waiting_ids = tuple([request.request_id for request in self.waiting])
        return self._waiting_ids

    def snapshot(self) -> tuple[tuple[Request, ...], tuple[Request, ...]]:
        """The running and the waiting requests as they are now."""
        if self._snapshot is None:
            self._snapshot = (tuple(self.running), tuple(self.waiting))
        return self._snapshot

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.requests[request.request_id] = request
        self.waiting.add(request)
        self.arrived.append(request.request_id)
        self._waiting_ids = self._snapshot = None

    def admit(self, request: Request) -> None:
        """Move a request from the waiting queue to the end of the running list."""
        if request is self.waiting[0]:
            self.waiting.pop_head()
        else:
            self.waiting.remove(request)
        request.status = "running"
        self.running.append(request)
        self._running_ids = self._waiting_ids = self._snapshot = None

    def preempt(self, request: Request) -> None:
        """Move a request from the running list back to the waiting queue."""
        self.running.remove(request)
        request.status = "preempted"
        self.waiting.put_back(request)
        self._running_ids = self._waiting_ids = self._snapshot = None

    def abort(self, request: Request) -> None:
        """Take a request off the running list; ``finish`` ends it."""
        if request.status == "running":
            self.running.remove(request)
            self._running_ids = self._snapshot = None
        self.aborted.append(request.request_id)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. A running one stays on the running list until ``drop_finished``."""
        if request.status != "running":
            self.waiting.remove(request)
            self._waiting_ids = self._snapshot = None
        request.status, request.finish_reason = "finished", reason
        del self.requests[request.request_id]

    def drop_finished(self) -> None:
        """Take finished requests off the running list."""
        self.running = [request for request in self.running if request.status == "running"]
        self._running_ids = self._snapshot = None

    def reorder(self, policy: str) -> None:
        """Put the waiting queue into the order of another policy."""
        self.waiting = REQUEST_QUEUES[policy](self.waiting)
        self._waiting_ids = self._snapshot = None

    def copy(self) -> Queues:
        """Queues in the same state, with copies of the requests, that can be changed without changing these."""
        clone = copy.copy(self)
        copies = {request_id: request.copy() for request_id, request in self.requests.items()}
        clone.requests = copies
        clone.running = [copies[request.request_id] for request in self.running]
        clone.waiting = type(self.waiting)(copies[request.request_id] for request in self.waiting)
        clone.arrived, clone.aborted, clone._snapshot = self.arrived.copy(), self.aborted.copy(), None
        return clone


class ServiceOrder:
    """vLLM V1's order of service: which requests are looked at first, how long a chunk may be, which one gives way.

    A scheduling policy and the limits on concurrent partial prefills are other orders with the same methods.

    Args:
        config: Limits and policies.
        queues: The requests.
        kv_cache: Their KV blocks.
    """

    def __init__(self, config: EngineConfig, queues: Queues, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.queues = queues
        self.kv_cache = kv_cache

    def running_order(self, batch: ScheduledBatch) -> Sequence[Request]:
        """Running requests in the order of service, in a new list: a preemption shortens the running list itself."""
        return self.queues.running.copy()

    def waiting_order(self, batch: ScheduledBatch, budget: int, num_seats: int) -> Iterable[Request]:
        """Waiting requests in the order of admission, ``num_seats`` of them or more if there are as many."""
        return list(islice(self.queues.waiting, num_seats))

    def limit_chunk(
        self, request: Request, num_tokens: int, limited_by: LimitedBy, batch: ScheduledBatch, budget: int
    ) -> tuple[int, LimitedBy]:
        """A chunk's length and what limits it, shortened to what this order allows."""
        if 0 < batch.long_prefill_cap < num_tokens:
            return batch.long_prefill_cap, "long_prefill_token_threshold"
        return num_tokens, limited_by

    def victim(self, batch: ScheduledBatch, budget: int) -> tuple[Request, Rule]:
        """The running request that loses its blocks when they run out, and the rule that chose it."""
        if self.config.policy == "fcfs":
            return self.queues.running[-1], "last_admitted"
        return max(self.queues.running, key=lambda request: (request.priority, request.arrival_time)), "priority"

    def rehearsal(self, queues: Queues, kv_cache: KVCacheManager) -> Self:
        """The same order over a copy of the queues and of the KV blocks."""
        clone = copy.copy(self)
        clone.queues, clone.kv_cache = queues, kv_cache
        return clone
