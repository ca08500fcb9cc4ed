"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_when_complete(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file whole or not at all; a link there is replaced, not followed.

    Yields:
        A path beside the file. A file written there takes the place of the old one at the end of the block; it is
        removed if the block raises.

    Raises:
        OSError: It cannot be written; the error names the file, and not the path beside it.
    """
    target = Path(path)
    unfinished = target.with_name(f".{secrets.token_hex(4)}-{target.name}")
    try:
        yield unfinished
        os.replace(unfinished, target)
    except OSError as problem:
        if problem.filename is not None and os.fspath(problem.filename) == os.fspath(unfinished):
            problem.filename = os.fspath(target)
            del problem.filename2  # None would be printed as a second file
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text in place of a file, as `replaced_when_complete` does."""
    with replaced_when_complete(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
