"""Closed loops: requests that arrive when the answer to another one has come, and its reader has thought."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival, arrival_order

AGAIN = " again "
"""In the id of a request that a fleet sends once more because its replica died."""


class FollowUps:
    """Some requests, of which a few follow the ends of others.

    Args:
        arrivals: The requests, in any order. One that names a request that is not among them has its own time.

    Attributes:
        depends: Whether any request follows another one.
    """

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        pending = sorted(arrivals, key=arrival_order)
        known = {arrival.request_id for arrival in pending}
        self._first = [arrival for arrival in pending if arrival.after not in known]
        self._after: dict[str, list[Arrival]] = defaultdict(list)
        for arrival in pending:
            if arrival.after in known:
                self._after[arrival.after].append(arrival)
        self.depends = bool(self._after)
        self._left: dict[str, list[Arrival]] = {}

    def first(self) -> list[Arrival]:
        """The requests that follow no other one, in order; a run begins with them."""
        self._left = dict(self._after)
        return self._first

    def ended(self, request: Request, time: float, step: int = 0) -> list[Arrival]:
        """The requests that follow from the end of one.

        Args:
            request: The request that has ended.
            time: The moment of its end.
            step: The step after it, in a run without a clock.
        """
        following = self._left.pop(request.request_id.partition(AGAIN)[0], ())
        return [_due(arrival, time, step) for arrival in following]


def _due(arrival: Arrival, time: float, step: int) -> Arrival:
    """A request whose wait for another one is over."""
    if arrival.arrives_at is None:  # without a clock
        late = step + arrival.think_steps - arrival.arrival_step
        aborts = None if arrival.abort_step is None else max(0, arrival.abort_step + late)
        return replace(arrival, arrival_step=arrival.arrival_step + late, abort_step=aborts)
    at = time + arrival.think
    return replace(arrival, arrives_at=at, arrival_time=at)
