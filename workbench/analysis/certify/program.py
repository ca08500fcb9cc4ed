"""The simulator under test: a function, or a command that answers JSON lines."""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.outside_files import TwoValuesError, json_value
from workbench.base.text import shown

MOST_BYTES = 1 << 24
"""Bytes of the longest answer; that of the longest workload has a few thousand."""

MOST_LATE = 3
"""Answers that may be late before a program counts as one that hangs."""

_MOST_WAITING = 64
"""Lines that are read ahead; a program that writes more has to wait."""


class Program:
    """A simulator that is asked for schedules.

    Args:
        program: "module:function", a function, or a command line.
        timeout: Seconds that an answer may take; the first one may take five times as long.

    Raises:
        ValueError: There is no such function or command.
    """

    def __init__(self, program: str | Callable[[dict[str, Any]], Any], timeout: float) -> None:
        self._timeout = timeout
        self._given_up = ""  # the reason why it is not asked any more
        self._function: Callable[[dict[str, Any]], Any] | None = None
        self._command: _Command | None = None
        self._words: list[str] = []
        self.name = program if isinstance(program, str) else getattr(program, "__qualname__", repr(program))
        if not isinstance(program, str):
            self._function = program
        elif re.fullmatch(r"[\w.]+:\w+", program):
            self._function = _imported(program)
        else:
            try:
                self._words = shlex.split(program)
            except ValueError as problem:
                told = f"PROGRAM {shown(program)} is not a command line: {problem}; quote it as for a shell"
                raise ValueError(told) from None
            if not self._words:
                raise ValueError("PROGRAM is empty: give module:function, or a command that answers JSON lines")
            self._command = self._started()

    def _started(self) -> _Command:
        try:
            return _Command(self._words)
        except (OSError, ValueError) as problem:  # ValueError: a null character
            reason = getattr(problem, "strerror", None) or problem
            need = "give a program on PATH or its path, such as 'python simulator.py', or module:function"
            raise ValueError(f"PROGRAM {shlex.join(self._words)!r} cannot be started: {reason}; {need}") from None

    def schedule(self, workload: dict[str, Any]) -> Any:
        """The program's answer. A command that has ended is started again.

        Raises:
            ValueError: It ends, does not answer in time, or its answer is not one line of JSON for this workload.
        """
        if self._function is not None:
            return self._function(json.loads(json.dumps(workload)))  # it may change what it is given
        if self._given_up:
            raise ValueError(self._given_up)
        if self._command is None:
            self._command = self._started()
        answer = self._read(self._command, workload)
        named = answer.get("id", workload["id"]) if isinstance(answer, dict) else workload["id"]
        if named != workload["id"]:
            told = f"answer.id is {shown(named)}, and the workload was {workload['id']!r}"
            raise self._give_up(f"{told}: answer each workload once, in order")
        return answer

    def _read(self, command: _Command, workload: dict[str, Any]) -> Any:
        name = repr(workload["id"])
        try:
            line = command.ask(json.dumps(workload), self._timeout)
        except queue.Empty:
            told = f"no answer to workload {name} within {self._timeout:g} s (--timeout)"
            if command.num_late == MOST_LATE:
                self._give_up(f"the program was ended after {MOST_LATE} workloads without an answer (--timeout)")
            raise ValueError(told) from None
        if not line:
            self._command, (status, _) = None, command.end()
            how = f"with exit status {status}" if status >= 0 else f"by signal {-status}"
            raise ValueError(f"the program ended before it answered workload {name}, {how}")
        if len(line) > MOST_BYTES:
            raise self._give_up(f"the answer to workload {name} is longer than {MOST_BYTES:,} bytes: it was ended")
        text = line.decode("utf-8", "replace")
        try:
            return json_value(text)
        except TwoValuesError as problem:
            raise ValueError(f"the answer to workload {name} is {problem}") from None
        except ValueError:
            if not line.endswith(b"\n"):  # it ended in the middle of an answer
                self._command = None
                command.end()
            raise ValueError(f"the answer to workload {name} is not a line of JSON: {shown(text)}") from None

    def _give_up(self, reason: str) -> ValueError:
        """End a command whose further answers mean nothing."""
        self._given_up = reason
        if self._command is not None:
            self._command.end(at_once=True)
            self._command = None
        return ValueError(reason)

    def close(self) -> str:
        """End the program.

        Returns:
            The fault of a command that has written more answers than it was asked for; "" without one.
        """
        if self._command is None:
            return ""
        _, rest = self._command.end()
        num_more = sum(map(_is_answer, rest)) - self._command.num_late
        self._command = None
        if num_more <= 0:
            return ""
        return "the program wrote more answers than it was asked for: answer each workload once, in order"


class _Command:
    """A running command. Threads write and read, so that a program that does neither stops nobody."""

    def __init__(self, words: list[str]) -> None:
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that what it starts is ended with it
        )
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lines: queue.Queue[bytes] = queue.Queue(_MOST_WAITING)
        self._has_answered = self._is_over = False
        self.num_late = 0  # answers that are still to come, and that nobody waits for
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the program has ended, which the reader sees
            while text := self._asked.get():
                self._process.stdin.write(text.encode() + b"\n")
                self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        line = b" "
        while line and len(line) <= MOST_BYTES and not self._is_over:
            line = self._process.stdout.readline(MOST_BYTES + 1)
            self._lines.put(line)
        if line:
            self._lines.put(b"")

    def ask(self, text: str, timeout: float) -> bytes:
        """The answer to a workload, b"" if the program has ended. It may take five times as long to start.

        Raises:
            queue.Empty: There is none in time.
        """
        self._asked.put(text)
        while True:
            try:
                line = self._lines.get(timeout=timeout * (1 if self._has_answered else 5))
            except queue.Empty:
                if self._process.poll() is None:
                    self.num_late += 1
                    raise
                line = b""  # it has ended, and a child of it keeps its output open
            self._has_answered, self._is_over = True, not line
            if not line or not self.num_late:
                return line
            self.num_late -= 1

    def end(self, *, at_once: bool = False) -> tuple[int, list[bytes]]:
        """End the program.

        Returns:
            Its exit status, and the last lines that nobody has asked for.
        """
        self._asked.put("")
        try:
            self._process.wait(timeout=0 if at_once else 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):  # nothing is left of it
            os.killpg(self._process.pid, signal.SIGKILL)
        rest: list[bytes] = []
        with suppress(queue.Empty):  # a child in another session may keep its output open
            while not self._is_over and len(rest) < _MOST_WAITING and (line := self._lines.get(timeout=2)):
                rest.append(line)
        self._is_over = True
        return self._process.returncode, rest


def _is_answer(line: bytes) -> bool:
    """Whether a line is an answer, and not a farewell."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(told, dict) and bool(told.keys() & {"steps", "unsupported"})


def _imported(program: str) -> Callable[[dict[str, Any]], Any]:
    here = os.getcwd()
    if here not in sys.path and not Path(here, "finding.json").exists():
        sys.path.append(here)
    module, _, name = program.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as problem:  # whatever the module does
        told = f"PROGRAM {program!r} cannot be imported: {type(problem).__name__}: {problem}"
        raise ValueError(told) from None
    if not callable(found):
        raise ValueError(f"PROGRAM {program!r} is not a function: it must take a workload and return its schedule")
    return found
