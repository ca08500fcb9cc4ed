"""Limits of a process that works for strangers: it gives up what it does not need."""

from __future__ import annotations

import contextlib
import resource


def memory_in_use() -> int:
    """Address space of this process in bytes; without /proc its largest resident size so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def limit_resources(max_memory: int) -> None:
    """Give up files, other processes and threads, and memory beyond a limit.

    A system without one of the limits, such as macOS, leaves it out.

    Args:
        max_memory: Address space in bytes besides what the process has now.
    """
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 16}
    limits["RLIMIT_AS"] = memory_in_use() + max_memory
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))
