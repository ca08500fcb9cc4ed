"""The time between two updates of a view: views take a small share of the processor, and the engine has the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

POLL_SECONDS = 0.1
"""Shortest time between two updates of a view."""

LONGEST_SECONDS = 1.0
"""Longest time between two updates, however much they cost."""

SHARE = 0.02
"""Share of a processor that the updates of a view may take."""

SHARE_OF_ALL = 0.2
"""Share that those of all views may take together; the rest of a server's thread is for what visitors send."""

_open: set[Pace] = set()


class Pace:
    """Measures what updates cost, and spreads them: expensive ones come less often and hold more steps each.

    The paces that are entered share what all may take, so that a class of thirty does not fill a server's event loop.

    Attributes:
        seconds: Time to wait before the next update.

    Example:
        >>> pace = Pace()
        >>> with pace.update():
        ...     pass
        >>> pace.seconds
        0.1
    """

    def __init__(self) -> None:
        self.seconds = POLL_SECONDS

    def __enter__(self) -> Self:
        _open.add(self)
        return self

    def __exit__(self, *problem: object) -> None:
        _open.discard(self)

    @contextmanager
    def update(self, prepared_in: float = 0.0) -> Iterator[None]:
        """Measure the processor time that the calling thread spends on an update.

        Args:
            prepared_in: Seconds of processor time that another thread has spent on it (`processor_seconds`).
        """
        start = time.thread_time()
        yield
        spent = prepared_in + time.thread_time() - start
        share = min(SHARE, SHARE_OF_ALL / max(1, len(_open)))
        self.seconds = min(LONGEST_SECONDS, max(POLL_SECONDS, spent / share))


def processor_seconds(work: Callable[[], object]) -> float:
    """Do work, and return the processor time that the calling thread has spent on it."""
    start = time.thread_time()
    work()
    return time.thread_time() - start
