"""Judges an answer in a process that can be ended, and takes the verdict from a channel to which no answer prints.

The grader sends the exercise and the answer, and then a number. The process reads the number when the check is done,
and sends it back with the verdict: a verdict without it does not count. Output is counted while it is printed. The
process has a home that is deleted afterwards, limits on memory and files, and few of the grader's variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import workbench
from workbench.apps.course import supervisor
from workbench.apps.course.exercise import Exercise
from workbench.apps.course.verdict import Verdict
from workbench.base.cache_folder import cache_folder
from workbench.base.connected import start_connected

if TYPE_CHECKING:
    import subprocess

MAX_OUTPUT = 2**24
"""Bytes that an answer may print (16 MiB)."""

MAX_MEMORY = 2**33
"""Address space of an answer's process (8 GiB)."""

MAX_WRITTEN = 2**26
"""Size of the largest file that an answer may write (64 MiB)."""

MAX_MESSAGE = 2000
"""Characters of a message that are kept."""

_MAX_VERDICT = 2**16
_SHOWN_OUTPUT = 4096

VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE")
"""Variables of the grader that an answer's process has, too."""


def judge_apart(exercise: Exercise, answer: str, course: Path, timeout: float) -> Verdict:
    """Judge an answer in a new process.

    Args:
        exercise: The exercise.
        answer: The text of its answer cell.
        course: Folder of the course, whose data the cells read.
        timeout: Seconds that it may take.
    """
    with tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True) as home:
        place = Path(home, "course")
        place.mkdir()
        if (data := course / "data").is_dir():
            shutil.copytree(data, place / "data")
        return _judged({"exercise": asdict(exercise), "answer": answer}, place, timeout)


def _judged(work: Mapping[str, Any], place: Path, timeout: float) -> Verdict:
    import subprocess

    number = secrets.token_hex(16)
    process, connection = start_connected(
        *("-I", "-S", supervisor.__file__, sys.executable, "-P", "-W", "ignore", "-m", "workbench.apps.course.judge"),
        cwd=place,
        env=environment(place.parent),
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with connection:
        assert process.stderr is not None
        output = Output(process.stderr, process)
        verdict = None
        deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError, EOFError):
            connection.send_bytes(json.dumps(work).encode())
            connection.send_bytes(number.encode())
            verdict = _verdict(_line(connection, process, deadline), number)
        in_time = process.poll() is not None or verdict is not None or time.monotonic() < deadline
        status = _end(process, in_time)
        output.join()
    if output.is_too_long:
        return Verdict(False, f"it printed more than {MAX_OUTPUT >> 20} MiB")
    if verdict is not None:
        return verdict
    if not in_time:
        return Verdict(False, f"it took more than {timeout:g} s")
    return Verdict(False, f"it ended the process with status {status}: {output.last_line}")


def _line(connection: Connection, process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The first line that the process sends, or as much of it as there is at its end or at the deadline."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_VERDICT:
        has_ended = process.poll() is not None  # before looking: what it sent last is there then
        if connection.poll(0.02):
            block = os.read(connection.fileno(), _MAX_VERDICT)
            if not block:
                break
            line += block
        elif has_ended or time.monotonic() > deadline:
            break
    return line


def _end(process: subprocess.Popen[bytes], wait: bool) -> int:
    """End the supervisor, which ends the rest, and whatever is left of its group; returns its status."""
    import subprocess

    if not wait:
        process.terminate()
    try:
        status = process.wait(5)
    except subprocess.TimeoutExpired:
        status = -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status


def _verdict(message: bytes, number: str) -> Verdict | None:
    """The verdict of a message; None if it is not from the judge."""
    try:
        given = json.loads(message)
        if not secrets.compare_digest(str(given["number"]), number):
            return None
        return Verdict(given["passed"] is True, str(given["message"])[:MAX_MESSAGE])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class Output:
    """Reads and counts the output of a process at once, and keeps its end. Too much output ends the process."""

    def __init__(self, stream: IO[bytes], process: subprocess.Popen[bytes]) -> None:
        self.is_too_long = False
        self._stream, self._process = stream, process
        self._last = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        total = 0
        while block := os.read(self._stream.fileno(), 2**16):
            self._last = (self._last + block)[-_SHOWN_OUTPUT:]
            total += len(block)
            if total > MAX_OUTPUT and not self.is_too_long:
                self.is_too_long = True
                self._process.terminate()

    def join(self) -> None:
        """Wait for the end of the output, but not for a process that has escaped and holds the other end."""
        self._thread.join(2)
        if not self._thread.is_alive():
            self._stream.close()

    @property
    def last_line(self) -> str:
        """The last line."""
        lines = self._last.decode("utf-8", "backslashreplace").strip().splitlines()
        return lines[-1][-MAX_MESSAGE:] if lines else "no message"


def environment(home: Path) -> dict[str, str]:
    """The variables of an answer's process."""
    kept = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    root = str(Path(workbench.__file__).parents[1])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH", "")]))
    places = {"HOME": str(home), "TMPDIR": str(home), "WORKBENCH_CACHE": str(cache_folder())}
    return {**kept, **places, "PYTHONHASHSEED": "0", "WORKBENCH_DEVICE": "cpu"}


def main() -> None:
    """Judge the answer that arrives; its output goes to standard error."""
    connection, receive, send, encode = Connection(int(sys.argv.pop())), Connection.recv_bytes, os.write, json.dumps
    descriptor = connection.fileno()
    limit_resources()
    os.dup2(2, 1)
    work = json.loads(connection.recv_bytes())
    with redirect_stdout(sys.stderr):
        verdict = Exercise(**work["exercise"]).judge(work["answer"])
    message = {"passed": verdict.passed is True, "message": str(verdict.message)[:MAX_MESSAGE]}
    send(descriptor, encode({**message, "number": receive(connection).decode()}).encode() + b"\n")


def limit_resources() -> None:
    """Limit memory and files, where the system can."""
    import resource

    for name, value in {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": MAX_WRITTEN, "RLIMIT_AS": MAX_MEMORY}.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


if __name__ == "__main__":
    main()
