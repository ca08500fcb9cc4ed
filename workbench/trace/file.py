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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from workbench.base.outside_files import open_bytes
from workbench.trace.errors import TraceError
from workbench.trace.file_lock import open_locked
from workbench.trace.gunzip import Gunzip
from workbench.trace.line_codec import LineDecoder, encode_line, is_json
from workbench.trace.lines import TraceEnd, TraceEndReason, TraceLine, TraceMeta

log = logging.getLogger("workbench")

MAX_LINE_BYTES = 2**26
"""Longest line that is read (64 MiB): a prompt of some ten million tokens."""

MAX_FILE_BYTES = 2**33
"""Maximum number of bytes that are read from a file, after decompression (8 GiB)."""

_READ_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"


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
        path: A .jsonl or .jsonl.gz file; replaced if it exists, unless it is being recorded.
        meta: The first line.
        compresslevel: Of a .jsonl.gz file, from 1 (fastest) to 9.
        private: Only the user may read the file.

    Attributes:
        clock_drift: Goes to the end line, see `TraceEnd`.

    Raises:
        TraceError: The file's name has another ending, or the file is being recorded by another writer.
        OSError: The file cannot be written.

    Example:
        >>> from workbench import StepRecord, TraceMeta
        >>> with TraceWriter("run.jsonl", TraceMeta(source="simulation")) as writer:
        ...     writer.write(StepRecord(0, arrived=("r0",), waiting=("r0",)))
        >>> writer.num_steps
        1
    """

    def __init__(
        self, path: str | os.PathLike[str], meta: TraceMeta, *, compresslevel: int = 6, private: bool = False
    ) -> None:
        gzipped = is_gzip_path(path)
        self.path = Path(path)
        self.num_steps = 0
        self.clock_drift: float | msgspec.UnsetType = msgspec.UNSET
        self._lock = threading.RLock()  # between the threads that record and the one that ends the recording
        self._raw = open_locked(self.path, private=private)
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

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether it writes the file of this path."""
        if self.closed:
            return False
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._raw.fileno()))
        except FileNotFoundError:
            return False

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
                self.write(TraceEnd(reason, self.num_steps, self.clock_drift), flush=False)
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
        if not complete and not is_json(raw):
            if number == 1:
                raise TraceError(f"{path} is not a trace: it has no complete first line")
            yield number, f"{path} is cut off in line {number}"
            return
        line = decoder.decode(raw)
        ended = isinstance(line, TraceEnd)
        yield number, line
    if decoder.number == 0:
        raise TraceError(f"{path} is not a trace: it is empty")
    if not ended:
        yield (
            decoder.number,
            f"{path} has no end line after line {decoder.number}: its writer was stopped or is still writing",
        )


def split_lines(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file of JSON lines, plain or gzipped, without their newline, and whether the newline was there.

    Raises:
        TraceError: A line is too long, the file is too large, or its gzip stream is damaged.
        OSError: The file cannot be read.
    """
    rest = b""
    for block in read_blocks(path):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
            raise TraceError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes: it is not a trace")
        for line in lines:
            yield line, True
    if rest:
        yield rest, False


def read_blocks(path: str | os.PathLike[str], *, whole: bool = False) -> Iterator[bytes]:
    """The file's bytes, decompressed; of a gzip stream that is cut off, everything that can be decompressed.

    Raises:
        TraceError: The file is too large, its gzip stream is damaged, or ``whole`` is asked for and it is cut off.
        OSError: The file cannot be read.
    """
    total = 0
    with open_bytes(path) as file:
        gzipped = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        for block in _decompress(path, file, whole) if gzipped else iter(lambda: file.read(_READ_BYTES), b""):
            total += len(block)
            if total > MAX_FILE_BYTES:
                raise TraceError(f"{path} holds more than {MAX_FILE_BYTES} bytes: record fewer steps, or split it")
            yield block


def _decompress(path: str | os.PathLike[str], file: BinaryIO, whole: bool) -> Iterator[bytes]:
    stream = Gunzip(path)
    while block := file.read(_READ_BYTES):
        yield from stream.pieces(block)
    if whole and stream.is_cut_off:
        raise TraceError(f"{path} is a gzip file that is cut off: fetch it once more, or decompress what is there")
