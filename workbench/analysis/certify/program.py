"""The simulator under test: a function, or a command that answers JSON lines."""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.base.text import shown


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
        self._num_late = 0  # answers that are still to come, and that nobody waits for
        self._has_answered = False
        self._function: Callable[[dict[str, Any]], Any] | None = None
        self._process: subprocess.Popen[str] | None = None
        self.name = program if isinstance(program, str) else getattr(program, "__qualname__", repr(program))
        if not isinstance(program, str):
            self._function = program
        elif re.fullmatch(r"[\w.]+:\w+", program):
            self._function = _imported(program)
        else:
            self._start(program)

    def _start(self, command: str) -> None:
        words = shlex.split(command)
        if not words:
            raise ValueError("PROGRAM is empty: give module:function, or a command that answers JSON lines")
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as problem:
            raise ValueError(f"PROGRAM {command!r} cannot be started: {problem}") from None
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def schedule(self, workload: dict[str, Any]) -> Any:
        """The program's answer.

        Raises:
            ValueError: It ends, does not answer in time, or answers what is not JSON.
        """
        if self._function is not None:
            return self._function(json.loads(json.dumps(workload)))  # it may change what it is given
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(workload) + "\n")
            self._process.stdin.flush()
            line = self._next_line()
        except (BrokenPipeError, OSError):
            line = ""
        except queue.Empty:
            self._num_late += 1
            raise ValueError(
                f"no answer to workload {workload['id']!r} within {self._timeout:g} s (--timeout)"
            ) from None
        if not line:
            raise ValueError(f"the program ended before it answered workload {workload['id']!r}")
        try:
            return json.loads(line)
        except ValueError:
            raise ValueError(
                f"the answer to workload {workload['id']!r} is not a line of JSON: {shown(line)}"
            ) from None

    def _next_line(self) -> str:
        """The answer to the latest workload. A program may take five times as long to start."""
        while True:
            line = self._lines.get(timeout=self._timeout * (1 if self._has_answered else 5))
            self._has_answered = True
            if not line or not self._num_late:
                return line
            self._num_late -= 1

    def close(self) -> None:
        """End the program."""
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=2)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def _imported(program: str) -> Callable[[dict[str, Any]], Any]:
    here = os.getcwd()
    if here not in sys.path and not Path(here, "finding.json").exists():
        sys.path.append(here)
    module, _, name = program.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as problem:
        raise ValueError(f"PROGRAM {program!r} cannot be imported: {problem}") from None
    if not callable(found):
        raise ValueError(f"PROGRAM {program!r} is not a function: it must take a workload and return its schedule")
    return found
