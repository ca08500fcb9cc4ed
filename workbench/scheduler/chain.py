"""The chain of a scheduler: its order of service, and over it the features that a configuration turns on.

A feature that is off is not imported, and a feature that is on is asked at the places that it overrides and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from workbench.scheduler.queues import Order, Queues, ServiceOrder

if TYPE_CHECKING:
    from workbench.config import EngineConfig
    from workbench.scheduler.kv_cache_manager import KVCacheManager
    from workbench.scheduler.policy import SchedulingPolicy
    from workbench.scheduler.request import Request

_OWN = {"rehearsal", "find"}
PLACES = tuple(name for name in vars(ServiceOrder) if not name.startswith("_") and name not in _OWN)
"""The places of an order of service: what is asked of the order below unless a link answers it."""


class Owner(Protocol):
    """The scheduler, as far as the links of its chain know it; `Scheduler` says what each attribute means."""

    config: EngineConfig
    queues: Queues
    kv_cache: KVCacheManager
    order: ServiceOrder
    policy: SchedulingPolicy | None
    max_model_len: int
    as_vllm: bool


class OrderOver(ServiceOrder):
    """A link of the chain: an order laid over another one, which answers whatever this one does not override.

    Args:
        scheduler: The scheduler.
        order: The other order.
    """

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler.config, scheduler.queues, scheduler.kv_cache)
        self.lay_over(order)

    def lay_over(self, order: ServiceOrder) -> None:
        """Answer with the other order at every place that this link leaves to it, without a call in between."""
        self._order = order
        for place in PLACES:
            if getattr(type(self), place) is getattr(ServiceOrder, place):
                setattr(self, place, getattr(order, place))

    def carry_on(self, before: Self) -> None:
        """Take over what the same link knew under the configuration before."""

    def rehearsal(self, queues: Queues, kv_cache: KVCacheManager) -> Self:
        """The same order over a copy of the queues and of the KV blocks."""
        clone = super().rehearsal(queues, kv_cache)
        clone.lay_over(self._order.rehearsal(queues, kv_cache))
        return clone

    def find(self, kind: type[Order]) -> Order | None:
        """See `ServiceOrder.find`."""
        return super().find(kind) or self._order.find(kind)


class Link(NamedTuple):
    """A link that a chain may have.

    Attributes:
        module: Its module in ``workbench.scheduler``.
        kind: Its class.
        reason: Why it stands at this place.
        is_on: Whether a configuration has it; None if it joins when a request needs it, and stays.
        is_for: Whether a request needs it from its arrival on; None if none does.
    """

    module: str
    kind: str
    reason: str
    is_on: Callable[[EngineConfig], bool] | None = None
    is_for: Callable[[Request], bool] | None = None


def _caches_states(config: EngineConfig) -> bool:
    return config.enable_prefix_caching and any(group.kind == "mamba" for group in config.cache_groups)


CHAIN = (
    Link(
        "partial_prefills",
        "PartialPrefills",
        "lies over vLLM's order or a policy's: a prompt's share is cut before the limits of either",
        lambda config: config.max_num_partial_prefills is not None or config.max_long_partial_prefills is not None,
    ),
    Link(
        "second_tier",
        "TransferOrder",
        "lets a load begin for every request that is next, whatever the links above say to its admission",
        lambda config: config.second_tier is not None,
    ),
    Link(
        "state_boundaries",
        "StateBoundaries",
        "moves the end of a chunk after all limits have shortened it",
        _caches_states,
    ),
    Link(
        "draft_rows",
        "DraftRows",
        "adds rows to an admission that the links below have considered, and may refuse it for their sake",
        lambda config: config.num_speculative_tokens > 0,
    ),
    Link(
        "draft_rows",
        "WholePrompts",
        "compares the budget with all rows of an admission, those for drafts included",
        lambda config: not config.enable_chunked_prefill,
    ),
    Link(
        "obstacles",
        "AdapterSeats",
        "is asked before the links below, which take note of the requests that they consider",
        is_for=lambda request: bool(request.adapter),
    ),
    Link(
        "in_flight",
        "InFlight",
        "names an output in flight before an adapter that is missing, and takes in tokens instead of the order below",
        lambda config: config.async_scheduling or config.num_speculative_tokens > 0,
    ),
    Link(
        "obstacles",
        "Grammars",
        "ends requests after the tokens of a step were taken in, and a grammar is the first obstacle of all",
        is_for=lambda request: request.grammar is not None,
    ),
    Link(
        "starvation",
        "Frugal",
        "cuts what every other link has left of a chunk to the free blocks, and serves what all of them refuse",
    ),
)
"""All links, the lowest first, which is the one that the others are laid over; each with the reason of its place."""


_JOINING = tuple([(link.kind, link.is_for) for link in CHAIN if link.is_for is not None])


def needed_for(request: Request) -> list[str]:
    """The kinds of links that a request needs."""
    return [kind for kind, is_for in _JOINING if is_for(request)]


def make_order(scheduler: Owner) -> ServiceOrder:
    """The chain of a scheduler's configuration over vLLM's order or a policy's, with what its links before know."""
    order, before = _lowest(scheduler), links_of(scheduler.order)
    for link in CHAIN:
        if link.kind in before if link.is_on is None else link.is_on(scheduler.config):
            order = made = _kind_of(link)(scheduler, order)
            if link.kind in before:
                made.carry_on(before[link.kind])
    return order


def _lowest(scheduler: Owner) -> ServiceOrder:
    if scheduler.policy is None:
        return ServiceOrder(scheduler.config, scheduler.queues, scheduler.kv_cache)
    from workbench.scheduler.policy import PolicyOrder

    return PolicyOrder(scheduler.config, scheduler.queues, scheduler.kv_cache, scheduler.policy)


def with_links(scheduler: Owner, kinds: Collection[str]) -> ServiceOrder:
    """The chain of a scheduler with further links, each at its place; the others stay as they are."""
    links = links_of(scheduler.order)
    order: ServiceOrder = next(iter(links.values()))._order if links else scheduler.order
    for link in CHAIN:
        if (known := links.get(link.kind)) is not None:
            known.lay_over(order)
            order = known
        elif link.kind in kinds:
            order = _kind_of(link)(scheduler, order)
    return order


def links_of(order: ServiceOrder) -> dict[str, OrderOver]:
    """The links of a chain by their kind, the lowest first."""
    found: list[OrderOver] = []
    while isinstance(order, OrderOver):
        found.append(order)
        order = order._order
    return {type(link).__name__: link for link in reversed(found)}


def _kind_of(link: Link) -> type[OrderOver]:
    kind: Any = getattr(import_module(f"workbench.scheduler.{link.module}"), link.kind)
    return kind
