"""The pool in which the threads of compiled code wait for work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import cache, partial
from queue import SimpleQueue
from typing import Any


class ThreadPool:
    """Threads that call one function together; the caller is the first of them. Between two calls they sleep.

    Args:
        size: Number of threads, the caller included.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._jobs: list[SimpleQueue[Callable[[int], None]]] = [SimpleQueue() for _ in range(size - 1)]
        self._lock = threading.Lock()
        for number, jobs in enumerate(self._jobs, start=1):
            threading.Thread(
                target=_serve, args=(number, jobs, self._done), name=f"workbench-cpu-{number}", daemon=True
            ).start()

    def run(self, work: Callable[[int], None]) -> None:
        """Call ``work(thread)`` in every thread, in this context, and wait for all of them."""
        if self.size == 1:
            work(0)
            return
        with self._lock:
            for jobs in self._jobs:
                jobs.put(partial(copy_context().run, work))  # type: ignore[call-arg]  # the number comes later
            problems: list[BaseException | None] = []
            try:
                work(0)
            except BaseException as problem:  # raised below, when the others have ended
                problems.append(problem)
            problems.extend(self._done.get() for _ in self._jobs)
        for raised in problems:
            if raised is not None:
                raise raised


def _serve(number: int, jobs: SimpleQueue[Callable[[int], None]], done: SimpleQueue[Any]) -> None:
    while True:
        work = jobs.get()
        try:
            work(number)
            done.put(None)
        except BaseException as problem:  # the caller raises it
            done.put(problem)
        del work


@cache
def thread_pool(size: int) -> ThreadPool:
    """The pool of a size; engines of a process share it."""
    return ThreadPool(size)


def _forget_pools() -> None:
    """A forked process has none of its parent's threads."""
    thread_pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


def share(count: int, thread: int, size: int) -> tuple[int, int]:
    """A thread's part of ``count`` things: the first, and the one to stop before."""
    return count * thread // size, count * (thread + 1) // size
