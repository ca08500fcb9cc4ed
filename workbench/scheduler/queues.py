"""The queues of a scheduler, vLLM V1's order of service on them, and the named places of that order.

An optional feature takes part in a step at one of these places and nowhere else: it is a link of a chain over the order
of service (`workbench.scheduler.chain`). A plain step runs `ServiceOrder` alone.
"""

from __future__ import annotations

import copy
import sys
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from workbench.scheduler.batch import Sampled, ScheduledBatch, ScheduledChunk, only
from workbench.scheduler.kv_cache_groups import PrefixHit
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.request import FinishReason, Request
from workbench.trace.reasons import UNKNOWN, Kind, Reason, Rule
from workbench.trace.records import LimitedBy

if TYPE_CHECKING:
    from workbench.config import EngineConfig

Order = TypeVar("Order", bound="ServiceOrder")
Advance = Callable[[ScheduledChunk], None]
"""Moves a chunk's request to the end of the chunk."""
Admit = Callable[[ScheduledBatch, int], int]
"""Admits waiting requests within a budget, and returns what is left of it."""


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


class Plan(msgspec.Struct, gc=False):
    """The next chunk of a request while its length is being decided.

    Attributes:
        request: The request.
        start: The chunk's first position.
        room: Tokens that the step has left for it.
        num_wanted: Tokens that it would have without limits.
        num_tokens: Tokens that it has with the limits that have been asked so far.
        limited_by: The limit that keeps it from being longer.
        hit: The prefix hit of an admission; None for a running request.
        num_uncached: For an admission the known tokens behind the hit.
        longest: Tokens up to the length of the longest sequence.
        steady: Tokens that a policy allows the request in every step.
        removed: Result of ``remove_skipped_blocks``, if a link has called it.
        may_be_overtaken: Requests behind this one may be admitted although it is refused.
    """

    request: Request
    start: int
    room: int
    num_wanted: int
    num_tokens: int
    limited_by: LimitedBy = "complete"
    hit: PrefixHit | None = None
    num_uncached: int = 0
    longest: int = sys.maxsize
    steady: int = sys.maxsize
    removed: Sequence[Sequence[int]] = ()
    may_be_overtaken: bool = False

    @classmethod
    def of_admission(cls, request: Request, hit: PrefixHit, room: int) -> Plan:
        """The first chunk of a waiting request, behind its hit."""
        start, _, request.shared_prefix_boundary = hit
        num_uncached = len(request.token_ids) - start
        return cls(request, start, room, num_uncached, num_uncached, "complete", hit, num_uncached)

    def limit(self, num_tokens: int, limited_by: LimitedBy) -> None:
        """Shorten the chunk to this many tokens if it has more."""
        if num_tokens < self.num_tokens:
            self.num_tokens, self.limited_by = num_tokens, limited_by

    def limit_to_step(self) -> None:
        """Shorten the chunk to the rest of the budget, and to the longest sequence."""
        if self.room < self.num_tokens:
            self.num_tokens, self.limited_by = self.room, "token_budget"
        if self.longest < self.num_tokens:
            self.num_tokens, self.limited_by = self.longest, "max_model_len"


def over_budget(config: EngineConfig, needed: int, room: int, rule: Rule = "", kind: Kind = "token_budget") -> Reason:
    """The reason of a request that the rest of the budget is too small for."""
    field = "max_num_scheduled_tokens" if config.max_num_scheduled_tokens else "max_num_batched_tokens"
    return Reason(kind, field, config.token_budget, needed, room, rule=rule)


class ServiceOrder:
    """vLLM V1's order of service: which requests are looked at first, how long a chunk may be, which one gives way.

    Its methods are the places at which a feature takes part in a step, in the order in which a step comes to them.
    A scheduling policy is another order. Every other feature is laid over an order (`chain.OrderOver`).

    Args:
        config: Limits and policies.
        queues: The requests.
        kv_cache: Their KV blocks.

    Attributes:
        caps_chunks: Whether ``long_prefill_token_threshold`` is a limit on chunks.
        decodes_plainly: A decode takes one token, and nothing but the queue decides who is admitted.
    """

    caps_chunks = True
    decodes_plainly = True

    def __init__(self, config: EngineConfig, queues: Queues, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.queues = queues
        self.kv_cache = kv_cache

    def max_in_flight(self) -> int:
        """Maximum number of steps that are scheduled and not complete."""
        return 1

    def arrived(self, request: Request) -> None:
        """Take note of a new request."""

    def running_order(self, batch: ScheduledBatch) -> Iterable[Request]:
        """Running requests in the order of service, in a new list: a preemption shortens the running list itself."""
        return self.queues.running.copy()

    def waiting_order(self, batch: ScheduledBatch, budget: int, num_seats: int) -> Iterable[Request]:
        """Waiting requests in the order of admission, ``num_seats`` of them or more if there are as many."""
        return list(islice(self.queues.waiting, num_seats))

    def room(self, batch: ScheduledBatch, budget: int) -> int:
        """Tokens that the next chunk may have."""
        return budget

    def consider(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """The reason why a waiting request is not admitted yet, or None; may change what it wants."""
        return None

    def limit_chunk(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Shorten a chunk to what this order and the step allow; the reason if nothing is left of it."""
        if batch.long_prefill_cap:
            plan.limit(batch.long_prefill_cap, "long_prefill_token_threshold")
        plan.limit_to_step()
        return None

    def admitted(self, plan: Plan, chunk: ScheduledChunk) -> None:
        """Take note of a request that is admitted, and of its first chunk."""

    def continued(self, plan: Plan, chunk: ScheduledChunk) -> None:
        """Take note of a running request's chunk."""

    def computed(self, chunk: ScheduledChunk, num_tokens: int) -> None:
        """Take note of tokens that a chunk was given; less than 0 if it is taken out of the batch again."""

    def victim(self, batch: ScheduledBatch, budget: int) -> tuple[Request, Rule]:
        """The running request that loses its blocks when they run out, and the rule that chose it."""
        if self.config.policy == "fcfs":
            return self.queues.running[-1], "last_admitted"
        return max(self.queues.running, key=lambda request: (request.priority, request.arrival_time)), "priority"

    def preempted(self, request: Request) -> None:
        """Take note of a request that is about to lose its blocks."""

    def rest(self, batch: ScheduledBatch, budget: int, advance: Advance, admit: Admit) -> int:
        """Use what is left of the budget when every request has been asked; returns what is left then."""
        return budget

    def not_reached(self) -> Reason:
        """The reason of requests that the admissions did not come to, with budget and seats left."""
        return UNKNOWN

    def take_output(
        self, batch: ScheduledBatch, sampled: Sampled, finish: Mapping[str, FinishReason], last: ScheduledBatch
    ) -> Iterator[tuple[Request, FinishReason]]:
        """Append the sampled tokens of a step to its requests.

        Args:
            batch: The step.
            sampled: Its tokens.
            finish: Requests that end for a reason only the caller of ``Scheduler.update`` sees.
            last: The batch that was scheduled last.

        Yields:
            Each request that ends, with the reason, before the next request's tokens are appended.
        """
        max_model_len = self.config.max_model_len or sys.maxsize
        for chunk, tokens in zip(batch.chunks, sampled):
            request = chunk.request
            if request.status == "finished":  # ended since schedule()
                chunk.discarded = True
                continue
            reason = finish.get(request.request_id) if finish else None
            if tokens is not None and reason != "error":
                chunk.sampled = token = tokens if type(tokens) is int else only(tokens)
                token_ids = request.token_ids
                token_ids.append(token)
                length = len(token_ids)
                # check_stop(), whose call takes longer than this test.
                if length >= request.max_num_tokens or length >= max_model_len or token in request.stop_token_ids:
                    reason = reason or ("stop" if token in request.stop_token_ids else "length")
            if reason is not None:
                yield request, reason

    def ended(self, request: Request) -> None:
        """Take note of a request that has ended."""

    def set_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Take the drafts that requests verify next, see `Scheduler.set_drafts`."""
        allowed = self.config.num_speculative_tokens
        for request_id, tokens in drafts.items():
            if len(tokens) > allowed:
                raise ValueError(
                    f"request {request_id!r} gets {len(tokens)} draft tokens, num_speculative_tokens allows {allowed}"
                )

    def rehearsal(self, queues: Queues, kv_cache: KVCacheManager) -> Self:
        """The same order over a copy of the queues and of the KV blocks."""
        clone = copy.copy(self)
        clone.queues, clone.kv_cache = queues, kv_cache
        return clone

    def find(self, kind: type[Order]) -> Order | None:
        """The link of this kind; None if there is none in this order."""
        return self if isinstance(self, kind) else None
