"""The events of a run: a list, which is a table of the first of them when it is shown."""

from __future__ import annotations

from itertools import islice

from workbench.base.tables import table_lines, terminal_width
from workbench.base.text import printable
from workbench.trace.records import Event

MAX_ROWS = 20
"""Maximum number of events that the table shows."""


class Events(list[Event]):
    """Everything that happened to requests, with reasons, in order. ``print`` shows a row for each of the first.

    Example:
        >>> from workbench import simulate
        >>> simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 3}]}).events
        step  event   request  reason
           0  arrive  a
           0  admit   a
           2  finish  a        length
    """

    def __repr__(self) -> str:
        if not self:
            return "no event"
        rows = [
            [f"{one.step:,}", one.kind, printable(one.request_id), printable(one.reason)]
            for one in islice(self, MAX_ROWS)
        ]
        lines = table_lines([["step", "event", "request", "reason"], *rows], width=terminal_width(), left=(1, 2, 3))
        return "\n".join([*lines, *([f"... and {len(self) - MAX_ROWS:,} more"] if len(self) > MAX_ROWS else [])])
