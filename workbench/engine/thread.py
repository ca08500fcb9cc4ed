"""The one thread that makes every MLX call of an engine, and the loop that takes steps on it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sized
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from workbench.trace import StepRecord
from workbench.trace.readings.breakpoints import Breakpoints

log = logging.getLogger("workbench")

T = TypeVar("T")

_Work = tuple[Future, Callable[[], Any]] | None

CLOSE_SECONDS = 30
"""Maximum number of seconds that closing waits for queued work."""

_UNUSED_BYTES = 4096
"""More memory than MLX (0.32) takes when it is imported."""

_computed_in: int | None = None
"""The process that forked, or was forked from, with MLX in use: in a fork of it MLX waits for threads it has not."""


def _before_fork() -> None:
    global _computed_in
    if "mlx.core" in sys.modules and sys.modules["mlx.core"].get_peak_memory() > _UNUSED_BYTES:
        _computed_in = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _in_a_fork(process: int) -> RuntimeError:
    """The error of a call in a fork of a process."""
    return RuntimeError(
        f"process {os.getpid()} is a fork of process {process}, in which MLX has computed, and has none of its "
        'threads: start it with multiprocessing.get_context("spawn") and make an Engine there, or fork first'
    )


class EngineThread:
    """Runs an engine's work on one thread.

    MLX streams belong to a thread, and a notebook's cells, its buttons and a server's requests all come from
    different ones. They hand their work to this thread, and wait for it or not. The thread is given
    back with ``close()``, with the object, or with the interpreter.

    Args:
        name: Name of the thread, seen in debuggers.

    Raises:
        RuntimeError: This process was forked from one in which MLX had computed.
    """

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        if _computed_in not in (None, self._process):
            raise _in_a_fork(_computed_in)
        self._worker = _Worker.take(name)
        self._end = weakref.finalize(self, self._worker.give_back)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the thread's, without the thread."""
        return self._process != os.getpid()

    @property
    def closed(self) -> bool:
        """Whether the thread has been given back."""
        return not self._end.alive

    def check_open(self) -> None:
        """Raise RuntimeError if the thread has been given back."""
        if self.closed:
            raise RuntimeError("this engine is closed: make a new Engine")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work and return its future.

        Raises:
            RuntimeError: The thread has been closed, or belongs to another process.
        """
        if self._process != os.getpid():
            raise _in_a_fork(self._process)
        self.check_open()
        future: Future[T] = Future()
        self._worker.queue.put((future, work))
        return future

    def call(self, work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
        """Do work on the thread and wait for its result.

        Args:
            work: The work.
            interrupt: Called when Ctrl-C arrives while waiting; it must make the work return soon. The call
                waits for that, so that nothing is left half done, and then raises KeyboardInterrupt.
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

    MLX (0.32) keeps one more thread for every thread that has computed something on a CPU, until the process
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
        """An unused worker, or a new one."""
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
        if not self.thread.is_alive():  # it was the thread of a process that this one is a fork of
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
        """End unused workers; the others end when they are given back."""
        cls._exiting = True
        while cls._idle:
            cls._idle.pop().end()


atexit.register(_Worker.end_all)


def _work_through(work_queue: queue.SimpleQueue[_Work]) -> None:
    while (item := work_queue.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as problem:  # the waiting caller raises it
            future.set_exception(problem)
        # An idle thread must not keep the last result, or the engine it belongs to, alive.
        del item, future, work
    if "mlx.core" in sys.modules:
        # MLX aborts the process when a thread ends with open streams.
        sys.modules["mlx.core"].clear_streams()


class RunLoop:
    """Runs an engine's steps, in the foreground or in the background.

    Args:
        thread: The thread that takes the steps.
        take: Takes one step; None when there is nothing to do.
        inbox: The work that waits for the next step.
        breakpoints: Checked after every step.
        failed: Called with the exception that ends a background run.
    """

    def __init__(
        self,
        thread: EngineThread,
        take: Callable[[], StepRecord | None],
        inbox: Sized,
        breakpoints: Breakpoints,
        failed: Callable[[Exception], None],
    ) -> None:
        self._running = False
        self._failed = failed
        self._thread = thread
        self._take = take
        self._inbox = inbox
        self._breakpoints = breakpoints
        self._pause = threading.Event()
        self._handover = threading.Lock()  # between a loop that finds nothing to do and a start() that brings work

    @property
    def running(self) -> bool:
        """Whether steps are being taken one after another, or are about to be."""
        return self._running and not self._thread.is_forked

    def run(self, after_step: Callable[[StepRecord], None]) -> None:
        """Take steps and wait for the end. Ctrl-C pauses and is raised then.

        Args:
            after_step: Called with each record.
        """
        self._pause.clear()
        self._thread.call(lambda: self._loop(after_step), interrupt=self._pause.set)

    def start(self) -> None:
        """Take steps in the background; returns at once."""
        self._pause.clear()
        with self._handover:
            if self.running:
                return
            self._running = True
            self._thread.submit(self._loop_unattended)

    def pause(self) -> None:
        """Stop after the current step, and wait for it."""
        self.pause_soon()
        self._thread.call(lambda: None)

    def pause_soon(self) -> None:
        """Stop after the current step."""
        self._pause.set()

    def _loop_unattended(self) -> None:
        """The loop of a background run, whose exceptions nobody waits for."""
        try:
            self._loop(lambda record: None)
        except Exception as problem:
            self._failed(problem)
            log.exception("the engine stopped: a step could not be taken")

    def _loop(self, after_step: Callable[[StepRecord], None]) -> None:
        self._running = True
        self._breakpoints.stopped_by = None
        try:
            while not self._pause.is_set():
                if (record := self._take()) is None:
                    with self._handover:
                        if not self._inbox:
                            self._running = False
                            return
                    continue
                after_step(record)
                if self._breakpoints.check(record):
                    return
        finally:
            self._running = False
