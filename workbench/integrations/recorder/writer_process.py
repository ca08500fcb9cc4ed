"""The engine's end of the pipe to the writer's process. Never blocks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

MAX_BACKLOG_BYTES = 64 * 2**20
"""Messages that wait for the writer at most (64 MiB): beyond that it does not keep up and the recording ends."""

PIPE_BYTES = 2**20
"""Size of the pipe that is asked for; systems that know no size keep their own."""

CLOSE_SECONDS = 10.0
"""Longest time ``close`` waits for the writer to take what is left and to end its file."""

_SET_PIPE_SIZE = 1031
"""fcntl's F_SETPIPE_SZ."""


class WriterStoppedError(Exception):
    """The writer cannot go on; the message says why."""


class WriterProcess:
    """Starts the writer and hands it bytes.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workbench.integrations.recorder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search, "WORKBENCH_BLAS": "0"},
            start_new_session=True,
        )
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._backlog: deque[bytes | bytearray] = deque()
        self._backlog_bytes = 0
        if sys.platform.startswith("linux"):
            import fcntl

            with contextlib.suppress(OSError):
                fcntl.fcntl(self._pipe, _SET_PIPE_SIZE, PIPE_BYTES)

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    def send(self, data: bytes | bytearray) -> None:
        """Hand over a packet; what the pipe does not take now is sent with the next one.

        Raises:
            WriterStoppedError: The writer has ended, or is too far behind.
        """
        if self._backlog:
            self._keep(data)
            self._send_backlog()
            return
        num_sent = self._write(data)
        if num_sent < len(data):
            self._keep(data[num_sent:])

    def _keep(self, data: bytes | bytearray) -> None:
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            raise WriterStoppedError(
                f"the writer is {self._backlog_bytes >> 10} KiB behind: the disk or the processor does not keep up"
            )

    def _send_backlog(self) -> None:
        """Send the oldest packets while the pipe takes them whole."""
        while self._backlog:
            data = self._backlog.popleft()
            num_sent = self._write(data)
            self._backlog_bytes -= num_sent
            if num_sent < len(data):
                self._backlog.appendleft(data[num_sent:])
                return

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self._pipe, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise WriterStoppedError(self._last_words()) from None

    def _last_words(self) -> str:
        try:
            said = os.read(self._process.stdout.fileno(), 4096)
        except OSError:
            said = b""
        return said.decode(errors="replace").strip() or "its process has ended"

    def close(self, *, wait: bool = True) -> None:
        """Let the writer end its file.

        Args:
            wait: Give it the time to take what is left, CLOSE_SECONDS at most; without, what is left is lost.

        Raises:
            WriterStoppedError: It could not.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            while wait and self._backlog and time.monotonic() < deadline:
                self._send_backlog()
                time.sleep(0.005)
            self._process.stdin.close()
            if wait and self._process.wait(max(0.1, deadline - time.monotonic())):
                raise WriterStoppedError(self._last_words())
        except subprocess.TimeoutExpired:
            raise WriterStoppedError(f"it was still writing after {CLOSE_SECONDS:g} s and goes on by itself") from None
        finally:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.poll()
