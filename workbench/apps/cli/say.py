"""Sentences of the command line, as wide as the terminal."""

from __future__ import annotations

from workbench.base.tables import terminal_width, wrapped
from workbench.base.text import printable


def say(sentence: object) -> None:
    """Print a sentence, which may have names from a file, as wide as the terminal."""
    print("\n".join(wrapped(printable(str(sentence)), terminal_width())), flush=True)
