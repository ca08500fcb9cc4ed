"""A router's rule: what it may know of replicas, and what it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from workbench.base.field_checks import refuse_misspelt_methods
from workbench.simulation.arrivals import Arrival


class ReplicaView(Protocol):
    """A replica as a router sees it at the moment of a request's arrival."""

    @property
    def index(self) -> int:
        """Its number, from 0."""

    @property
    def name(self) -> str:
        """Its address, which some routers hash."""

    @property
    def num_in_flight(self) -> int:
        """Requests that were sent to it and have not ended."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that requests without a first token were expected to compute when they were sent."""

    @property
    def num_waiting(self) -> int:
        """Requests in its waiting queue, after its latest step."""

    @property
    def num_running(self) -> int:
        """Requests that it runs, after its latest step."""

    @property
    def kv_use(self) -> float:
        """Share of its KV blocks that requests hold, after its latest step."""

    def num_cached_tokens(self, request: Arrival) -> int:
        """Prompt tokens in its prefix cache, by the KV events of its completed steps."""


class Decision(NamedTuple):
    """The decision of a router about one request.

    Attributes:
        replica: Place of the chosen replica among those that were given.
        scores: The number of each of them that decided it, see ``Router.scores``; empty if none did.
        rule: The part of the router's rule that applied; "" if it has only one.
        loads: Requests in flight of each of them, if the rule weighs them against its scores; empty if not.
    """

    replica: int
    scores: tuple[float, ...] = ()
    rule: str = ""
    loads: tuple[int, ...] = ()


class Router(ABC):
    """A rule that sends each request to a replica. A router keeps a memory: use one object for one run.

    Attributes:
        name: Its name in `workbench.analysis.fleet.routers.ROUTERS`; by default that of its class.
        scores: The meaning of the numbers of a decision.
        looks_at_replicas: Whether a decision depends on what replicas do; if not, they can be simulated one by one.
        reads_prefixes: Whether it reads the replicas' prefix caches.

    Example:
        >>> from workbench import Router, simulate_fleet
        >>> class ByLength(Router):
        ...     def choose(self, request, replicas):
        ...         is_long = len(request.prompt_token_ids) > 100
        ...         return self.lowest([index != is_long for index in range(len(replicas))])
        >>> requests = [{"id": f"r{size}", "prompt": {"len": size}} for size in (20, 200, 30, 300)]
        >>> run = simulate_fleet({"requests": requests}, replicas=2, router=ByLength())
        >>> {name: choice.replica for name, choice in run.choices.items()}
        {'r20': 0, 'r200': 1, 'r30': 0, 'r300': 1}
    """

    name: str
    scores: str = ""
    looks_at_replicas: bool = True
    reads_prefixes: bool = False

    def __init_subclass__(cls) -> None:
        refuse_misspelt_methods(cls, Router)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def start(self, names: Sequence[str], seed: int) -> None:  # noqa: B027 (many routers have nothing to prepare)
        """Prepare for a run.

        Args:
            names: Addresses of the replicas.
            seed: Seed of random choices.
        """

    @abstractmethod
    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """The replica for a request, at the moment of its arrival.

        Args:
            request: The request.
            replicas: The replicas that take requests, in order of their numbers.
        """

    def sent(self, request: Arrival, index: int) -> None:  # noqa: B027 (many routers remember nothing)
        """Remember that a request was sent to the replica with this number, which is not always the chosen one."""

    def choose_all(self, requests: Sequence[Arrival], num_replicas: int) -> list[int]:
        """The replicas of the next requests, for a router that does not look at replicas, and remember what was sent.

        Args:
            requests: The requests, in order of arrival.
            num_replicas: Number of replicas; all take requests.

        Raises:
            ValueError: A decision is outside of the replicas.
        """
        found, replicas = [], [None] * num_replicas
        for request in requests:
            index = self.choose(request, replicas).replica  # type: ignore[arg-type]
            if not 0 <= index < num_replicas:
                raise ValueError(f"the router chose replica {index}, there are 0 to {num_replicas - 1}")
            self.sent(request, index)
            found.append(index)
        return found

    def why_together(self, decisions: Sequence[Decision]) -> str:
        """Why the rule sent requests to the same replica, as a sentence; "" if it has no reason to keep them together.

        Args:
            decisions: The decisions about the requests that one replica got.
        """
        return ""

    @staticmethod
    def indices(replicas: Sequence[ReplicaView | None]) -> list[int]:
        """The numbers of replicas; one that is None is simulated elsewhere, in a fleet that never changes."""
        return [place if replica is None else replica.index for place, replica in enumerate(replicas)]

    @staticmethod
    def lowest(scores: Sequence[float], rule: str = "") -> Decision:
        """The first replica with the lowest score."""
        return Decision(min(range(len(scores)), key=scores.__getitem__), tuple(scores), rule)
