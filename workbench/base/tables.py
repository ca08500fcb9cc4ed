"""Tables of text: aligned columns, folded if a terminal is narrow, or a block for each row if it is too narrow."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TextIO

GAP = "  "
"""Stands between two columns."""

MIN_FOLDED = 20
"""A column of texts is not folded to fewer characters: it would be a tower of words."""

MAX_PARTS = 4
"""Maximum number of tables, one below the other, in which a reader still finds a row again."""


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

    If a line would be too long, headings and texts are folded; if that is not enough, further columns go into a
    table below; and if one of those is too wide, or there would be too many, each row becomes a block. Columns whose
    headings differ in their last word alone, such as "TTFT A" and "TTFT B", stay together.

    Args:
        rows: The cells, the headings first.
        width: Columns of characters that a line may have; None for any number.
        title: Columns that begin each table, and make the first line of a block.
        left: Columns of texts, which begin at their left edge and may be folded.

    Example:
        >>> rows = [["", "now", "interval"], ["ttft_mean", "1.9 s", "1.2 s to 2.4 s"]]
        >>> print(*table_lines(rows, left=(0,)), sep="\n")
                     now        interval
        ttft_mean  1.9 s  1.2 s to 2.4 s
        >>> print(*table_lines(rows, left=(0,), width=30), sep="\n")
                     now
        ttft_mean  1.9 s
        <BLANKLINE>
                         interval
        ttft_mean  1.2 s to 2.4 s
        >>> print(*table_lines(rows, left=(0,), width=20), sep="\n")
        ttft_mean
          now       1.9 s
          interval  1.2 s to
             2.4 s
    """
    parts: list[list[int]] = []
    others = sorted({*range(len(rows[0]))} - {*title})
    for _, group in groupby(others, key=lambda place: rows[0][place].rpartition(" ")[0] or place):
        columns = list(group)
        if parts and _sizes(rows, sorted([*title, *parts[-1], *columns]), width, left):
            parts[-1] += columns
        else:
            parts.append(columns)
    lines: list[str] = []
    for part in parts:
        places = sorted([*title, *part])
        sizes = _sizes(rows, places, width, left)
        if sizes is None or len(parts) > MAX_PARTS:
            return _blocks(rows, width, title)
        lines += [""] * bool(lines)
        for row in rows:
            lines += _row_lines(
                [row[place] for place in places], sizes, [place in left for place in places], row is rows[0]
            )
    return lines


def _sizes(
    rows: Sequence[Sequence[str]], places: Sequence[int], width: int | None, left: Collection[int]
) -> list[int] | None:
    """The sizes of some columns: as large as their cells, or folded so that they fit; None if they do not fit."""
    columns = [[row[place] for row in rows] for place in places]
    sizes = [max(map(len, column)) for column in columns]
    room = (width or sum(sizes) + len(GAP) * len(sizes)) - len(GAP) * (len(sizes) - 1)
    if sum(sizes) <= room:
        return sizes
    least = []
    for place, (head, *cells), size in zip(places, columns, sizes):
        folded = [head, *cells] if place in left else [head]
        whole = [] if place in left else cells
        words = " ".join(folded).split()
        least.append(max(map(len, [*words, *whole, " " * min(size, MIN_FOLDED if place in left else 0)])))
    spare = room - sum(least)
    if spare < 0:
        return None
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index] - least[index]):
        more = min(spare, sizes[index] - least[index])
        least[index] += more
        spare -= more
    return least


def _row_lines(row: Sequence[str], sizes: Sequence[int], is_text: Sequence[bool], is_head: bool) -> list[str]:
    """The lines of a row. Its cells begin at the top, folded headings end at the bottom."""
    cells = [wrapped(cell, size, indent=0) for cell, size in zip(row, sizes)]
    height = max(map(len, cells))
    for cell in cells:
        missing = [""] * (height - len(cell))
        cell[:] = [*missing, *cell] if is_head else [*cell, *missing]
    return [
        GAP.join(
            piece.ljust(size) if is_left else piece.rjust(size) for piece, size, is_left in zip(line, sizes, is_text)
        ).rstrip()
        for line in zip(*cells)
    ]


def _blocks(rows: Sequence[Sequence[str]], width: int | None, title: Collection[int]) -> list[str]:
    """The rows as blocks: a line with the cells of ``title``, and below it each other cell with its heading."""
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
