"""The event loop of a fleet: arrivals that depend on ends, changes of the fleet, and hand-overs.

There is one simulated time. Of the next arrival, the next change and the next step of every replica, the earliest comes
first, so that what a step ends is known before anything later is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Literal, NamedTuple

from workbench.analysis.fleet.replica import Replica
from workbench.analysis.fleet.router import Decision, Router
from workbench.analysis.fleet.split import HandOver, Split
from workbench.base.field_checks import choice, integer, number
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival

WHAT = ("joins", "drains", "dies")


@dataclass(frozen=True)
class Change:
    """A replica that joins, drains or dies.

    Attributes:
        time: Seconds since the start.
        replica: Its index. A replica that joins is not there before.
        what: "joins"; "drains": it takes no new request and ends those it has; "dies": at the end of its step it is
            gone, and its requests are sent to others from the beginning.
    """

    time: float
    replica: int
    what: Literal["joins", "drains", "dies"]

    def check(self, num_replicas: int) -> None:
        """Refuse a change that makes no sense.

        Raises:
            ValueError: A field is outside its range.
        """
        number("the time of a change", self.time, 0.0)
        integer("the replica of a change", self.replica, 0, num_replicas - 1)
        choice("the change of a replica", self.what, WHAT)


class Routed(NamedTuple):
    """A request that was sent.

    Attributes:
        arrival: The request.
        decision: The router's decision.
        candidates: Indices of the replicas that took requests at that moment.
        replica: Index of the chosen replica.
    """

    arrival: Arrival
    decision: Decision
    candidates: tuple[int, ...]
    replica: int


@dataclass(frozen=True)
class _Prefilled:
    """A request whose prompt has been computed, and the replica that did it."""

    arrival: Arrival
    index: int


class EventLoop:
    """Routes requests until no event is left.

    Args:
        router: The router, started.
        fleet: The replicas.
        follow: Gives the requests that follow from the end of one; None if none does.
        changes: Changes of the fleet.
        split: Prefill and decode apart: the last ``split.replicas`` replicas decode what the others have prefilled.

    Attributes:
        hand_overs: The requests that were handed over, by id.

    Raises:
        ValueError: A change makes no sense.
    """

    def __init__(
        self,
        router: Router,
        fleet: Sequence[Replica],
        follow: Callable[[Request, float], Iterable[Arrival]] | None = None,
        changes: Sequence[Change] = (),
        split: Split | None = None,
    ) -> None:
        for change in changes:
            change.check(len(fleet))
        self.hand_overs: dict[str, HandOver] = {}
        self._router = router
        self._fleet = fleet
        self._follow = follow
        self._split = split
        self._decoding = range(len(fleet) - (split.replicas if split else 0), len(fleet))
        self._link_free = dict.fromkeys(self._decoding, 0.0)  # the moment from which a replica can receive
        self._order = count()  # of events at the same time
        self._events: list[tuple[float, int, Arrival | Change | _Prefilled]] = []
        self._steps: list[tuple[float, int]] = []  # the beginning of the next step of replicas that do not rest
        later = {change.replica for change in changes if change.what == "joins"}
        self._taking = [index for index in range(self._decoding.start) if index not in later]
        for change in changes:
            self._add(change.time, change)
        self._sent: list[dict[str, Arrival]] = [{} for _ in fleet]  # requests that have not ended
        self._waiting: list[Arrival] = []  # while no replica takes requests

    def _add(self, time: float, event: Arrival | Change | _Prefilled) -> None:
        heappush(self._events, (time, next(self._order), event))

    def run(self, arrivals: Iterable[Arrival]) -> Iterator[Routed]:
        """Send every request, those that follow included, and take all steps.

        Raises:
            ValueError: The router chose a replica that is not there, or requests are left when no replica is.
        """
        for arrival in arrivals:
            self._add(arrival.arrives_at or 0.0, arrival)
        while self._events or self._steps:
            if self._steps and not (self._events and self._events[0][0] <= self._steps[0][0]):
                self._step(heappop(self._steps)[1])
                continue
            time, _, event = heappop(self._events)
            if isinstance(event, Change):
                self._change(event)
            elif isinstance(event, _Prefilled):
                self._hand_over(event, time)
            elif self._taking:
                yield self._send(event, time)
            else:
                self._waiting.append(event)
        if self._waiting:
            raise ValueError(f"{len(self._waiting)} requests are left and no replica takes any: let another one join")

    def _step(self, index: int) -> None:
        replica = self._fleet[index]
        for request in replica.step():
            sent = self._sent[index].pop(request.request_id)
            if index < self._decoding.start and self._split is not None:
                self._add(replica.now, _Prefilled(sent, index))
                continue
            for arrival in self._follow(request, replica.now) if self._follow is not None else ():
                self._add(arrival.arrives_at or 0.0, arrival)
        if not replica.rests:
            heappush(self._steps, (replica.now, index))

    def _send(self, arrival: Arrival, time: float) -> Routed:
        taking = [self._fleet[index] for index in self._taking]
        for replica in taking:
            replica.see(time)
        decision = self._router.choose(arrival, taking)
        if not 0 <= decision.replica < len(taking):
            raise ValueError(f"the router chose replica {decision.replica}, there are 0 to {len(taking) - 1}")
        chosen = taking[decision.replica]
        self._router.sent(arrival, chosen.index)
        self._sent[chosen.index][arrival.request_id] = arrival
        self._deliver(chosen, arrival if self._split is None else self._split.prefill_of(arrival), time)
        return Routed(arrival, decision, tuple(self._taking), chosen.index)

    def _deliver(self, replica: Replica, arrival: Arrival, time: float) -> None:
        rested = replica.rests
        replica.send(arrival)
        if rested and not replica.rests:
            heappush(self._steps, (max(replica.now, time), replica.index))

    def _hand_over(self, prefilled: _Prefilled, time: float) -> None:
        """Send a request whose prompt has its KV to a replica that decodes."""
        split, arrival = self._split, prefilled.arrival
        assert split is not None
        decoding = [self._fleet[index] for index in self._decoding]
        for replica in decoding:
            replica.see(time)
        decision = split.made_router.choose(arrival, decoding)
        chosen = decoding[decision.replica]
        split.made_router.sent(arrival, chosen.index)
        num_tokens = chosen.receive(arrival)
        begins = max(time, self._link_free[chosen.index])
        ends = self._link_free[chosen.index] = begins + split.seconds(num_tokens)
        name = arrival.request_id
        self.hand_overs[name] = HandOver(name, time, prefilled.index, chosen.index, num_tokens, begins, ends, decision)
        self._sent[chosen.index][name] = arrival
        self._deliver(chosen, replace(arrival, arrives_at=ends), ends)

    def _change(self, change: Change) -> None:
        index = change.replica
        if change.what == "joins":
            if index not in self._taking:
                self._taking = sorted([*self._taking, index])
                for arrival in self._waiting:
                    self._add(change.time, replace(arrival, arrives_at=change.time))
                self._waiting.clear()
            return
        self._taking = [other for other in self._taking if other != index]
        if change.what == "dies":
            self._steps = [step for step in self._steps if step[1] != index]
            self._steps.sort()
            self._fleet[index].stop()
            for arrival in self._sent[index].values():
                name, _, number_of = arrival.request_id.partition(" again ")
                again = f"{name} again {int(number_of or 1) + 1}"
                self._add(change.time, replace(arrival, request_id=again, arrives_at=change.time))
            self._sent[index].clear()
