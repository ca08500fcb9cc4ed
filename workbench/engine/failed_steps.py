"""The steps of an engine that raised: their number, and what the last of them said."""

from __future__ import annotations

from workbench.base.text import printable

MAX_CHARACTERS = 300
"""Maximum length of a line that is kept of an error."""


class FailedSteps:
    """Counts the steps that raised.

    Attributes:
        count: Their number.
        error: Type and first line of the last error; "" if none raised.
    """

    def __init__(self) -> None:
        self.count = 0
        self.error = ""

    def add(self, problem: Exception) -> None:
        """Count a step."""
        first_line = next(iter(str(problem).splitlines()), "")
        self.error = printable(f"{type(problem).__name__}: {first_line}"[:MAX_CHARACTERS])
        self.count += 1
