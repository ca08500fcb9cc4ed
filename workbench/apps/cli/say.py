"""Sentences of the command line, as wide as the terminal."""

from __future__ import annotations

import sys

from workbench.base.tables import terminal_width, wrapped_text
from workbench.base.text import printable


def say(*sentences: object) -> None:
    """Print sentences, a line each, which may have names from a file, as wide as the terminal."""
    width = terminal_width()
    for sentence in sentences:
        print(wrapped_text(printable(str(sentence)), width), flush=True)


def say_error(text: object) -> None:
    """Print lines on standard error, as wide as its terminal; characters that steer a terminal must be gone."""
    print(wrapped_text(str(text), terminal_width(sys.stderr)), file=sys.stderr, flush=True)


def say_text(text: object) -> None:
    """Print a text of several lines, in which names from a file are printable, as wide as the terminal."""
    say(*str(text).split("\n"))
