"""This side of `workbench.engine.grammar_process`: the program, and the child that each grammar gets."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base.connected import receive_within, start_connected
from workbench.engine.grammar_process import FAILED, MASK_SECONDS

if TYPE_CHECKING:
    import subprocess

START_SECONDS = 60.0
MAX_ANSWER_BYTES = 2**28

LEAST_SECONDS = 0.02
"""Processor time that a mask may take in any case."""

SHORT_WAIT = 0.01
WAITING_SHARE, SAVED_SECONDS = 0.05, 0.5
"""Share of the time that waits of more than SHORT_WAIT may take, and the maximum of seconds that are saved up."""

STARVED_SECONDS = 5.0
"""Maximum time to wait for masks of a child that the system gives no processor."""


class GrammarProcess:
    """A child, which answers one question after another.

    Args:
        number: Its process.
        connection: To it.

    Attributes:
        is_worn: Its memory has grown, so new requests should get another child.
    """

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.is_worn = False
        self._connection = connection
        self._sending = threading.Lock()
        self._asked: deque[int] = deque()
        self._answers: dict[int, bytes] = {}
        self._num_asked = 0
        self._spent_before = 0.0

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: The process has ended.
        """
        with self._sending:
            self._connection.send_bytes(message)

    def receive(self, seconds: float, still: Callable[[], bool]) -> bytes:
        """The next message, see `receive_within`."""
        return receive_within(self._connection, seconds, MAX_ANSWER_BYTES, still)

    def ask(self, question: str, request: int, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """Ask a question, see `grammar_process.Child`, and return the number of its answer.

        Raises:
            OSError: The process has ended.
        """
        if not self._asked:
            self._spent_before = self.processor_seconds() or 0.0
        self.send(json.dumps((question, request, tokens, drafts)).encode())
        self._num_asked += 1
        self._asked.append(self._num_asked)
        return self._num_asked

    def tell(self, what: str, request: int) -> None:
        """Say something that has no answer.

        Raises:
            OSError: The process has ended.
        """
        self.send(json.dumps((what, request, (), ())).encode())

    def answer(self, number: int, wait: MaskWait) -> bytes:
        """The answer to a question.

        Raises:
            TimeoutError: It took too long.
            OSError, EOFError: The process has ended.
        """
        while number not in self._answers:
            received = self.receive(wait.seconds_left(), lambda: self._is_starved(wait))
            self._answers[self._asked.popleft()] = received
        return self._answers.pop(number)

    def spent(self) -> float | None:
        """Processor seconds since it was asked what it has not answered; None if the system does not say."""
        now = self.processor_seconds()
        return None if now is None else now - self._spent_before

    def _is_starved(self, wait: MaskWait) -> bool:
        """Whether it has used less of the processor than it may: then others do, and it is not to blame."""
        spent = self.spent()
        return spent is not None and spent < wait.limit and wait.seconds_left() > -STARVED_SECONDS

    def processor_seconds(self) -> float | None:
        """Processor time that it has used; None if the system does not say."""
        if sys.platform != "linux":
            return None
        try:
            return time.clock_gettime((~self.number << 3) | 2)  # see clock_getcpuclockid(3)
        except OSError:
            return None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class MaskWait:
    """The wait for the masks of one step.

    Args:
        limit: Maximum number of seconds, of the processor where the system counts them.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._start = time.perf_counter()

    def waited(self) -> float:
        """Seconds since its start."""
        return time.perf_counter() - self._start

    def seconds_left(self) -> float:
        """Seconds until its end; negative after it."""
        return self.limit - self.waited()


class Patience:
    """The time that a step may wait for masks, while requests without the same grammar wait too.

    A mask may take MASK_SECONDS. If grammar after grammar did, the others would have nothing left: so all waits
    together may take a twentieth of the time, and half a second more.
    """

    def __init__(self) -> None:
        self._saved = SAVED_SECONDS
        self._at = time.monotonic()

    def wait(self) -> MaskWait:
        """A wait that begins now."""
        now = time.monotonic()
        self._saved = min(SAVED_SECONDS, self._saved + WAITING_SHARE * (now - self._at))
        self._at = now
        # Elsewhere a slow child is not told from a busy system.
        least = LEAST_SECONDS if sys.platform == "linux" else MASK_SECONDS
        return MaskWait(max(least, min(MASK_SECONDS, self._saved)))

    def charge(self, wait: MaskWait) -> None:
        """Count a wait of others."""
        if (seconds := wait.waited()) > SHORT_WAIT:
            self._saved = max(0.0, self._saved - seconds)


class GrammarHost:
    """The program that forks a child for each grammar. It starts with the first one.

    Args:
        vocabulary: Makes the facts about the model that the program needs, see `grammar_process.make_tokenizer`.
    """

    def __init__(self, vocabulary: Callable[[], dict[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._forking, self._sending = threading.Lock(), threading.Lock()
        self._running: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._end = weakref.finalize(self, _end_all, self._running)

    def fork(self) -> GrammarProcess:
        """A new child.

        Raises:
            OSError: It could not be started.
        """
        with self._forking:
            if self._running:
                with contextlib.suppress(EOFError, ConnectionError, IndexError):
                    return self._fork()
                self._end_program()  # it was ended
            self._start()
            return self._fork()

    def _fork(self) -> GrammarProcess:
        process, connection = self._running[0]
        ours, its_end = Pipe()
        with its_end:
            with self._sending:
                connection.send_bytes(b"fork")
                reduction.send_handle(connection, its_end.fileno(), process.pid)
            answer = receive_within(connection, START_SECONDS, MAX_ANSWER_BYTES)
        if not answer.isdigit():
            raise OSError(answer.decode())
        return GrammarProcess(int(answer), ours)

    def _start(self) -> None:
        # One arena: address space that the allocator sets aside for threads would count as the grammar's.
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": path}
        program = str(Path(__file__).with_name("grammar_process.py"))
        started = [start_connected(program, env=environment, process_group=0)]
        _, connection = started[0]
        try:
            connection.send_bytes(json.dumps(self._vocabulary()).encode())
            answer = receive_within(connection, START_SECONDS, MAX_ANSWER_BYTES)
            if answer[:1] == FAILED:
                raise OSError(f"its tokenizer cannot be read: {answer[1:].decode()}")
            if not self._end.alive:
                raise OSError("the engine is closed")
        except BaseException:
            _end_all(started)
            raise
        self._running += started

    def end(self, child: GrammarProcess) -> None:
        """End a child at once."""
        child.close()
        with self._sending, contextlib.suppress(OSError):  # the program has ended, and its children with it
            if self._running:
                self._running[0][1].send_bytes(str(child.number).encode())

    def _end_program(self) -> None:
        with self._sending:
            _end_all(self._running)

    def close(self) -> None:
        """End the program and all children."""
        with self._sending:
            self._end()


def _end_all(running: list[tuple[subprocess.Popen[bytes], Connection]]) -> None:
    """Let the program end its children and itself."""
    while running:
        process, connection = running.pop()
        connection.close()
        try:
            process.wait(5.0)
        except Exception:  # it may be stopped, or still be at its start
            process.kill()
            process.wait()
