"""Policies for several tenants, and for the victim of a preemption.

    simulate(workload, policy=VirtualTokenCounter())

A tenant is by default the ``cache_salt`` of its requests, which keeps its prompts apart from others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, get_args

from workbench.base.field_checks import choice, number
from workbench.scheduler.policy import PolicyView, SchedulingPolicy
from workbench.scheduler.request import Request

Tenant = Callable[[Request], str]


def by_salt(request: Request) -> str:
    """The tenant of a request by its ``cache_salt``."""
    return request.cache_salt


class VirtualTokenCounter(SchedulingPolicy):
    """The tenant that was served the fewest tokens is next (Sheng et al., Fairness in Serving LLMs, OSDI 2024).

    A tenant that comes back after it had no request does not catch up: its counter is raised to the lowest of those
    that had some.

    Args:
        tenant: The tenant of a request.
        output_weight: Weight of an output token; a prompt token has 1.

    Example:
        >>> from workbench import VirtualTokenCounter, simulate
        >>> requests = [{"id": name, "prompt": {"len": 50}, "cache_salt": name[0]} for name in ("a1", "a2", "b1")]
        >>> workload = {"requests": requests, "config": {"max_num_seqs": 1}}
        >>> trace = simulate(workload, policy=VirtualTokenCounter())
        >>> [request for step in trace for request in step.admitted]
        ['a1', 'b1', 'a2']
    """

    def __init__(self, tenant: Tenant = by_salt, output_weight: float = 2.0) -> None:
        self._tenant = tenant
        self.output_weight = number("output_weight", output_weight, 0.0)
        self._served: dict[str, float] = {}  # by request
        self._counters: dict[str, float] = {}
        self._active: set[str] = set()

    def waiting_order(self, view: PolicyView) -> Sequence[Request]:
        """See `SchedulingPolicy.waiting_order`."""
        self._count(view)
        ahead = dict(self._counters)
        order = []
        queues: dict[str, list[Request]] = {}
        for request in view.waiting:
            queues.setdefault(self._tenant(request), []).append(request)
        while queues:
            tenant = min(queues, key=ahead.__getitem__)
            request = queues[tenant].pop(0)
            ahead[tenant] += request.num_prompt_tokens  # as if it were served now
            if not queues[tenant]:
                del queues[tenant]
            order.append(request)
        return order

    def _count(self, view: PolicyView) -> None:
        """Bring the counters up to date; the same view again changes nothing."""
        present = {self._tenant(request) for request in (*view.running, *view.waiting)}
        lowest = min((self._counters[tenant] for tenant in self._active & present), default=None)
        for tenant in present - self._active:
            known = self._counters.get(tenant, 0.0)
            self._counters[tenant] = known if lowest is None else max(known, lowest)
        self._active = present
        for request in view.running:
            outputs = request.num_tokens - request.num_prompt_tokens
            served = min(request.num_kv_computed, request.num_prompt_tokens) + self.output_weight * outputs
            before = self._served.get(request.request_id, 0.0)
            if served > before:  # a preemption serves nobody twice
                self._served[request.request_id] = served
                self._counters[self._tenant(request)] += served - before


class WeightedFairQueueing(SchedulingPolicy):
    """Requests in the order in which they would end if every tenant had its share of a server to itself.

    A request's tag is the later of the virtual time and its tenant's latest tag, plus its tokens over its tenant's
    weight; the smallest is next (Demers, Keshav and Shenker, 1989).

    Args:
        weights: Weight by tenant; 1 for others.
        tenant: The tenant of a request.

    Example:
        >>> from workbench import WeightedFairQueueing, simulate
        >>> requests = [{"id": name, "prompt": {"len": 50}, "cache_salt": name[0]} for name in ("a1", "a2", "b1")]
        >>> workload = {"requests": requests, "config": {"max_num_seqs": 1}}
        >>> trace = simulate(workload, policy=WeightedFairQueueing({"b": 2.0}))
        >>> [request for step in trace for request in step.admitted]
        ['b1', 'a1', 'a2']
    """

    def __init__(self, weights: dict[str, float] | None = None, tenant: Tenant = by_salt) -> None:
        self.weights = dict(weights or {})
        for name, weight in self.weights.items():
            number(f"the weight of {name!r}", weight, 0.0, low_open=True)
        self._tenant = tenant
        self._tags: dict[str, tuple[float, float]] = {}  # begin and end by request
        self._latest: dict[str, float] = {}  # by tenant

    def waiting_order(self, view: PolicyView) -> Sequence[Request]:
        """See `SchedulingPolicy.waiting_order`."""
        now = max((self._tags[one.request_id][0] for one in view.running if one.request_id in self._tags), default=0.0)
        for request in view.waiting:
            if request.request_id not in self._tags:
                tenant = self._tenant(request)
                begin = max(now, self._latest.get(tenant, 0.0))
                cost = (request.num_prompt_tokens + request.max_tokens) / self.weights.get(tenant, 1.0)
                self._tags[request.request_id] = (begin, begin + cost)
                self._latest[tenant] = begin + cost
        return sorted(view.waiting, key=lambda request: self._tags[request.request_id][1])


VictimRule = Literal["least_computed", "most_blocks", "most_left"]


class Victim(SchedulingPolicy):
    """Another victim of a preemption than the request that was admitted last.

    Args:
        rule: "least_computed" has the least to compute again; "most_blocks" frees the most; "most_left" is the farthest
            from its end.
    """

    RULES: ClassVar[tuple[VictimRule, ...]] = get_args(VictimRule)

    def __init__(self, rule: VictimRule = "least_computed") -> None:
        self.rule = choice("rule", rule, self.RULES)

    def victim(self, view: PolicyView) -> Request:
        """See `SchedulingPolicy.victim`."""
        latest_first = view.victims[::-1]
        if self.rule == "least_computed":
            return min(latest_first, key=lambda request: request.num_kv_computed)
        if self.rule == "most_blocks":
            return max(latest_first, key=lambda request: len(request.block_tables[0]))
        return max(latest_first, key=lambda request: request.max_num_tokens - request.num_tokens)
