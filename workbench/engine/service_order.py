"""In which order requests are served, and who gives way: vLLM V1's order, or that of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from workbench.engine.config import EngineConfig
from workbench.engine.partial_prefills import MAX_SCANNED
from workbench.engine.policy import CheckedPolicy, PolicyView, SchedulingPolicy
from workbench.engine.request import Request
from workbench.engine.scheduled_batch import ScheduledBatch
from workbench.engine.scheduler_state import SchedulerState


class ServiceOrder(SchedulerState):
    """The scheduler's state with an order on it.

    Args:
        config: Limits and policies.
        policy: Decides instead of vLLM's rules; None for those.

    Attributes:
        policy: The policy, its answers checked; None for vLLM's rules.
    """

    def __init__(self, config: EngineConfig, policy: SchedulingPolicy | None) -> None:
        super().__init__(config)
        self.policy = None if policy is None else CheckedPolicy(policy)

    def _running_order(self, batch: ScheduledBatch) -> Sequence[Request]:
        """Running requests in the order in which they are served: a list of its own, because victims leave theirs."""
        order: Sequence[Request] = self.running.copy()
        if self.policy is not None:
            order = self.policy.running_order(self._view(batch, batch.token_budget))
        if self.partial_prefills is not None:
            num_seats = max(0, self.max_running - len(self.running))
            if len(order) < len(self.running):  # a policy may let decodes wait, not prompts in progress
                chosen = set(map(id, order))
                order = [*order, *(r for r in self.running if r.is_prefill and id(r) not in chosen)]
            order = self.partial_prefills.begin_step(order, min(num_seats, len(self.waiting)))
        return order

    def _waiting_order(self, batch: ScheduledBatch, budget: int) -> Iterable[Request]:
        """Waiting requests in the order in which they are looked at."""
        if self.partial_prefills is not None:
            self.partial_prefills.begin_scan()
        if self.policy is not None:
            return self.policy.waiting_order(self._view(batch, budget))
        if self.partial_prefills is not None:
            return list(islice(self.waiting, MAX_SCANNED))
        return iter(lambda: self.waiting.head if self.waiting else None, None)

    def _view(self, batch: ScheduledBatch, budget: int) -> PolicyView:
        """What a policy may see, as it is now."""
        if self._view_of_queues is None:
            self._view_of_queues = (tuple(self.running), tuple(self.waiting))
        return PolicyView(
            batch.step, batch.time, self.config, budget, *self._view_of_queues, self.kv_cache.num_free, self.kv_cache
        )

    def _victim(self, batch: ScheduledBatch, budget: int) -> Request:
        """The running request that loses its blocks when they run out."""
        if self.policy is not None:
            return self.policy.victim(self._view(batch, budget))
        if self.config.policy == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda request: (request.priority, request.arrival_time))
