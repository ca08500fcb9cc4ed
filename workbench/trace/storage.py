"""Saving and loading a whole trace."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from workbench.base.progress import with_progress
from workbench.base.whole_file import replaced_when_complete
from workbench.trace.errors import TraceError
from workbench.trace.file import TraceWriter, decoded_lines, is_gzip_path, read_lines
from workbench.trace.file_lock import check_unlocked
from workbench.trace.lacking_blocks import LackingBlocks
from workbench.trace.line_codec import encode_line
from workbench.trace.lines import Keyframe, RequestInfo, Supplement, TraceEnd, TraceEndReason, TraceLine, TraceMeta
from workbench.trace.records import StepRecord

log = logging.getLogger("workbench")


class Stored(Protocol):
    """The parts of a Trace that are saved, and the methods by which it is loaded again."""

    @property
    def meta(self) -> TraceMeta: ...  # noqa: D102
    @property
    def requests(self) -> Mapping[str, RequestInfo]: ...  # noqa: D102

    end: TraceEndReason
    has_ended: bool
    clock_drift: float | msgspec.UnsetType
    problems: list[str]

    @property
    def is_followed(self) -> bool: ...  # noqa: D102
    @property
    def keyframe(self) -> Keyframe | None: ...  # noqa: D102
    @property
    def supplements(self) -> list[Supplement]: ...  # noqa: D102
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> StepRecord: ...
    def __iter__(self) -> Iterator[StepRecord]: ...
    def arrivals(self) -> list[tuple[int, RequestInfo]]: ...  # noqa: D102
    def append(self, record: StepRecord) -> None: ...  # noqa: D102
    def add_request(self, info: RequestInfo) -> None: ...  # noqa: D102
    def start_from(self, keyframe: Keyframe) -> None: ...  # noqa: D102
    def add_supplement(self, supplement: Supplement) -> None: ...  # noqa: D102


T = TypeVar("T", bound=Stored)


def save(trace: Stored, path: str | os.PathLike[str], *, progress: bool) -> None:
    """Write a trace under a temporary name and rename it; see ``Trace.save``."""
    is_gzip_path(path)
    check_unlocked(Path(path))
    with replaced_when_complete(path) as unfinished:
        writer = TraceWriter(unfinished, trace.meta)
        try:
            num_lines = len(trace.arrivals()) + len(trace) + len(trace.supplements)
            for line in with_progress(
                lines_of(trace), f"save {Path(path).name}", "line", shown=progress, total=num_lines
            ):
                writer.write(line, flush=False)
            writer.clock_drift = trace.clock_drift
            writer.close(_end_of(trace))
        finally:
            writer.abandon()


def _end_of(trace: Stored) -> TraceEndReason:
    """The end that a file of the trace states."""
    return trace.end or ("part" if trace.is_followed else "")


def lines_of(trace: Stored) -> Iterator[TraceLine]:
    """The lines between the meta line and the end line.

    Each request comes before the step that first could see it, each supplement directly after its step.
    """
    steps = tuple(trace)  # before the requests, so that on a growing trace no step names one that is not written
    supplements: defaultdict[int, list[Supplement]] = defaultdict(list)
    for supplement in trace.supplements:
        supplements[supplement.step].append(supplement)
    requests = iter(trace.arrivals())
    waiting = next(requests, None)
    for index, record in enumerate(steps):
        while waiting is not None and waiting[0] <= index:
            yield waiting[1]
            waiting = next(requests, None)
        if index == 0 and trace.keyframe is not None:
            yield trace.keyframe
        yield record
        yield from supplements[record.step]
    if waiting is not None:
        yield waiting[1]
    yield from (info for _, info in requests)


def load(kind: Callable[[TraceMeta], T], path: str | os.PathLike[str], *, progress: bool) -> T:
    """Read a trace and check every line; see ``Trace.load``."""
    lines = with_progress(read_lines(path), f"load {Path(path).name}", "line", shown=progress)
    trace = _trace_of(kind, lines, str(path))
    for text in trace.problems:
        log.warning("%s; %d steps were read", text, len(trace))
    return trace


def pickled(trace: Stored) -> bytes:
    """The lines of a trace's file, for ``pickle`` and ``copy``."""
    lines = [trace.meta, *lines_of(trace), TraceEnd(_end_of(trace), len(trace), trace.clock_drift)]
    return b"".join(map(encode_line, lines))


def unpickled(kind: Callable[[TraceMeta], T], content: bytes, problems: list[str]) -> T:
    """A separate trace from the result of `pickled`.

    Raises:
        TraceError: The content is damaged.
    """
    split = ((line, True) for line in content.splitlines())
    trace = _trace_of(kind, decoded_lines("a pickled trace", split), "a pickled trace")
    trace.problems, trace.has_ended = problems, False  # a copy in memory has no file
    return trace


def _trace_of(kind: Callable[[TraceMeta], T], lines: Iterable[tuple[int, TraceLine | str]], name: str) -> T:
    trace: T | None = None
    lacking: LackingBlocks | None = None
    with _no_cyclic_gc():
        for number, line in lines:
            try:
                if isinstance(line, TraceMeta):
                    trace = kind(line)
                    lacking = LackingBlocks(trace)
                elif trace is not None:
                    _take(trace, lacking.complete(line) if lacking and isinstance(line, StepRecord) else line)
            except TraceError as problem:
                raise TraceError(f"{name}, line {number}: {problem}") from None
    assert trace is not None, "the meta line comes first"
    return trace


def _take(trace: Stored, line: TraceLine | str) -> None:
    """Add a line of a file; a text says that the file ends here, too early."""
    if isinstance(line, StepRecord):
        trace.append(line)
    elif isinstance(line, RequestInfo):
        trace.add_request(line)
    elif isinstance(line, Keyframe):
        trace.start_from(line)
    elif isinstance(line, Supplement):
        trace.add_supplement(line)
    elif isinstance(line, TraceEnd):
        if line.num_steps != len(trace):
            raise TraceError(f"the end line counts {line.num_steps} steps, there are {len(trace)}")
        trace.end, trace.has_ended, trace.clock_drift = line.reason, True, line.clock_drift
    elif isinstance(line, str):
        trace.end = "cut"
        trace.problems.append(line)


@contextlib.contextmanager
def _no_cyclic_gc() -> Iterator[None]:
    """Pause the cyclic garbage collector: records hold no cycles, and searching millions of them takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
