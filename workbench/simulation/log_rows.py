"""The rows of a log of requests, whatever file they are in: CSV, JSON lines or a JSON array, plain or gzipped."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from workbench.base.field_checks import json_object
from workbench.base.outside_files import json_value
from workbench.trace.errors import TraceError
from workbench.trace.text_file import beginning, text_blocks, text_lines

Rows = Iterator[tuple[str, Mapping[str, Any]]]
"""Each row with its place for messages."""

MAX_ARRAY_CHARACTERS = 2**30
"""Longest JSON array that is read; ShareGPT's has 0.7 billion characters."""

_TABLES = (".csv", ".tsv")
_DELIMITERS = ",;\t"


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a table in CSV, by its name."""
    return Path(path).name.lower().removesuffix(".gz").endswith(_TABLES)


def is_array(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds a JSON array of objects, by its beginning."""
    start = beginning(path).lstrip()
    return start.startswith("[") and start[1:].lstrip()[:1] in ("{", "]", "")


def table_rows(path: str | os.PathLike[str]) -> Rows:
    """The rows of a table whose first line names the columns, which commas, semicolons or tabs part.

    Raises:
        ValueError: It is not such a table.
    """
    lines = text_lines(path)
    header = next(lines, "")
    rows = csv.DictReader(chain([header], lines), delimiter=max(_DELIMITERS, key=header.count))
    try:
        names = [name.strip().lower() for name in rows.fieldnames or ()]
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise ValueError(f"{path}, line 1: two columns are named {twice[0]}: rename or remove one")
        for row in rows:
            if None in row:
                raise ValueError(
                    f"{path}, line {rows.line_num} has {len(names) + len(row[None])} values, and the first line names "
                    f"{len(names)} columns"
                )
            yield f"{path}, line {rows.line_num}:", row
    except csv.Error as problem:
        raise ValueError(f"{path}, line {rows.line_num}: not CSV: {problem}") from None


def json_rows(path: str | os.PathLike[str]) -> Rows:
    """The objects of JSON lines, or of a JSON array.

    Raises:
        ValueError: A row is not a JSON object.
    """
    if is_array(path):
        found = ((f"{path}, entry {index}:", entry) for index, entry in enumerate(_array(path), start=1))
    else:
        lines = (
            (f"{path}, line {index}:", line) for index, line in enumerate(text_lines(path), start=1) if line.strip()
        )
        found = ((place, json_value(line, f"{place} not JSON")) for place, line in lines)
    for place, entry in found:
        yield place, json_object(place, entry)


def _array(path: str | os.PathLike[str]) -> list[Any]:
    blocks, total = [], 0
    for block in text_blocks(path):
        total += len(block)
        if total > MAX_ARRAY_CHARACTERS:
            raise TraceError(
                f"{path} is an array of more than {MAX_ARRAY_CHARACTERS:,} characters: write a line for each entry"
            )
        blocks.append(block)
    entries = json_value("".join(blocks), f"{path} is not JSON")
    assert isinstance(entries, list)  # it begins with a bracket
    return entries
