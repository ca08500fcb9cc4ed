"""Errors that a notebook shows in three lines, with the whole traceback on demand.

IPython asks an exception for its traceback (``_render_traceback_``). Ours give the message, the caller's line and the
way to the rest: ``%tb`` asks a second time. Errors of a class of ours bring the method; the others get it from
`shorten_in`, in the shell that imported this package.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
from functools import cache, partial
from types import FrameType, TracebackType
from typing import Any

PACKAGE = "workbench"
_MAGIC = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\((.*)\)")
"""The call to which IPython translates a magic before Python sees the cell."""

MAX_CHARACTERS = 300
"""Of a message that lists fields or panels, what three lines of a notebook show."""


class ShortTraceback(BaseException):
    """Base of our errors whose message says what to do, so that the frames of this package explain nothing."""

    _is_shown = False

    def _render_traceback_(self) -> list[str]:
        """Lines for IPython: three the first time, and Python's whole traceback after that."""
        lines = short_lines(self)
        if self._is_shown or not lines:
            return "".join(traceback.format_exception(self)).splitlines()
        self._is_shown = True
        return lines


def short_lines(problem: BaseException) -> list[str]:
    """The message, the caller's line and how to see more; empty if nobody called."""
    place, message = _place(problem), f"{type(problem).__name__}: {problem}"
    if len(message) > MAX_CHARACTERS:
        message = f"{message[:MAX_CHARACTERS].rsplit(' ', 1)[0]} …"
    return [message, place, "(%tb shows the whole traceback)"] if place else []


def shorten_in(shell: Any) -> None:
    """Let an IPython shell show errors in three lines if this package raised them on purpose.

    A shell that handles exceptions in its own way already is left as it is.
    """
    if not shell.custom_exceptions:
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show)


def is_on_purpose(problem: BaseException) -> bool:
    """Whether this package raised the error itself, could not open a file that it was given, or was interrupted."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(problem.__traceback__)]
    ours = [_is_ours(frame) for frame, _ in frames]
    if not any(ours):
        return _is_wrong_call(problem)
    if isinstance(problem, KeyboardInterrupt) or (isinstance(problem, OSError) and problem.filename is not None):
        return True
    frame, line = frames[-1]
    return ours[-1] and line in _raising_lines(frame.f_code.co_filename)


def _is_wrong_call(problem: BaseException) -> bool:
    """Whether Python refused the arguments of a call of this package, before it was entered."""
    named = re.match(r"(\w+)\.\w+\(\) (got|missing|takes) ", str(problem)) if isinstance(problem, TypeError) else None
    kind = getattr(sys.modules.get(PACKAGE), named[1], None) if named else None
    return isinstance(kind, type) and kind.__module__.partition(".")[0] == PACKAGE


def _show(
    shell: Any, kind: type[BaseException], problem: BaseException, tb: TracebackType, tb_offset: int | None = None
) -> None:
    """The handler of `shorten_in`; ``%tb`` and everything else sees the exception as it was."""
    lines = [] if hasattr(problem, "_render_traceback_") or not is_on_purpose(problem) else short_lines(problem)
    if not lines:
        shell.showtraceback((kind, problem, tb), tb_offset=tb_offset)
        return
    problem._render_traceback_ = partial(list, lines)  # type: ignore[attr-defined]
    try:
        shell.showtraceback((kind, problem, tb), tb_offset=tb_offset)
    finally:
        del problem._render_traceback_  # type: ignore[attr-defined]


@cache
def _raising_lines(file: str) -> frozenset[int]:
    """The lines of a source file that belong to a ``raise`` of an exception made there; a bare one passes on."""
    tree = ast.parse("".join(linecache.getlines(file)))
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None)
    return frozenset(line for node in raises for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == PACKAGE


def _place(problem: BaseException) -> str:
    """The caller's line: the last one before this package is entered; empty if there is none."""
    callers: list[tuple[FrameType, int]] = []
    for frame, line in traceback.walk_tb(problem.__traceback__):
        if _is_ours(frame):
            break
        if not frame.f_globals.get("__name__", "").startswith("IPython."):  # a magic is called by IPython
            callers.append((frame, line))
    if not callers:
        return ""
    frame, number = callers[-1]
    [summary] = traceback.StackSummary.extract(iter([(frame, number)]))
    file = "this cell" if "ipykernel" in summary.filename or "ipython-input" in summary.filename else ""
    return f"  line {number} of {file or summary.filename}: {_MAGIC.sub(_as_written, summary.line or '')}"


def _as_written(call: re.Match[str]) -> str:
    """The line of a magic, from IPython's call of it."""
    name, line = ast.literal_eval(f"({call[2]},)")[:2]
    return f"{'%' if call[1] == 'line' else '%%'}{name} {line}".rstrip()
