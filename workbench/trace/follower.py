"""Reads a trace while another process writes it, so that views can be live."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from workbench.base.outside_files import open_bytes
from workbench.trace.errors import TraceError
from workbench.trace.file import MAX_LINE_BYTES, is_gzip_path
from workbench.trace.gunzip import Gunzip
from workbench.trace.lacking_blocks import LackingBlocks
from workbench.trace.line_codec import LineDecoder
from workbench.trace.lines import Keyframe, RequestInfo, Supplement, TraceEnd, TraceLine, TraceMeta
from workbench.trace.records import StepRecord
from workbench.trace.trace import Trace

log = logging.getLogger("workbench")

POLL_SECONDS = 0.2
"""Time between two looks at the file."""

_READ_BYTES = 2**20


class TraceFollower:
    """A trace that grows with its file.

    A recording that continues in another file (``name-00001.jsonl`` after ``name-00000.jsonl``) is followed there.

    Args:
        path: A trace file that is being written, or a folder: the file in it that was written last.

    Attributes:
        trace: The trace so far. It may be read and shown while it grows.
        path: The file that is being read.
        problem: Why nothing more is read; "" as long as the file can be read.

    Raises:
        TraceError: Not a trace, or a folder without one.
        OSError: The file cannot be read.

    Example:
        >>> from workbench import simulate
        >>> simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]}).save("run.jsonl")
        >>> follower = TraceFollower("run.jsonl")
        >>> follower.trace
        Trace(simulation: 2 steps, 1 request, 21 tokens scheduled, done)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = trace_files_in(Path(path))[-1] if Path(path).is_dir() else Path(path)
        self.problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._open(self.path)
        self.trace: Trace = self._first_line()
        self._lacking = LackingBlocks(self.trace)
        self.poll()

    def poll(self) -> int:
        """Read what was written since the last time.

        Returns:
            Steps that are new.

        Raises:
            TraceError: The file contradicts itself; what was read before stays.
            OSError: The file cannot be read.
        """
        before = len(self.trace)
        while True:
            for line in self._new_lines():
                self._take(line)
            if not (self._ended and self._open_next()):
                return len(self.trace) - before

    @property
    def silent(self) -> float | None:
        """Seconds since the file was last written; None if it has an end line."""
        return None if self._ended else max(0.0, time.time() - self.path.stat().st_mtime)

    def start(self) -> None:
        """Keep reading on a background thread, until ``stop`` or until something is wrong with the file."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="workbench-follower", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and close the file."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._file.close()

    def __enter__(self) -> TraceFollower:
        self.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.poll()
            except (TraceError, OSError) as problem:
                self.problem = str(problem)
                log.warning("stopped following %s: %s", self.path, problem)
                return

    # -- lines ------------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        self._file: BinaryIO = open_bytes(path)
        self._stream = Gunzip(path) if is_gzip_path(path) else None
        self._pieces = self._read_pieces()
        self._complete: deque[bytes] = deque()
        self.path = path
        self._rest = b""
        self._decoder = LineDecoder(path)
        self._ended = False

    def _open_next(self) -> bool:
        """Continue in the next file of the recording, if it is there."""
        following = _next_name(self.path)
        if following is None or not following.exists():
            return False
        self._file.close()
        self._open(following)
        self.trace.has_ended = False
        return True

    def _first_line(self) -> Trace:
        line = next(self._new_lines(), None)
        if isinstance(line, TraceMeta):
            return Trace(line)
        self._file.close()
        raise TraceError(f"{self.path} is not a trace: it has no complete first line")

    def _new_lines(self) -> Iterator[TraceLine]:
        """The complete lines that were not read yet; what a caller does not take is kept for the next one."""
        while True:
            while self._complete:
                yield self._decoder.decode(self._complete.popleft())
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces = self._read_pieces()
                return
            *complete, self._rest = (self._rest + piece).split(b"\n")
            self._complete.extend(complete)
            if len(self._rest) > MAX_LINE_BYTES:
                raise TraceError(f"{self.path} has a line of more than {MAX_LINE_BYTES} bytes: it is not a trace")

    def _read_pieces(self) -> Iterator[bytes]:
        """The content of what was appended to the file."""
        while block := self._file.read(_READ_BYTES):
            if self._stream is None:
                yield block
            else:
                yield from self._stream.pieces(block)

    def _take(self, line: TraceLine) -> None:
        if isinstance(line, TraceEnd):
            # It counts the steps of this file; more may follow in another.
            self._ended = self.trace.has_ended = True
            self.trace.end, self.trace.clock_drift = line.reason, line.clock_drift
        elif isinstance(line, StepRecord):
            self.trace.append(self._lacking.complete(line))
        elif isinstance(line, Supplement):
            self.trace.add_supplement(line)
        elif isinstance(line, RequestInfo):
            if line.request_id not in self.trace.requests:
                self.trace.add_request(line)
        elif isinstance(line, Keyframe) and not len(self.trace):
            self.trace.start_from(line)  # that of a file after the first says nothing new


def trace_files_in(folder: Path) -> list[Path]:
    """The trace files of a folder, the one that was written last at the end.

    Raises:
        TraceError: There is none.
    """
    files = [*folder.glob("[!.]*.jsonl"), *folder.glob("[!.]*.jsonl.gz")]  # a name with a dot is being saved
    if not files:
        raise TraceError(f"{folder} holds no trace file (.jsonl, .jsonl.gz)")
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _next_name(path: Path) -> Path | None:
    match = re.fullmatch(r"(.*-)(\d{5})(\.jsonl(?:\.gz)?)", path.name)
    return path.with_name(f"{match[1]}{int(match[2]) + 1:05d}{match[3]}") if match else None
