"""Tables of text: aligned columns, or a block for each row where a terminal is too narrow for them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import TextIO


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns that a line may have: the variable COLUMNS, else those of the terminal; None for a file or a pipe.

    Args:
        stream: The file or terminal that gets the line; None for standard output.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def wrapped(line: str, width: int | None, indent: int = 2) -> list[str]:
    """A line, continued in further ones between two words if it is longer than a width.

    Args:
        line: The line; spaces at its beginning stay.
        width: Columns that a line may have; None for any number. A longer word stays whole.
        indent: Spaces before the further lines; no more than a quarter of the width.

    Example:
        >>> wrapped("time to first token: 7.4 s instead of 9 s", 24)
        ['time to first token: 7.4', '  s instead of 9 s']
    """
    if width is None or len(line) <= width:
        return [line]
    further = " " * min(indent, width // 4)
    return textwrap.wrap(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def wrapped_text(text: str, width: int | None) -> str:
    """The lines of a text, each as `wrapped` continues it, two columns further in than it begins."""
    lines = text.split("\n")
    return "\n".join(
        piece for line in lines for piece in wrapped(line, width, indent=len(line) - len(line.lstrip()) + 2)
    )


def folded_command(line: str, width: int | None) -> list[str]:
    r"""A command for a shell, continued in further lines before an option if it is longer than a width.

    Args:
        line: The command; spaces at its beginning stay.
        width: Columns that a line may have; None for any number. A longer option stays whole.

    Example:
        >>> print(*folded_command("serve --host 0.0.0.0 --port 8000", 24), sep="\n")
        serve --host 0.0.0.0 \
            --port 8000
    """
    if width is None or len(line) <= width:
        return [line]
    first, *options = re.split(r" +(?=--)", line.rstrip())
    further = " " * (len(line) - len(line.lstrip()) + 4)
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 3 <= width:  # with the space between them, and what continues the line
            lines[-1] += f" {option}"
        else:
            lines[-1] += " \\"
            lines.append(further + option)
    return lines


def table_lines(
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    title: Collection[int] = (0,),
    left: Collection[int] = (),
) -> list[str]:
    r"""The lines of a table.

    Args:
        rows: The cells, the headings first.
        width: Columns that a line may have; None for any number. If the columns need more, each row becomes a block.
        title: Columns whose cells make the first line of a block.
        left: Columns whose cells begin at their left edge.

    Example:
        >>> rows = [["", "now", "interval"], ["ttft_mean", "1.9 s", "1.2 s to 2.4 s"]]
        >>> print(*table_lines(rows, left=(0,)), sep="\n")
                     now        interval
        ttft_mean  1.9 s  1.2 s to 2.4 s
        >>> print(*table_lines(rows, left=(0,), width=30), sep="\n")
        ttft_mean
          now       1.9 s
          interval  1.2 s to 2.4 s
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(
            cell.ljust(size) if place in left else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    if width is None or max(map(len, lines)) <= width:
        return lines
    head, *body = rows
    places = [place for place in range(len(head)) if place not in title]
    size = max(len(head[place]) for place in places)
    blocks = []
    for row in body:
        blocks += wrapped(" ".join(row[place] for place in sorted(title) if row[place]), width, indent=4)
        for place in places:
            if row[place]:
                blocks += wrapped(f"  {head[place].ljust(size)}  {row[place]}", width, indent=size + 4)
    return blocks
