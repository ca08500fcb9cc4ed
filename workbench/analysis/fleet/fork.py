"""The cost of a router's second choice: the same run again, in which one request goes elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from workbench.analysis.fleet.router import Decision, ReplicaView, Router
from workbench.base.text import duration
from workbench.simulation.arrivals import Arrival
from workbench.trace.readings.latency import Latency
from workbench.trace.readings.metrics import TraceMetrics


class SecondChoice(Router):
    """A router that sends one request where it would go if its first choice were not there.

    Args:
        router: The router.
        request_id: The request.
    """

    def __init__(self, router: Router, request_id: str) -> None:
        self.name, self.scores = router.name, router.scores
        self.looks_at_replicas, self.reads_prefixes = router.looks_at_replicas, router.reads_prefixes
        self._router = router
        self._request_id = request_id

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        self._router.start(names, seed)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        before = copy.deepcopy(self._router) if request.request_id == self._request_id else None
        decision = self._router.choose(request, replicas)
        if before is None:
            return decision
        if len(replicas) == 1:
            raise ValueError(f"request {request.request_id!r} had no second choice: one replica took requests")
        others = [place for place in range(len(replicas)) if place != decision.replica]
        second = before.choose(request, [replicas[place] for place in others])
        return decision._replace(replica=others[second.replica], rule="second choice")

    def sent(self, request: Arrival, index: int) -> None:
        """See `Router.sent`."""
        self._router.sent(request, index)


@dataclass(frozen=True)
class Fork:
    """One request with the router's second choice.

    Attributes:
        request_id: The request.
        replica: Index of the replica that it went to.
        other: Index of the second choice.
        ttft: Its time to first token, in seconds, as it was and with the second choice.
        e2e: Its time from arrival to end, likewise.
        others_e2e: Mean of all other requests' times from arrival to end, likewise.
    """

    request_id: str
    replica: int
    other: int
    ttft: tuple[float, float]
    e2e: tuple[float, float]
    others_e2e: tuple[float, float]

    def __str__(self) -> str:
        pairs = (self.ttft, self.e2e, self.others_e2e)
        ttft, e2e, others = (f"{duration(other)} instead of {duration(now)}" for now, other in pairs)
        return (
            f"{self.request_id} on replica {self.other} instead of {self.replica}: TTFT {ttft}, end to end {e2e}; the "
            f"mean of all others {others}"
        )


def second_choice(request_id: str, replicas: tuple[int, int], metrics: tuple[TraceMetrics, TraceMetrics]) -> Fork:
    """Compare a run with its fork.

    Args:
        request_id: The request.
        replicas: Indices of its replica, and of its second choice.
        metrics: Those of both runs.
    """
    ttft, e2e, others = [], [], []
    for each in metrics:
        ends = {name.partition("/")[2]: one for name, one in each.requests.items()}
        mine = ends.pop(request_id)
        ttft.append(_seconds(mine.ttft))
        e2e.append(_seconds(mine.e2e))
        others.append(fmean([_seconds(one.e2e) for one in ends.values()] or [0.0]))
    return Fork(request_id, *replicas, (ttft[0], ttft[1]), (e2e[0], e2e[1]), (others[0], others[1]))


def _seconds(latency: Latency | None) -> float:
    return latency.seconds or 0.0 if latency is not None else 0.0
