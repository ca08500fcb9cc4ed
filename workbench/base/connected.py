"""Programs of ours that run in another process and talk to this one through a connection."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection


def start_connected(*program: str, **options: Any) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a Python program whose last argument is the descriptor of its `Connection` to this process.

    Args:
        *program: Arguments of Python, such as a file, or "-m" and a module.
        **options: Other options of ``subprocess.Popen``.

    Returns:
        The process, and this end of the connection.
    """
    import multiprocessing  # 30 ms, with subprocess; most processes start no other
    import subprocess

    connection, its_end = multiprocessing.Pipe()
    with its_end:
        descriptor, null = its_end.fileno(), subprocess.DEVNULL
        command = [sys.executable, *program, str(descriptor)]
        process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[descriptor], **options)
    return process, connection


def receive_within(
    connection: Connection, seconds: float, max_bytes: int, still: Callable[[], bool] = lambda: False
) -> bytes:
    """The next message of another process.

    Args:
        connection: To the process.
        seconds: Maximum time to wait.
        max_bytes: Maximum length of the message.
        still: Called ten times a second while nothing has come, and more often when the time is over: if it returns
            True then, the time is extended.

    Raises:
        TimeoutError: There was none in time.
        EOFError: The process has ended.
        OSError: The message is longer.
    """
    deadline = time.monotonic() + seconds
    # In short pieces: another thread may have asked this one to stop.
    while not connection.poll(min(0.1, max(0.005, deadline - time.monotonic()))):
        if not still() and time.monotonic() >= deadline:
            raise TimeoutError
    try:
        return connection.recv_bytes(max_bytes)
    except ConnectionError:
        raise EOFError from None
