"""Errors that a notebook shows in three lines, with the whole traceback on demand."""

from __future__ import annotations

import traceback
from types import FrameType


class ShortTraceback(BaseException):
    """Base of our errors whose message says what to do, so that the frames of this package explain nothing.

    IPython asks an exception for its traceback (``_render_traceback_``). It gets the message, the caller's line and the
    way to the rest: ``%tb`` asks a second time.
    """

    _is_shown = False

    def _render_traceback_(self) -> list[str]:
        """Lines for IPython: three the first time, and Python's whole traceback after that."""
        place = self._place()
        if self._is_shown or not place:
            return "".join(traceback.format_exception(self)).splitlines()
        self._is_shown = True
        return [f"{type(self).__name__}: {self}", place, "(%tb shows the whole traceback)"]

    def _place(self) -> str:
        """The caller's line: the last one before this package is entered; empty if there is none."""
        callers: list[tuple[FrameType, int]] = []
        for frame, line in traceback.walk_tb(self.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] == "workbench":
                break
            callers.append((frame, line))
        if not callers:
            return ""
        frame, number = callers[-1]
        [summary] = traceback.StackSummary.extract(iter([(frame, number)]))
        file = "this cell" if "ipykernel" in summary.filename or "ipython-input" in summary.filename else ""
        return f"  line {number} of {file or summary.filename}: {summary.line}"
