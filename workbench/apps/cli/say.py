"""Sentences of the command line, as wide as the terminal."""

from __future__ import annotations

from workbench.base.tables import terminal_width, wrapped
from workbench.base.text import printable


def say(*sentences: object) -> None:
    """Print sentences, a line each, which may have names from a file, as wide as the terminal."""
    width = terminal_width()
    for sentence in sentences:
        print("\n".join(wrapped(printable(str(sentence)), width)), flush=True)
