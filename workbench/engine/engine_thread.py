"""The one thread that makes every MLX call of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

T = TypeVar("T")


class EngineThread:
    """Runs an engine's work on one thread of its own.

    MLX streams belong to a thread, and a notebook's cells, its buttons and a server's requests all come from
    different ones. Work is handed to this thread instead; whoever asked may wait for it, or not.

    Args:
        name: Name of the thread, seen in debuggers.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._thread_id: int | None = None
        self.submit(self._remember).result()

    def _remember(self) -> None:
        self._thread_id = threading.get_ident()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work and return its future."""
        return self._executor.submit(work)

    def call(self, work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
        """Do work on the thread and wait for its result.

        Args:
            work: What to do.
            interrupt: Called when Ctrl-C arrives while waiting; it must make the work return soon. The work is
                waited for, so that nothing is left half done, and KeyboardInterrupt is raised then.
        """
        if threading.get_ident() == self._thread_id:
            return work()
        future = self.submit(work)
        try:
            while True:
                # A wait without a time limit cannot be interrupted on every platform.
                try:
                    return future.result(timeout=0.2)
                except FutureTimeout:
                    if future.done():
                        return future.result()
        except KeyboardInterrupt:
            interrupt()
            future.exception()
            raise

    def close(self) -> None:
        """Finish the work that is queued and end the thread."""
        self._executor.shutdown(wait=True)
