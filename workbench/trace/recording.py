"""A file that is written while its trace grows."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from workbench.trace.file import TraceWriter
from workbench.trace.records import TraceLine, TraceMeta

log = logging.getLogger("workbench")


class Recording:
    """Writes line after line until its writer is closed, or until the file cannot be written any more.

    Args:
        path: A .jsonl or .jsonl.gz file; replaced if it exists.
        meta: The first line.
        lines: What there is already.

    Attributes:
        writer: Its ``close(reason)`` ends the recording.

    Raises:
        TraceError: The file's name has another ending.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], meta: TraceMeta, lines: Iterable[TraceLine]) -> None:
        self.writer = TraceWriter(path, meta)
        try:
            for line in lines:
                self.writer.write(line, flush=False)
        except BaseException:
            self.writer.abandon()
            raise

    def write(self, line: TraceLine) -> bool:
        """Write a line; False when the recording has ended. A full disk ends it with a warning, not the run."""
        try:
            self.writer.write(line)
        except ValueError:
            if self.writer.closed:  # by whoever asked for the recording, perhaps on another thread
                return False
            raise
        except OSError as problem:
            log.warning("recording to %s stopped: %s", self.writer.path, problem)
            self.writer.abandon()
            return False
        return True
