"""An event loop that does little at once, so that a new connection never waits for everything that is ready.

asyncio calls back for every socket that is ready before it looks at the sockets again. When a client closes 600
connections at once, that takes 100 ms. Here a turn of the loop serves a few sockets, the listening ones first.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterable

MAX_READY = 4
"""Maximum number of sockets, besides the listening ones, that one turn of the event loop serves."""

Ready = tuple[selectors.SelectorKey, int]


class FairSelector(selectors.DefaultSelector):
    """Returns a few of the sockets that are ready, in turns; the others stay ready and are returned later.

    Attributes:
        first: File descriptors that are returned whenever they are ready.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: frozenset[int] = frozenset()
        self._last = -1

    def select(self, timeout: float | None = None) -> list[Ready]:
        """The sockets that are served in this turn, each with its events."""
        ready = super().select(timeout)
        if len(ready) <= MAX_READY:
            return ready
        # Around the file descriptors, from the one after the last one served.
        waiting = sorted(ready, key=lambda each: (each[0].fd not in self.first, each[0].fd <= self._last, each[0].fd))
        served = waiting[: MAX_READY + len(self.first)]
        self._last = served[-1][0].fd
        return served


class FairEventLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop on a FairSelector."""

    def __init__(self) -> None:
        self._fair_selector = FairSelector()
        super().__init__(self._fair_selector)

    def serve_first(self, descriptors: Iterable[int]) -> None:
        """Serve these sockets in every turn in which they are ready."""
        self._fair_selector.first = frozenset(descriptors)
