"""The one thread that makes every MLX call of an engine."""

from __future__ import annotations

import atexit
import contextlib
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

CLOSE_SECONDS = 30
"""How long closing waits for the work that is queued."""


class EngineThread:
    """Runs an engine's work on one thread of its own.

    MLX streams belong to a thread, and a notebook's cells, its buttons and a server's requests all come from
    different ones. Work is handed to this thread instead; whoever asked may wait for it, or not. The thread is given
    back with ``close()``, with the object, or with the interpreter.

    Args:
        name: Name of the thread, seen in debuggers.
    """

    def __init__(self, name: str) -> None:
        self._worker = _Worker.take(name)
        self._end = weakref.finalize(self, self._worker.give_back)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work and return its future.

        Raises:
            RuntimeError: The thread has been closed.
        """
        if not self._end.alive:
            raise RuntimeError("this engine is closed: make a new Engine to go on")
        future: Future[T] = Future()
        self._worker.queue.put((future, work))
        return future

    def call(self, work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
        """Do work on the thread and wait for its result.

        Args:
            work: What to do.
            interrupt: Called when Ctrl-C arrives while waiting; it must make the work return soon. The work is
                waited for, so that nothing is left half done, and KeyboardInterrupt is raised then.
        """
        if threading.current_thread() is self._worker.thread:
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
        """Finish the work that is queued and give the thread back."""
        self._end()


class _Worker:
    """A thread and its queue. Closed engines leave theirs to later ones.

    MLX (0.32) keeps a thread of its own for every thread that has computed something on a CPU, until the process
    ends: an engine thread that ended would leave it behind, with the memory it has cached, a few hundred KiB.
    """

    _idle: list[_Worker] = []  # noqa: RUF012 - shared on purpose
    _exiting = False

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        # A daemon, because Python waits for other threads before it runs the exit handlers that end this one.
        self.thread = threading.Thread(target=_work_through, args=(self.queue,), daemon=True)
        self.thread.start()

    @classmethod
    def take(cls, name: str) -> _Worker:
        """A worker that nobody uses, or a new one."""
        worker = None
        while worker is None or not worker.thread.is_alive():  # a process that was forked has none of the threads
            try:
                worker = cls._idle.pop()
            except IndexError:
                worker = cls()
        worker.thread.name = name
        return worker

    def give_back(self) -> None:
        """Finish the work that is queued; later the worker is free for others, or ends with the interpreter."""
        if self._exiting:
            self.end()
            return
        future: Future[None] = Future()
        self.queue.put((future, lambda: self._idle.append(self)))
        if threading.current_thread() is not self.thread:
            with contextlib.suppress(FutureTimeout):
                future.result(CLOSE_SECONDS)

    def end(self) -> None:
        """Finish the work that is queued and end the thread."""
        self.queue.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join(CLOSE_SECONDS)

    @classmethod
    def end_all(cls) -> None:
        """End those that nobody uses; those in use end when they are given back."""
        cls._exiting = True
        while cls._idle:
            cls._idle.pop().end()


atexit.register(_Worker.end_all)


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
