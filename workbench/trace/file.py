"""Trace files: one JSON object per line, plain or gzipped.

The first line is the TraceMeta with the schema version. RequestInfo, StepRecord and Supplement lines follow in the
order in which they happened; a trace that begins in the middle of a run has a Keyframe before its first step. The last
line is the TraceEnd. A file without it was cut off and is read as far as it goes.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
from msgspec.structs import astuple, force_setattr, replace

from workbench.trace.errors import TraceError
from workbench.trace.fields import FrozenDict
from workbench.trace.gunzip import Gunzip
from workbench.trace.lines import SCHEMA_VERSION, TraceEnd, TraceEndReason, TraceLine, TraceMeta
from workbench.trace.old_versions import OldLines, OldTraceLine
from workbench.trace.reasons import Reason
from workbench.trace.records import Chunk, StepRecord

log = logging.getLogger("workbench")

MAX_LINE_BYTES = 2**26
"""Longest line that is read (64 MiB): a prompt of some ten million tokens."""

MAX_FILE_BYTES = 2**33
"""Maximum number of bytes that are read from a file, after decompression (8 GiB)."""

_READ_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or MLX as Python's own; the repr of anything else. A recording never fails on it."""
    to_list = getattr(value, "tolist", None)
    return to_list() if to_list is not None else repr(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(TraceLine)
_old_decoder = msgspec.json.Decoder(OldTraceLine)

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions of a decoder for a damaged line, or for a value that no trace may have."""


# -- lines -------------------------------------------------------------------------------------------------------


def encode_line(line: TraceLine) -> bytes:
    """A line of a trace file, newline included. Text that is not valid Unicode is written with U+FFFD in its place."""
    if isinstance(line, StepRecord):
        line = _shortened(line)
    try:
        return _encoder.encode(line) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(msgspec.to_builtins(line, enc_hook=_plain))) + b"\n"


def _shortened(record: StepRecord) -> StepRecord:
    """A record as it is written: each reason once, and nothing that has its default, at the end of an array as well."""
    short: dict[str, Any] = {}
    if record.chunks:
        short["chunks"] = tuple(map(_without_defaults, record.chunks))
    if record.waiting_reason is not None:
        short["waiting_reason"] = _without_defaults(record.waiting_reason)
    written = replace(record, **short)
    for name in ("passed_over", "preempt_reasons"):
        if reasons := getattr(record, name):
            force_setattr(written, name, _each_once(reasons))
    if record.end == record.end_of_phases:
        force_setattr(written, "end", 0.0)
    return written


def _each_once(reasons: Mapping[str, Reason]) -> dict[str, tuple[Any, ...] | int]:
    """Reasons by request; the number n stands for the n-th different one, counted from 0."""
    numbers: dict[Reason, int] = {}
    short: dict[str, tuple[Any, ...] | int] = {}
    for request_id, reason in reasons.items():
        if (number := numbers.get(reason)) is None:
            numbers[reason] = len(numbers)
        short[request_id] = _without_defaults(reason) if number is None else number
    return short


def _with_reasons(record: StepRecord) -> StepRecord:
    """A record that was read, with a reason in the place of each number."""
    for name in ("passed_over", "preempt_reasons"):
        stated: Mapping[str, Reason | int] = getattr(record, name)
        known: list[Reason] = []
        reasons: dict[str, Reason] = {}
        for request_id, reason in stated.items():
            if not isinstance(reason, int):
                known.append(reason)
            elif reason < len(known):
                reason = known[reason]
            else:
                raise msgspec.ValidationError(f"reason number {reason} of {len(known)} stated before it")
            reasons[request_id] = reason
        if len(known) < len(stated):
            force_setattr(record, name, FrozenDict(reasons))
    return record


def _without_defaults(value: Chunk | Reason) -> tuple[Any, ...]:
    values, defaults = astuple(value), value.__struct_defaults__
    last, num_required = len(values), len(values) - len(defaults)
    while last > num_required and values[last - 1] == defaults[last - 1 - num_required]:
        last -= 1
    return values[:last]


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


class LineDecoder:
    """Decodes the lines of one file in order. The first line names the version of the format.

    Args:
        path: The file, for messages.

    Attributes:
        number: Number of the line that was decoded last, counted from 1.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.number = 0
        self._path = path
        self._decode: Callable[[bytes], Any] = _decoder.decode
        self._old: OldLines | None = None

    def decode(self, raw: bytes) -> list[TraceLine]:
        """Decode the next line.

        Args:
            raw: The line without its newline.

        Returns:
            The line. A line of an earlier version can become more than one.

        Raises:
            TraceError: Not a trace, a version that cannot be read, or a damaged line, with its number.
        """
        self.number += 1
        if self.number == 1 and (version := _version_of(self._path, raw)) < SCHEMA_VERSION:
            self._decode, self._old = _old_decoder.decode, OldLines(version)
        try:
            line = self._decode(raw)
            if self._old is None and isinstance(line, StepRecord):
                line = _with_reasons(line)
        except _UNDECODABLE as problem:
            raise TraceError(f"{self._path}, line {self.number}: {problem}") from None
        if isinstance(line, TraceMeta) and self.number > 1:
            raise TraceError(f"{self._path}, line {self.number}: the meta line must be the first, and only the first")
        if self._old is None:
            return [line]
        try:
            return self._old.convert(line)
        except TraceError as problem:
            raise TraceError(f"{self._path}, line {self.number}: {problem}") from None


class _Header(msgspec.Struct):
    """The part of a first line that every version of the format has."""

    kind: str
    schema_version: int


def _version_of(path: str | os.PathLike[str], raw: bytes) -> int:
    """The version that the first line of a file names.

    Raises:
        TraceError: The line is not that of a trace, or names a version that cannot be read.
    """
    try:
        header = msgspec.json.decode(raw, type=_Header)
    except _UNDECODABLE:
        raise TraceError(f"{path} is not a trace: its first line holds no kind and schema_version") from None
    if header.kind != "meta":
        raise TraceError(f"{path} is not a trace from its beginning: the first line is a {header.kind[:40]!r} line")
    if not 1 <= header.schema_version <= SCHEMA_VERSION:
        raise TraceError(
            f"{path} has trace schema version {header.schema_version}, this workbench reads versions 1 to "
            f"{SCHEMA_VERSION}: open it with the workbench that wrote it, or record it again"
        )
    return header.schema_version


# -- writing -----------------------------------------------------------------------------------------------------


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
        self._lock = threading.RLock()  # between the threads that record and the one that ends the recording
        self._raw = open(self.path, "wb")  # noqa: SIM115 - closed by close()
        # With no file name and no time: the same trace gives the same bytes.
        self._file: IO[bytes] | gzip.GzipFile = (
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
        """Append a line.

        Args:
            line: A RequestInfo, Keyframe, StepRecord or Supplement.
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

    def record(self, line: TraceLine) -> bool:
        """Append a line of a run that must not fail because of its file: a full disk ends the recording with a warning.

        Returns:
            Whether the recording continues; False if it has ended, perhaps by ``close`` on another thread.
        """
        try:
            self.write(line)
        except ValueError:
            if self.closed:
                return False
            raise
        except OSError as problem:
            log.warning("recording to %s stopped: %s", self.path, problem)
            self.abandon()
            return False
        return True

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
        """Close a file that can no longer be written, without an end line and without an error."""
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


# -- reading -----------------------------------------------------------------------------------------------------


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, TraceLine | str]]:
    """The lines of a trace file, the TraceMeta first.

    Yields:
        The number of each line and what it says; if the file is cut off, a text that says where, as the last item.

    Raises:
        TraceError: Not a trace, a version that cannot be read, or a damaged line, with its number.
        OSError: The file cannot be read.
    """
    return decoded_lines(path, split_lines(path))


def decoded_lines(
    path: str | os.PathLike[str], lines: Iterable[tuple[bytes, bool]]
) -> Iterator[tuple[int, TraceLine | str]]:
    """The same as `read_lines` for the result of `split_lines`."""
    decoder = LineDecoder(path)
    ended = False
    for raw, complete in lines:
        number = decoder.number + 1
        if ended:
            raise TraceError(f"{path}, line {number}: nothing may follow the end line")
        if not complete and not _is_json(raw):
            if number == 1:
                raise TraceError(f"{path} is not a trace: it has no complete first line")
            yield number, f"{path} is cut off in line {number}"
            return
        for line in decoder.decode(raw):
            ended = isinstance(line, TraceEnd)
            yield number, line
    if decoder.number == 0:
        raise TraceError(f"{path} is not a trace: it is empty")
    if not ended:
        yield (
            decoder.number,
            f"{path} has no end line after line {decoder.number}: its writer was stopped or is still writing",
        )


def _is_json(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
    except _UNDECODABLE:
        return False
    return True


def split_lines(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file of JSON lines, plain or gzipped, without their newline, and whether the newline was there.

    Raises:
        TraceError: A line is too long, the file is too large, or its gzip stream is damaged.
        OSError: The file cannot be read.
    """
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
    """The file's bytes, decompressed; of a gzip stream that is cut off, everything that can be decompressed."""
    total = 0
    with open(os.fspath(path), "rb") as file:  # a number would be somebody else's open file
        gzipped = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        for block in _decompress(path, file) if gzipped else iter(lambda: file.read(_READ_BYTES), b""):
            total += len(block)
            if total > MAX_FILE_BYTES:
                raise TraceError(f"{path} holds more than {MAX_FILE_BYTES} bytes: record fewer steps, or split it")
            yield block


def _decompress(path: str | os.PathLike[str], file: BinaryIO) -> Iterator[bytes]:
    stream = Gunzip(path)
    while block := file.read(_READ_BYTES):
        yield from stream.pieces(block)
