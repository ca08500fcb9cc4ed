"""Starts the process of an answer, and ends with it everything that it has started.

Run by its path, with the standard library alone: ``supervisor.py PROGRAM... DESCRIPTOR``. It stands between grader and
answer, so that the parent of an answer is not the grader. On Linux it becomes the parent of processes whose own parent
has ended, and ends those too; elsewhere the grader ends the group of processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
_MOST_ROUNDS = 1000


def main() -> None:
    """Run the program, end what it leaves behind, and end with its status."""
    *command, descriptor = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen([*command, descriptor], pass_fds=[int(descriptor)])
    os.close(int(descriptor))

    def end(*_: Any) -> None:
        program.kill()

    signal.signal(signal.SIGTERM, end)
    status = program.wait()
    end_children()
    sys.stderr.flush()
    os._exit(status if status >= 0 else 128 - status)


def end_children() -> None:
    """Kill the children of this process, and those that it inherits by that, until none is left."""
    for _ in range(_MOST_ROUNDS):
        children = children_of(os.getpid())
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return
        if not children:
            return


def children_of(parent: int) -> list[int]:
    """The processes that have this parent; none without /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()
