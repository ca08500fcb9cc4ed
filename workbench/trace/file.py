"""Trace files: one JSON object a line, plain or gzipped.

The first line is the TraceMeta with the schema version; RequestInfo and StepRecord lines follow in the order in which
they happened; the last line is the TraceEnd. A file without its end was cut off and is read as far as it goes.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from workbench.trace.checks import TraceError
from workbench.trace.records import SCHEMA_VERSION, TraceEnd, TraceEndReason, TraceLine, TraceMeta

MAX_LINE_BYTES = 2**26
"""Longest line that is read (64 MiB): a prompt of some ten million tokens."""

MAX_FILE_BYTES = 2**33
"""Most bytes that are read from a file after decompression (8 GiB)."""

_READ_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or MLX as Python's own; of anything else, its repr. A recording never fails on it."""
    to_list = getattr(value, "tolist", None)
    return to_list() if to_list is not None else repr(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(TraceLine)

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises where it is not what it should be."""


class _Header(msgspec.Struct):
    """The part of a first line that every version of the format has."""

    kind: str
    schema_version: int


def encode_line(line: TraceLine) -> bytes:
    """A line of a trace file, newline included. Text that is not valid Unicode is written with U+FFFD in its place."""
    try:
        return _encoder.encode(line) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(msgspec.to_builtins(line, enc_hook=_plain))) + b"\n"


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def decode_line(raw: bytes) -> TraceLine:
    """A line of a trace file, its newline taken off.

    Raises:
        UNDECODABLE: It is damaged, or holds a value that no trace may have.
    """
    return _decoder.decode(raw)


def is_gzip_path(path: str | os.PathLike[str]) -> bool:
    """Whether a trace written to this path is gzipped.

    Raises:
        TraceError: The name ends in neither .jsonl nor .jsonl.gz.
    """
    name = os.fspath(path)
    if not name.endswith((".jsonl", ".jsonl.gz")):
        raise TraceError(f"a trace is saved as .jsonl or .jsonl.gz, not as {Path(name).name!r}")
    return name.endswith(".gz")


class TraceWriter:
    """Writes a trace while it happens. Each line reaches the operating system at once: a killed run stays readable.

    Args:
        path: A .jsonl or .jsonl.gz file; replaced if it exists.
        meta: The first line.
        compresslevel: Of a .jsonl.gz file, from 1 (fastest) to 9.

    Raises:
        TraceError: The file's name has another ending.
        OSError: The file cannot be written.

    Example:
        >>> from workbench.trace import StepRecord, TraceMeta
        >>> with TraceWriter("run.jsonl", TraceMeta(source="simulation")) as writer:
        ...     writer.write(StepRecord(0, arrived=("r0",), waiting=("r0",)))
        >>> writer.num_steps
        1
    """

    def __init__(self, path: str | os.PathLike[str], meta: TraceMeta, *, compresslevel: int = 6) -> None:
        gzipped = is_gzip_path(path)
        self.path = Path(path)
        self.num_steps = 0
        self._lock = threading.RLock()  # between the thread that records and the one that ends the recording
        self._raw = open(self.path, "wb")  # noqa: SIM115 - closed by close()
        # With no file name and no time: the same trace gives the same bytes.
        self._file: BinaryIO = (
            gzip.GzipFile(filename="", fileobj=self._raw, mode="wb", compresslevel=compresslevel, mtime=0)
            if gzipped
            else self._raw
        )
        try:
            self.write(meta)
        except BaseException:
            self.discard()
            raise

    def write(self, line: TraceLine, *, flush: bool = True) -> None:
        """Append a RequestInfo, Keyframe or StepRecord.

        Args:
            line: The record.
            flush: Hand it to the operating system at once. Costs some compression in a .gz file.

        Raises:
            OSError: The file cannot be written.
            ValueError: The writer has been closed.
        """
        encoded = encode_line(line)
        with self._lock:
            self._file.write(encoded)
            if flush:
                self._file.flush()
            self.num_steps += line.__struct_config__.tag == "step"

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._raw.closed

    def close(self, reason: TraceEndReason = "") -> None:
        """Write the end line and close the file; does nothing the second time."""
        with self._lock:
            if self._raw.closed:
                return
            try:
                self.write(TraceEnd(reason, self.num_steps), flush=False)
                if self._file is not self._raw:
                    self._file.close()
                self._raw.flush()
                os.fsync(self._raw.fileno())
            finally:
                self._raw.close()

    def abandon(self) -> None:
        """Close the file as it is, where nothing more can be written: without an end line, and without an error."""
        for file in (self._file, self._raw):
            with contextlib.suppress(OSError, ValueError):  # what is buffered cannot be written either
                file.close()

    def discard(self) -> None:
        """Close and remove the unfinished file."""
        self.abandon()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: str | os.PathLike[str]) -> Iterator[TraceLine | str]:
    """The lines of a trace file as records, the TraceMeta first.

    Yields:
        Each record; when the file is cut off, a text that says where, as the last item.

    Raises:
        TraceError: Not a trace, another schema version, or a line that is damaged, with its number.
        OSError: The file cannot be read.
    """
    number = 0
    ended = False
    for number, (raw, complete) in enumerate(_split_lines(path), start=1):
        if number == 1:
            if not complete and not _is_json(raw):
                raise TraceError(f"{path} is not a trace: it has no complete first line")
            check_header(path, raw)
        if ended:
            raise TraceError(f"{path}, line {number}: nothing may follow the end line")
        try:
            line = decode_line(raw)
        except UNDECODABLE as problem:
            if not complete and not _is_json(raw):
                yield f"{path} is cut off in line {number}"
                return
            raise TraceError(f"{path}, line {number}: {problem}") from None
        if isinstance(line, TraceMeta) != (number == 1):
            raise TraceError(f"{path}, line {number}: the meta line must be the first, and only the first")
        ended = isinstance(line, TraceEnd)
        yield line
    if number == 0:
        raise TraceError(f"{path} is not a trace: it is empty")
    if not ended:
        yield f"{path} has no end line after line {number}: its writer was stopped or is still writing"


def _is_json(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
    except UNDECODABLE:
        return False
    return True


def check_header(path: str | os.PathLike[str], raw: bytes) -> None:
    """Check that a first line is that of a trace of this version.

    Raises:
        TraceError: It is not; the message says which version it is.
    """
    try:
        header = msgspec.json.decode(raw, type=_Header)
    except UNDECODABLE:
        raise TraceError(f"{path} is not a trace: its first line holds no kind and schema_version") from None
    if header.kind != "meta":
        raise TraceError(f"{path} is not a trace from its beginning: the first line is a {header.kind[:40]!r} line")
    if header.schema_version != SCHEMA_VERSION:
        raise TraceError(
            f"{path} has trace schema version {header.schema_version}, this workbench reads version "
            f"{SCHEMA_VERSION}: open it with the workbench that wrote it, or record it again"
        )


def _split_lines(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, bool]]:
    """Lines without their newline, and whether the newline was there."""
    rest = b""
    for block in _read_blocks(path):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
            raise TraceError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes: it is not a trace")
        for line in lines:
            yield line, True
    if rest:
        yield rest, False


def _read_blocks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The file's bytes, decompressed; a gzip stream that is cut off gives what can be had of it."""
    total = 0
    with open(os.fspath(path), "rb") as file:  # a number would be an open file of somebody else's
        gzipped = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        for block in _decompress(path, file) if gzipped else iter(lambda: file.read(_READ_BYTES), b""):
            total += len(block)
            if total > MAX_FILE_BYTES:
                raise TraceError(f"{path} holds more than {MAX_FILE_BYTES} bytes: record fewer steps, or split it")
            yield block


def _decompress(path: str | os.PathLike[str], file: BinaryIO) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits=31)
    try:
        while block := file.read(_READ_BYTES):
            while block:
                yield stream.decompress(block, _READ_BYTES)
                block = stream.unconsumed_tail
                if stream.eof:
                    block = stream.unused_data
                    stream = zlib.decompressobj(wbits=31)
        yield stream.flush()
    except zlib.error as problem:
        raise TraceError(f"{path} is a damaged gzip file: {problem}") from None
