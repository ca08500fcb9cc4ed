"""Waiting requests that others may overtake: their grammar is not ready, or too many other adapters run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from workbench.scheduler.batch import Sampled, ScheduledBatch
from workbench.scheduler.chain import OrderOver, Owner
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.queues import Plan, Queues, ServiceOrder
from workbench.scheduler.request import FinishReason, Request
from workbench.trace.reasons import Reason


class Obstacles(OrderOver):
    """Passes over the requests that have an obstacle; a subclass says which."""

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        self._overtakable: list[Request] = []

    def carry_on(self, before: Self) -> None:
        """The same requests."""
        self._overtakable = before._overtakable

    def waiting_order(self, batch: ScheduledBatch, budget: int, num_seats: int) -> Iterable[Request]:
        """As many more as may be passed over."""
        self._overtakable = [request for request in self._overtakable if request.status != "finished"]
        return self._order.waiting_order(batch, budget, num_seats + len(self._overtakable))

    def consider(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """The obstacle of a request, if it has one."""
        if (obstacle := self.obstacle(plan.request)) is not None:
            plan.may_be_overtaken = True
            return obstacle
        return self._order.consider(plan, batch)

    def obstacle(self, request: Request) -> Reason | None:
        """The reason of a request that has an obstacle."""
        raise NotImplementedError


class AdapterSeats(Obstacles):
    """Keeps the adapters of running requests to ``max_loras`` different ones."""

    def arrived(self, request: Request) -> None:
        """Take note of a request with an adapter."""
        if request.adapter and request.grammar is None:  # `Grammars` counts the others
            self._overtakable.append(request)
        self._order.arrived(request)

    def obstacle(self, request: Request) -> Reason | None:
        """As many adapters run as may, and the request's is not one of them."""
        limit = self.config.max_loras
        if not request.adapter or not limit:
            return None
        users = {other.adapter: other.request_id for other in self.queues.running if other.adapter}
        if request.adapter in users or len(users) < limit:
            return None
        return Reason("adapter", "max_loras", limit, 1, 0, requests=tuple(users.values()))


class Grammars(Obstacles):
    """Lets requests wait for their grammars, and ends those whose grammars cannot be compiled."""

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        self._refused: list[Request] = []

    def carry_on(self, before: Self) -> None:
        """The same requests."""
        super().carry_on(before)
        self._refused = before._refused

    def rehearsal(self, queues: Queues, kv_cache: KVCacheManager) -> Self:
        """The same order over copies, which ends no request of this one."""
        clone = super().rehearsal(queues, kv_cache)
        clone._refused = []
        return clone

    def arrived(self, request: Request) -> None:
        """Take note of a request with a grammar."""
        if request.grammar is not None:
            self._overtakable.append(request)
        self._order.arrived(request)

    def obstacle(self, request: Request) -> Reason | None:
        """Its grammar is not compiled."""
        if request.grammar is None or request.grammar.is_ready:
            return None
        if error := request.grammar.error:
            self._refused.append(request)
        return Reason("grammar", text=error)

    def take_output(
        self, batch: ScheduledBatch, sampled: Sampled, finish: Mapping[str, FinishReason], last: ScheduledBatch
    ) -> Iterator[tuple[Request, FinishReason]]:
        """End the requests whose grammars cannot be compiled in the iteration that found out, as vLLM does."""
        yield from self._order.take_output(batch, sampled, finish, last)
        for request in self._refused:
            if request.status != "finished":
                yield request, "error"
        self._refused.clear()

    def ended(self, request: Request) -> None:
        """Give back what a grammar holds."""
        if request.grammar is not None:
            request.grammar.release()
        self._order.ended(request)
