"""Keeps a log readable when the same thing goes wrong over and over."""

from __future__ import annotations

import logging
import threading
import time

MAX_REPEATS = 5
"""Maximum number of records from one place in the code, in each period; the rest are counted."""

PERIOD_SECONDS = 60.0
MAX_PLACES = 1000
MAX_MESSAGE = 10_000


class RepeatFilter(logging.Filter):
    """Lets MAX_REPEATS records of one place in the code pass in each period, then one that counts the others.

    A place is a line of code with a level and the class of its exception, so a flood of one kind of error does not hide
    another kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        kind = record.exc_info[0] if record.exc_info else None
        place = record.name, record.levelno, record.pathname, record.lineno, kind
        now = time.monotonic()
        with self._lock:
            start, count = self._seen.get(place, (now, 0))
            left_out = max(0, count - MAX_REPEATS)
            if now - start > PERIOD_SECONDS:
                start, count = now, 0
            if len(self._seen) >= MAX_PLACES and place not in self._seen:
                self._seen.clear()
            self._seen[place] = start, count + 1
        if count >= MAX_REPEATS:
            return False
        message = record.getMessage()
        if count == 0 and left_out:
            message = f"{message} (and {left_out} more like this since)"
        elif count == MAX_REPEATS - 1:
            message = f"{message} (more like this within {PERIOD_SECONDS:g} s are only counted)"
        record.msg, record.args = message[:MAX_MESSAGE], ()
        return True


def limit_repeats() -> None:
    """Put the filter on every handler of this process, and on the one that Python uses if there is none."""
    repeats = RepeatFilter()
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {handler for logger in loggers for handler in logger.handlers}
    for handler in [*handlers, logging.lastResort]:
        if handler is not None and not any(isinstance(known, RepeatFilter) for known in handler.filters):
            handler.addFilter(repeats)
