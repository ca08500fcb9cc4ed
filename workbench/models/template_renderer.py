"""Renders chat templates in another process, `workbench.models.template_process`, and ends it when it takes too long.

One process serves all templates. It starts when the first template is compiled, ends with this process, and is replaced
after a template that took too much.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from workbench.base.connected import receive_within, start_connected

START_SECONDS = 60.0
MAX_ANSWER_BYTES = 2**28


class TemplateProblem(Exception):
    """A template could not be compiled or rendered.

    Args:
        kind: Class of the exception; "TimeoutError" for a template that was ended.
        message: Its text.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TemplateProcess:
    """The process; it answers one request at a time."""

    def __init__(self) -> None:
        # One arena: address space that the allocator sets aside for threads would count as the template's.
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
        program = str(Path(__file__).with_name("template_process.py"))
        self._process, self._connection = start_connected(program, env=environment, start_new_session=True)
        self.pid = os.getpid()
        self._is_ready = False

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            TimeoutError: There was none in time.
            OSError: The process ended, or its answer is too long.
        """
        if not self._is_ready:  # its start does not count
            self._receive(START_SECONDS)
            self._is_ready = True
        self._connection.send_bytes(request)
        return json.loads(self._receive(seconds))

    def _receive(self, seconds: float) -> bytes:
        try:
            return receive_within(self._connection, seconds, MAX_ANSWER_BYTES)
        except EOFError:
            raise OSError("the process that renders chat templates has ended") from None
        except TimeoutError:
            raise
        except OSError:
            raise OSError("the process that renders chat templates gave an answer that is too long") from None

    def end(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._connection.close()
        self._process.wait()


_lock = threading.Lock()
_running: TemplateProcess | None = None


def render_template(source: str, variables: Mapping[str, Any] | None, seconds: float) -> str:
    """The text that a template makes of its variables; None only compiles it.

    Raises:
        TemplateProblem: It failed, or took too much time or memory.
    """
    try:
        request = json.dumps(
            {"source": source, "variables": variables, "seconds": seconds}, default=_plain, check_circular=True
        ).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise TemplateProblem("ValueError", f"messages and variables must be JSON data: {problem}") from None
    with _lock:
        try:
            answer = _process().ask(request, seconds)
        except TimeoutError:
            _end()
            raise TemplateProblem("TimeoutError", f"took more than {seconds:g} s") from None
        except OSError as problem:
            _end()
            raise TemplateProblem("MemoryError", f"{problem}: it took too much memory, or was ended") from None
        except BaseException:  # the rest of the answer would be taken for the next one
            _end()
            raise
        if answer.get("error") == "MemoryError":
            _end()
    if "error" in answer:
        raise TemplateProblem(answer["error"], answer["message"])
    return answer["text"]


def start_renderer() -> None:
    """Start the process for a template that comes soon, and do not wait for it."""
    with _lock:
        _process()


def _process() -> TemplateProcess:
    global _running
    if _running is None or _running.pid != os.getpid():  # a fork must not share it
        _running = TemplateProcess()
    return _running


def _end() -> None:
    global _running
    if _running is not None and _running.pid == os.getpid():
        _running.end()
    _running = None


def _plain(value: Any) -> Any:
    """Data that JSON can hold, from containers and from the special tokens of a tokenizer."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value)
    if isinstance(content := getattr(value, "content", None), str):
        return content
    raise TypeError(f"{type(value).__name__} is not data")


atexit.register(_end)
