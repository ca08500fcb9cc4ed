"""The engine's end of the pipe to the writer's process, which never blocks.

The writer is not a child process of the engine: vLLM ends with a SIGKILL to its whole process tree, and a writer in it
would leave its file without an end. A process in between starts the writer and exits at once, so that the system adopts
it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import workbench

MAX_BACKLOG_BYTES = 64 * 2**20
"""Maximum size of the messages that wait for the writer, 64 MiB; if there are more, the recording ends."""

PIPE_BYTES = 2**20
"""Requested size of the pipe; systems that cannot change it keep their own."""

CLOSE_SECONDS = 10.0
"""Maximum time that ``close`` waits for the writer to read the rest and to finish its file."""

START_SECONDS = 30.0
"""Maximum time for the process in between to start the writer."""

_LAUNCH = """
import os
if pid := os.fork():
    print(pid, flush=True)
    os._exit(0)
import runpy
runpy.run_module("workbench.trace.recorders", run_name="__main__")
"""

_SET_PIPE_SIZE = 1031
"""fcntl's F_SETPIPE_SZ."""


class WriterStoppedError(Exception):
    """The writer has failed; the message says why."""


class WriterProcess:
    """Starts the writer and sends it bytes.

    Attributes:
        pid: Process id of the writer.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self) -> None:
        root = str(Path(workbench.__file__).resolve().parents[1])
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search, "WORKBENCH_BLAS": "0"},
            start_new_session=True,
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # both are pipes
        self._stdin, self._stdout = stdin, stdout
        self.pid = self._read_pid()
        self._pipe = stdin.fileno()
        os.set_blocking(self._pipe, False)
        os.set_blocking(stdout.fileno(), False)
        self._backlog: deque[bytes | bytearray] = deque()
        self._backlog_bytes = 0
        if sys.platform.startswith("linux"):
            import fcntl

            with contextlib.suppress(OSError):
                fcntl.fcntl(self._pipe, _SET_PIPE_SIZE, PIPE_BYTES)

    def _read_pid(self) -> int:
        """The writer's process id, from the process in between, which has exited when this returns."""
        try:
            self._process.wait(START_SECONDS)
            return int(self._stdout.readline())
        except (subprocess.TimeoutExpired, ValueError) as problem:
            self._process.kill()
            raise OSError(f"the writer's process did not start: {problem}") from None

    def wait(self, seconds: float) -> str | None:
        """Wait until the writer has ended.

        Args:
            seconds: Maximum time to wait.

        Returns:
            The reason if the recording failed, "" if its file is complete, None if it still runs.
        """
        deadline = time.monotonic() + seconds
        said = b""
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._stdout], [], [], left)[0]:
                if not (data := os.read(self._stdout.fileno(), 4096)):
                    return said.decode(errors="replace").strip()
                said += data
        return None

    def send(self, data: bytes | bytearray) -> None:
        """Send a packet; the part that the pipe does not take now is sent with the next one.

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
                f"the writer is {self._backlog_bytes >> 10} KiB behind: the disk or the processor is too slow"
            )

    def _send_backlog(self) -> None:
        """Send the oldest packets as long as the pipe takes them whole."""
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
            message = os.read(self._stdout.fileno(), 4096)
        except OSError:
            message = b""
        return message.decode(errors="replace").strip() or (
            "its process has ended without a word: it was killed (out of memory?), or standard error has the cause"
        )

    def close(self, *, wait: bool = True) -> None:
        """Let the writer finish its file.

        Args:
            wait: Wait up to CLOSE_SECONDS for the writer to read the rest; if False, the rest is lost.

        Raises:
            WriterStoppedError: The writer could not finish.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            while wait and self._backlog and time.monotonic() < deadline:
                self._send_backlog()
                time.sleep(0.005)
            self._stdin.close()
            if wait:
                problem = self.wait(max(0.1, deadline - time.monotonic()))
                if problem is None:
                    raise WriterStoppedError(f"it was still writing after {CLOSE_SECONDS:g} s and continues alone")
                if problem:
                    raise WriterStoppedError(problem)
        finally:
            self._stdin.close()
            self._stdout.close()
