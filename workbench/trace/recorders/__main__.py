"""The writer's process: reads messages from standard input until it ends, and writes them as a trace.

If the recording fails, it prints one line to standard output: the reason. The engine's process reads it when it finds
the pipe closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

import msgspec

from workbench.trace.lines import TraceMeta
from workbench.trace.recorders.assembler import Assembler
from workbench.trace.recorders.block_hashes import BlockHasher
from workbench.trace.recorders.host_watch import HostWatch
from workbench.trace.recorders.messages import Message, Setup, unpack
from workbench.trace.recorders.run_key import run_key
from workbench.trace.recorders.trace_files import MIB, TraceFiles

READ_BYTES = 2**20

GATHER_SECONDS = 0.2
"""Time for messages to gather in the pipe while it is far from full; longer than the engine's interval between sends.
The engine's process would have to wake a writer that waits in a read, but not one that sleeps."""

GATHER_BYTES = 2**15
"""Maximum size of a read from a pipe that is far from full: half of the smallest pipe of any system."""

FLUSH_SECONDS = 0.5
"""Maximum time before a record is in the file while messages keep coming; the last one is written at once."""

NICENESS = 10
"""Added to the writer's niceness, so that it yields to the engine when all processors are busy."""


class Recording:
    """The files of one recording, and the assembler that makes their lines.

    Args:
        setup: The first message.
        key: The key of the run for its hashes; None to leave them out.
    """

    def __init__(self, setup: Setup, key: bytes | None) -> None:
        settings = setup.settings
        meta = TraceMeta(
            source=setup.source,
            config=setup.config,
            model=setup.model,
            versions=setup.versions,
            created=setup.created,
        )
        hasher = None
        if key is not None:
            hasher = BlockHasher(key, meta, setup.num_hash_lookahead_tokens)
            meta = msgspec.structs.replace(meta, prefix_hashes=hasher.described)
        self._files = TraceFiles(
            settings.folder,
            setup.file_prefix,
            meta,
            gzip=settings.gzip,
            max_file_bytes=settings.max_file_mb * MIB,
            max_files=settings.max_files,
            read_drift=lambda: time.time() - setup.created - (time.perf_counter() - setup.start),
        )
        self._assembler = Assembler(
            setup.config,
            as_vllm=not meta.is_of_sglang,
            kv_cache_group=setup.kv_cache_group,
            samples=setup.samples,
            max_waiting=settings.max_waiting,
            start=setup.start,
            watches_pool=setup.watches_pool,
            hasher=hasher,
            host=HostWatch(setup.pid, setup.thread),
        )
        self._flushed_at = 0.0

    def take(self, message: Message, *, more_to_come: bool) -> None:
        """Write the records that a message completes."""
        for line in self._assembler.take(message):
            now = time.monotonic()
            flush = not more_to_come or now - self._flushed_at > FLUSH_SECONDS
            self._files.write(line, flush=flush)
            if flush:
                self._flushed_at = now

    def close(self) -> None:
        """End the last file."""
        self._files.close()


def read_messages(descriptor: int) -> Iterator[tuple[Message, bool]]:
    """Messages until the other end closes, each with True if another message has already arrived."""
    buffer = bytearray()
    while data := os.read(descriptor, READ_BYTES):
        buffer += data
        messages = list(unpack(buffer))
        for index, message in enumerate(messages):
            is_last = index == len(messages) - 1
            yield message, not is_last or bool(buffer) or bool(select.select([descriptor], [], [], 0)[0])
        if len(data) <= GATHER_BYTES:
            time.sleep(GATHER_SECONDS)


def main() -> int:
    """Record until standard input ends.

    Returns:
        Exit status: 0, or 1 if the recording failed.
    """
    # The recording ends when the engine closes the pipe; a signal to the whole process group must not cut the file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    recording = None
    try:
        with contextlib.ExitStack() as keys:
            for message, more_to_come in read_messages(sys.stdin.fileno()):
                if isinstance(message, Setup):
                    key = keys.enter_context(run_key(message.run)) if message.settings.hashes else None
                    recording = Recording(message, key)
                elif recording is not None:
                    recording.take(message, more_to_come=more_to_come)
            if recording is not None:
                recording.close()
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
