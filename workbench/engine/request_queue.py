"""The waiting queue: requests in the order in which the scheduler looks at them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator

from workbench.engine.request import Request


class FCFSRequestQueue:
    """First come, first served; a preempted request goes back to the head."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._queue = deque(requests)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def head(self) -> Request:
        """The request that is looked at next."""
        return self._queue[0]

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request."""
        self._queue.appendleft(request)

    def pop(self) -> Request:
        """Take the head out."""
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        """Take out a request from anywhere."""
        self._queue.remove(request)


def priority_key(request: Request) -> tuple[int, float, str]:
    """Order of the "priority" policy: smaller is served first."""
    return (request.priority, request.arrival_time, request.request_id)


class PriorityRequestQueue:
    """Smaller priority first, then earlier arrival, then request id; a preempted request keeps its key."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._queue = sorted(requests, key=priority_key)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def head(self) -> Request:
        """The request that is looked at next."""
        return self._queue[0]

    def add(self, request: Request) -> None:
        """Queue a request."""
        insort(self._queue, request, key=priority_key)

    put_back = add

    def pop(self) -> Request:
        """Take the head out."""
        return self._queue.pop(0)

    def remove(self, request: Request) -> None:
        """Take out a request from anywhere."""
        index = bisect_left(self._queue, priority_key(request), key=priority_key)
        while self._queue[index] is not request:  # keys are equal only for requests with the same id
            index += 1
        del self._queue[index]


RequestQueue = FCFSRequestQueue | PriorityRequestQueue
REQUEST_QUEUES: dict[str, type[FCFSRequestQueue] | type[PriorityRequestQueue]] = {
    "fcfs": FCFSRequestQueue,
    "priority": PriorityRequestQueue,
}
