"""An exclusive lock on a file that is recorded, so that a second recorder cannot take it away from the first.

The lock is flock's: it belongs to the open file, and ends with it, also if the process is killed. Windows and some
network file systems have none, and two recorders of one file are not noticed there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from workbench.trace.errors import TraceError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MOST_TRIES = 100


def open_locked(path: Path, *, private: bool = False) -> BinaryIO:
    """Open a file for a recording, empty and locked. A file that somebody else records stays as it is.

    Args:
        path: The file; emptied if it exists.
        private: Only the user may read the file.

    Raises:
        TraceError: The file is being recorded.
        OSError: It cannot be written.
    """
    for _ in range(_MOST_TRIES):
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags, 0o600 if private else 0o666)
        try:
            lock(path, descriptor)
            if _is_at(path, descriptor):  # if not, it was removed or replaced before it was locked
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.ftruncate(descriptor, 0)
                return open(descriptor, "wb")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(f"{path} is replaced by others again and again")


def lock(path: Path, descriptor: int) -> None:
    """Lock an open file.

    Raises:
        TraceError: It is locked already.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TraceError(
            f"{path} is being recorded by another run: give this one another name, or close the other recording first"
        ) from None
    except OSError:  # a file system without locks
        pass


def check_unlocked(path: Path) -> None:
    """Refuse to replace a file that is being recorded.

    Raises:
        TraceError: It is locked.
    """
    with contextlib.suppress(OSError), open(path, "rb", opener=_without_waiting) as file:
        lock(path, file.fileno())


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
