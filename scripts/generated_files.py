"""Write the files that a script generates, or check with ``--check`` that they are up to date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.base.key_table import Rule


def write_or_check(description: str, files: Iterable[tuple[Path, str]], source: str) -> int:
    """Write the files; with ``--check`` on the command line, compare them instead.

    Args:
        description: The script's own description, for ``--help``.
        files: Each file with its text.
        source: The origin of the texts, for the message about files that differ.

    Returns:
        The exit status: 1 if a file differs, otherwise 0.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args().check
    stale = []
    for path, text in files:
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        print(f"out of date with {source}: {', '.join(stale)}; run {sys.argv[0]}", file=sys.stderr)
    return int(bool(stale))


def rule_cells(rule: Rule) -> tuple[str, str, str]:
    """The keys of a rule, their values, and its verdict with the reason."""
    keys = " ".join(f"`{key}`" for key in rule.keys.split())
    values = "any" if rule.values is None else ", ".join(f"`{json.dumps(value)}`" for value in rule.values)
    return keys, values, f"{rule.verdict} | {rule.because}"


def replaced(page: str, begin: str, text: str, end: str) -> str:
    """The page with another text between two markers."""
    before, rest = page.split(begin)
    return before + begin + "\n" + text + "\n" + end + rest.split(end)[1]
