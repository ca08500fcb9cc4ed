"""Rendering and tokenizing prompts: beside the event loop, one at a time, and not for ever."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from workbench.serve.errors import ApiError

T = TypeVar("T")


class Preparation:
    """Runs chat templates and the tokenizer on a thread of its own, within a time limit.

    One thread, because tokenizers and templates are not all safe to use from several at once.

    Args:
        seconds: Time that one prompt may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="workbench-prepare")

    async def run(self, work: Callable[[], T]) -> T:
        """Do work beside the event loop, and return its result.

        Raises:
            ApiError: It took too long, or refused what it was given.
        """
        limited = _Interruptible(work)
        future = asyncio.get_running_loop().run_in_executor(self._thread, limited.run)
        try:
            while not limited.began and not future.done():  # the limit is on the work, not on the wait for its turn
                await asyncio.wait([future], timeout=0.05)
            return await asyncio.wait_for(asyncio.shield(future), self._seconds)
        except TimeoutError:
            limited.interrupt()
            await asyncio.wait([future], timeout=1.0)
            raise ApiError(400, f"the prompt took more than {self._seconds:g} s to render and tokenize") from None
        except ValueError as problem:
            raise ApiError(400, str(problem)) from None

    def close(self) -> None:
        """Take no more work."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class _TookTooLong(BaseException):
    """Raised inside a template that does not end; not an Exception, which a template's runner may catch."""


class _Interruptible(Generic[T]):
    """Work that another thread can end, as long as it runs Python code.

    Args:
        work: What to do.

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
        """Do the work; an interruption is raised in here and never in whoever called."""
        self._thread = threading.get_ident()
        self.began = True
        try:
            return self._work()
        finally:
            with self._lock:
                self._over = True
            # The interpreter raises what another thread asked for when a function is entered, which this is for.
            (lambda: None)()

    def interrupt(self) -> None:
        """Raise an exception in the work when it next runs Python code; nothing happens when it is over."""
        with self._lock:
            if not self._over:
                problem = ctypes.py_object(_TookTooLong)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), problem)
