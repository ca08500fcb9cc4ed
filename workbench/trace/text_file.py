"""Texts of other tools: plain or gzipped, in UTF-8, UTF-16 or UTF-32, whatever their names say."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator

from workbench.trace.errors import TraceError
from workbench.trace.file import MAX_LINE_BYTES, read_blocks

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
"""Byte order marks; that of UTF-32 begins with that of UTF-16."""


def encoding_of(start: bytes) -> str:
    """The encoding of a text by its first bytes: a byte order mark, or zeros beside ASCII characters."""
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return encoding
    if len(start) >= 2 and 0 in start[:2]:
        return "utf-16-be" if start[0] == 0 else "utf-16-le"
    return "utf-8"


def text_blocks(path: str | os.PathLike[str], errors: str = "strict") -> Iterator[str]:
    """The text of a file in pieces.

    Args:
        path: The file.
        errors: Treatment of bytes that are not text, as in `bytes.decode`.

    Raises:
        TraceError: It is not text, or its gzip stream is damaged or, with ``errors="strict"``, cut off.
        OSError: It cannot be read.
    """
    decoder: codecs.IncrementalDecoder | None = None
    encoding = ""
    try:
        for block in read_blocks(path, whole=errors == "strict"):
            if decoder is None:
                encoding = encoding_of(block[:4])
                decoder = codecs.getincrementaldecoder(encoding)(errors)
            yield decoder.decode(block)
        if decoder is not None:
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as problem:
        raise TraceError(f"{path} is not text in {encoding.upper()}: {problem}") from None


def text_lines(path: str | os.PathLike[str], errors: str = "strict") -> Iterator[str]:
    """The lines of a text with their ends; arguments and errors as in `text_blocks`."""
    rest = ""
    for block in text_blocks(path, errors):
        lines = (rest + block).split("\n")
        rest = lines.pop()
        if len(rest) > MAX_LINE_BYTES:
            raise TraceError(f"{path} has a line of more than {MAX_LINE_BYTES} characters: it is not a log")
        for line in lines:
            yield f"{line}\n"
    if rest:
        yield rest


def beginning(path: str | os.PathLike[str], length: int = 4096) -> str:
    """The first characters of a text, as far as they can be read; "" for a damaged gzip file."""
    found = ""
    try:
        for block in text_blocks(path, errors="replace"):
            found += block
            if len(found) >= length:
                break
    except TraceError:
        pass
    return found[:length]
