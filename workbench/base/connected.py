"""Programs of ours that run in another process and talk to this one through a connection."""

from __future__ import annotations

import sys
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
