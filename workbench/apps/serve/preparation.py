"""Reading and tokenizing requests: beside the event loop, within a time limit."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from workbench.apps.serve.errors import ApiError, too_busy
from workbench.apps.serve.priority import go_last

T = TypeVar("T")


LONG_BODY = 1 << 16
"""Number of bytes from which a body waits behind other long ones and not in front of short ones."""

MAX_WAITING = 64
"""Maximum number of long bodies that wait."""


class Preparation:
    """Decodes bodies and runs chat templates and the tokenizer on separate threads, within a time limit.

    There is one thread for long bodies and one for all others, so that no request waits for a stranger's long text.

    Args:
        seconds: Time limit for one prompt.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._short = ThreadPoolExecutor(1, thread_name_prefix="workbench-prepare")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="workbench-prepare-long", initializer=go_last)
        self._num_long = 0

    async def run(self, work: Callable[[], T], length: int, gone: asyncio.Event | None = None) -> T:
        """Do work beside the event loop, and return its result.

        Args:
            work: Function to call.
            length: Number of bytes of the body.
            gone: Set when the client has disconnected; work that has not begun is then left out.

        Raises:
            ApiError: It took too long, raised a ValueError, too much is waiting, or the client is gone.
        """
        if length < LONG_BODY:
            return await self._run(self._short, work, gone)
        if self._num_long >= MAX_WAITING:
            raise too_busy("too many long bodies are waiting for the tokenizer")
        self._num_long += 1
        try:
            return await self._run(self._long, work, gone)
        finally:
            self._num_long -= 1

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[[], T], gone: asyncio.Event | None) -> T:
        limited = _Interruptible(work)
        future = asyncio.get_running_loop().run_in_executor(thread, limited.run)
        try:
            while not limited.began and not future.done():  # waiting for the thread does not count
                await asyncio.wait([future], timeout=0.05)
                if gone is not None and gone.is_set() and not limited.began:
                    future.cancel()
                    raise ApiError(400, "the client has disconnected")
            return await asyncio.wait_for(asyncio.shield(future), self._seconds)
        except TimeoutError:
            limited.interrupt()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, or asyncio logs it
            await asyncio.wait([future], timeout=1.0)
            raise ApiError(400, f"the prompt took more than {self._seconds:g} s to render and tokenize") from None
        except ValueError as problem:
            raise ApiError(400, str(problem)) from None

    def close(self) -> None:
        """Accept no more work."""
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)


class _TookTooLong(BaseException):
    """Raised in a template that does not end; not an Exception, which the template's runner may catch."""


class _Interruptible(Generic[T]):
    """Work that another thread can interrupt while it runs Python code.

    Args:
        work: Function to call.

    Attributes:
        began: ``run`` has been called.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._thread = 0
        self._over = False
        self._lock = threading.Lock()
        self.began = False

    def run(self) -> T:
        """Do the work; an interruption is raised here and never in the caller."""
        self._thread = threading.get_ident()
        self.began = True
        try:
            return self._work()
        finally:
            with self._lock:
                self._over = True
            # The interpreter raises a requested exception when a function is entered; enter one before returning.
            (lambda: None)()

    def interrupt(self) -> None:
        """Raise an exception in the work when it next runs Python code; without effect when it is over."""
        with self._lock:
            if not self._over:
                problem = ctypes.py_object(_TookTooLong)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), problem)
