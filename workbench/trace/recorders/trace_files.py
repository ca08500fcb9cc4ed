"""The files of a recording: each is a complete trace, and begins at the end of the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from workbench.trace.checks import block_size_of, groups_of, num_blocks_of
from workbench.trace.file import TraceWriter
from workbench.trace.lines import RequestInfo, Supplement, TraceMeta
from workbench.trace.readings.block_replay import BlockReplay
from workbench.trace.readings.latency import LatencyAccumulator
from workbench.trace.records import StepRecord

MIB = 2**20

COMPRESSLEVEL = 1
"""Records repeat themselves so much that the fastest level packs them as well as the default one, to a thirteenth."""


class TraceFiles:
    """Writes a trace to a sequence of files of limited size.

    Every file after the first begins with the live requests and with a keyframe, so that it can be read without the
    ones before it.

    Args:
        folder: Folder of the files; made if it does not exist.
        prefix: The names are ``{prefix}-00000.jsonl``, ``-00001`` and so on.
        meta: First line of every file.
        gzip: Write .jsonl.gz.
        max_file_bytes: Size in bytes at which the next file begins.
        max_files: Maximum number of files, of which the oldest are deleted; 0 keeps all.
        read_drift: Seconds that the wall clock has gained on the clock of the steps; asked after each step, for the
            last line of a file. None if nobody knows.

    Raises:
        OSError: A file cannot be written.
        TraceError: The configuration in ``meta`` has no sensible block_size or num_blocks.
    """

    def __init__(
        self,
        folder: str,
        prefix: str,
        meta: TraceMeta,
        *,
        gzip: bool = True,
        max_file_bytes: int = 256 * MIB,
        max_files: int = 8,
        read_drift: Callable[[], float] | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._prefix = prefix
        self._suffix = ".jsonl.gz" if gzip else ".jsonl"
        self._meta = meta
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._read_drift = read_drift
        groups = groups_of(meta)
        self._blocks = BlockReplay(block_size_of(meta), num_blocks_of(meta), None, progress=True, groups=groups)
        self._latencies = LatencyAccumulator()
        self._live: dict[str, RequestInfo] = {}
        self._in_file: set[str] = set()
        self._num_files = 0
        self._next_step = 0
        self._is_full = False
        self._kept: deque[Path] = deque()
        self._writer = self._open_next()

    def write(self, line: RequestInfo | StepRecord | Supplement, *, flush: bool = True) -> None:
        """Append a line; before a step or a request the next file may begin.

        Args:
            line: The record.
            flush: Hand it to the operating system at once.

        Raises:
            OSError: The file cannot be written.
        """
        if isinstance(line, Supplement):
            self._writer.write(line, flush=flush)
            return
        if self._is_full:
            self._is_full = False
            self.close()
            self._writer = self._open_next(self._next_step)
        if isinstance(line, RequestInfo):
            self._live[line.request_id] = line
            self._latencies.arrive(line)
            if line.request_id not in self._in_file:  # an engine may reuse the id of a request that has ended
                self._in_file.add(line.request_id)
                self._writer.write(line, flush=flush)
            return
        self._writer.write(line, flush=flush)
        self._follow(line)
        self._next_step = line.step + 1
        if self._read_drift is not None:
            self._writer.clock_drift = self._read_drift()
        self._is_full = flush and self._writer.path.stat().st_size >= self._max_file_bytes

    def close(self) -> None:
        """Write the end line and close.

        Raises:
            OSError: The file cannot be written.
        """
        self._writer.close()

    def _follow(self, record: StepRecord) -> None:
        """Update the state that a keyframe needs."""
        self._blocks.schedule(record)
        self._blocks.finish(record)
        self._latencies.add(record)
        for request_id in (*record.finished, *record.aborted):
            self._live.pop(request_id, None)

    def _open_next(self, step: int | None = None) -> TraceWriter:
        path = self._folder / f"{self._prefix}-{self._num_files:05d}{self._suffix}"
        self._num_files += 1
        self._kept.append(path)
        if self._max_files and len(self._kept) > self._max_files:
            self._kept.popleft().unlink(missing_ok=True)
        private = bool(self._meta.config.get("token_ids_recorded"))
        writer = TraceWriter(path, self._meta, compresslevel=COMPRESSLEVEL, private=private)
        self._in_file = set(self._live)
        for info in self._live.values():
            writer.write(info, flush=False)
        if step is not None:
            last_tokens = self._latencies.last_tokens(step)
            writer.write(msgspec.structs.replace(self._blocks.keyframe(step), last_tokens=last_tokens))
        return writer
