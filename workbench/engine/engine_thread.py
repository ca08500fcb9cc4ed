"""The one thread that makes every MLX call of an engine."""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")

_Work = tuple[Future, Callable[[], Any]] | None


class EngineThread:
    """Runs an engine's work on one thread of its own.

    MLX streams belong to a thread, and a notebook's cells, its buttons and a server's requests all come from
    different ones. Work is handed to this thread instead; whoever asked may wait for it, or not. The thread ends
    with ``close()``, with the object, or with the interpreter.

    Args:
        name: Name of the thread, seen in debuggers.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        # A daemon, because Python waits for other threads before it runs the exit handler that ends this one.
        self._thread = threading.Thread(target=_work_through, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._queue, self._thread)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work and return its future.

        Raises:
            RuntimeError: The thread has been closed.
        """
        if not self._end.alive:
            raise RuntimeError("this engine is closed: make a new Engine to go on")
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def call(self, work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
        """Do work on the thread and wait for its result.

        Args:
            work: What to do.
            interrupt: Called when Ctrl-C arrives while waiting; it must make the work return soon. The work is
                waited for, so that nothing is left half done, and KeyboardInterrupt is raised then.
        """
        if threading.current_thread() is self._thread:
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
        self._end()


def _work_through(work_queue: queue.SimpleQueue[_Work]) -> None:
    while (item := work_queue.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as problem:  # whatever it is, it belongs to whoever waits
            future.set_exception(problem)
        # An idle thread must not keep the last result, or the engine it belongs to, alive.
        del item, future, work
    if "mlx.core" in sys.modules:
        # MLX aborts the process when a thread ends with streams of its own still open.
        sys.modules["mlx.core"].clear_streams()


def _end(work_queue: queue.SimpleQueue[_Work], thread: threading.Thread) -> None:
    work_queue.put(None)
    if threading.current_thread() is not thread:
        thread.join(timeout=30)
