"""The number of threads that compute.

Environment variables:
    WORKBENCH_THREADS: Number of threads of compiled code and of the BLAS. By default, compiled code uses the cores
        that are free, and the BLAS one.
    WORKBENCH_BLAS_THREADS: Deprecated name of the same number.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from pathlib import Path

VARIABLE, OLD_VARIABLE = "WORKBENCH_THREADS", "WORKBENCH_BLAS_THREADS"
MAX_THREADS = 1024

_CORES = Path("/sys/devices/system/cpu")


def num_threads() -> int:
    """Number of threads of compiled code: the variable, or the cores that were free when it was first asked for.

    Raises:
        ValueError: The variable is not an integer from 1 to 1024.
    """
    return requested_threads() or free_cores()


def requested_threads() -> int | None:
    """The number that the variable asks for, None if it is not set.

    Raises:
        ValueError: The variable is not an integer from 1 to 1024.
    """
    name = VARIABLE if VARIABLE in os.environ or OLD_VARIABLE not in os.environ else OLD_VARIABLE
    text = os.environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MAX_THREADS:
        raise ValueError(f"{name}={text!r} must be an integer from 1 to {MAX_THREADS}")
    if name == OLD_VARIABLE:
        warnings.warn(f"{OLD_VARIABLE} is deprecated: set {VARIABLE}", DeprecationWarning, stacklevel=2)
    return int(text)


@cache
def free_cores() -> int:
    """Physical cores that this process may use, less the cores that other processes keep busy; at least 1.

    The load average of the last minute counts the busy cores. The answer does not change later, so all engines of a
    process agree.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on this system
        load = 0.0
    return max(1, physical_cores() - round(load))


def physical_cores() -> int:
    """Cores that this process may run on; two hardware threads of a core count once."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    siblings = {_siblings(number) or str(number) for number in allowed}
    return max(1, len(siblings))


def _siblings(number: int) -> str:
    """The hardware threads that share a core with one, as Linux names them; "" if it does not say."""
    try:
        return (_CORES / f"cpu{number}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return ""
