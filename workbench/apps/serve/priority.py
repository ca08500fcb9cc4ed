"""The order in which threads of the server get a processor that they share: the event loop, the engine, the rest.

The event loop has much to do for little: each of its clients waits for a millisecond of it. Without an order, it would
wait for a turn of the other threads whenever it has to wait at all, for a system call or for Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

ENGINE_NICENESS = 5
"""Niceness that the threads of the engine get besides that of the process."""

BACKGROUND_NICENESS = 10
"""The same for threads whose work is not urgent."""

_HIGHEST_NICENESS = 19


def go_first() -> None:
    """Let the calling thread run before all others that the process has now, and before the threads that they start.

    Only Linux has a niceness for each thread; elsewhere nothing changes. A thread cannot take it back.
    """
    if sys.platform == "linux":
        for thread in map(int, os.listdir("/proc/self/task")):
            if thread != threading.get_native_id():
                _add_niceness(thread, ENGINE_NICENESS)


def go_last() -> None:
    """Let the calling thread run after those of the engine; for threads that begin."""
    if sys.platform == "linux":
        _add_niceness(threading.get_native_id(), BACKGROUND_NICENESS)


def _add_niceness(thread: int, niceness: int) -> None:
    with contextlib.suppress(OSError):  # the thread has just ended, or the system does not allow it
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(_HIGHEST_NICENESS, now + niceness))
