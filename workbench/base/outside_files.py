"""Opens files that others made, and reads their JSON: regular files only, and deep nesting is a ValueError."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import IO, Any, BinaryIO

MAX_JSON_BYTES = 2**28
"""Largest JSON file that is read whole (256 MiB)."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Check that a path leads to a regular file, for a library that opens it itself.

    Raises:
        ValueError: It leads to a pipe, a device or a socket, at which a reader could wait forever.
        OSError: There is no such file, or it is a folder.
    """
    found = os.stat(path)
    _check(os.fspath(path), found.st_mode)
    return found


def _check(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} must be a regular file, got {_KINDS.get(stat.S_IFMT(mode), 'something else')}")


def open_bytes(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises:
        ValueError: It is a pipe, a device or a socket.
        OSError: It cannot be opened, or is a folder.
    """
    return open(os.fspath(path), "rb", opener=_open_regular)  # a number would be somebody else's open file


def open_text(
    path: str | os.PathLike[str], *, encoding: str = "utf-8", errors: str = "strict", newline: str | None = None
) -> IO[str]:
    """Open a regular file to read its text; errors as in `open_bytes`."""
    return open(os.fspath(path), encoding=encoding, errors=errors, newline=newline, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    """Open without waiting for the other side of a pipe, and look at what was opened, not at what the name was."""
    if not hasattr(os, "O_NONBLOCK"):
        check_regular(path)
        return os.open(path, flags)
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        check_regular(path)  # a socket cannot be opened
        raise
    try:
        _check(path, os.fstat(descriptor).st_mode)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class TwoValuesError(ValueError):
    """A JSON object has two values of one name.

    Args:
        name: The name.
        message: The sentence about it.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def json_value(text: str | bytes, failure: str = "not JSON") -> Any:
    """The value of a JSON text.

    Args:
        text: The text.
        failure: Beginning of the error, such as "FILE is not JSON".

    Raises:
        TwoValuesError: An object has two values of one name.
        ValueError: It is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except TwoValuesError as problem:
        raise TwoValuesError(problem.name, f"{failure}: {problem}") from None
    except RecursionError:
        raise ValueError(f"{failure}: it is nested too deeply") from None
    except ValueError as problem:
        raise ValueError(f"{failure}: {problem}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, whose names differ: of two values, a reader would take either one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        for name, value in pairs:
            if repr(made[name]) != repr(value):  # 1 and true are equal
                raise TwoValuesError(name, f"an object has two values of {name[:100]!r}")
    return made


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: It is not JSON, nested too deeply, too large or not a regular file; the message names it.
        OSError: It cannot be read.
    """
    return json_value(read_bytes(path, max_bytes), f"{os.fspath(path)} is not a JSON file")


def read_bytes(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """All bytes of a regular file.

    Raises:
        ValueError: It is too large, or not a regular file.
        OSError: It cannot be read.
    """
    with open_bytes(path) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{os.fspath(path)} has {size:,} bytes, {max_bytes:,} are allowed: it is too large")
        return file.read() if max_bytes is None else file.read(size)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a regular file.

    Raises:
        ValueError: It is not in UTF-8, or not a regular file; the message names it.
        OSError: It cannot be read.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as problem:
        where = f"{problem.reason} at byte {problem.start}"
        raise ValueError(f"{os.fspath(path)} is not text in UTF-8: {where}") from None
