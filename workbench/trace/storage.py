"""Saving and loading a whole trace."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.trace.checks import TraceError
from workbench.trace.file import TraceWriter, is_gzip_path, read_lines
from workbench.trace.records import Keyframe, RequestInfo, StepRecord, TraceEnd, TraceLine

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

log = logging.getLogger("workbench")


def save(trace: Trace, path: str | os.PathLike[str], *, progress: bool) -> None:
    """Write a trace under a temporary name and rename it; see ``Trace.save``."""
    is_gzip_path(path)
    target = Path(path)
    writer = TraceWriter(target.with_name(f".{secrets.token_hex(4)}-{target.name}"), trace.meta)
    try:
        num_lines = len(trace.requests) + len(trace)
        for line in _with_progress(lines_of(trace), num_lines, f"save {target.name}", progress):
            writer.write(line, flush=False)
        writer.close(trace.end)
        os.replace(writer.path, target)
    except BaseException:
        writer.discard()
        raise


def lines_of(trace: Trace) -> Iterator[TraceLine]:
    """The lines between the meta line and the end line, each request before the step that first could see it."""
    steps = tuple(trace)  # before the requests, so that on a growing trace no step names one that is not written
    requests = iter(trace.arrivals())
    before, info = next(requests, (0, None))
    for index, record in enumerate(steps):
        while info is not None and before <= index:
            yield info
            before, info = next(requests, (0, None))
        if index == 0 and trace.keyframe is not None:
            yield trace.keyframe
        yield record
    if info is not None:
        yield info
    yield from (info for _, info in requests)


def load(kind: type[Trace], path: str | os.PathLike[str], *, progress: bool) -> Trace:
    """Read a trace and check every line; see ``Trace.load``."""
    trace = None
    lines = _with_progress(read_lines(path), None, f"load {Path(path).name}", progress)
    with _no_cyclic_gc():
        for number, line in enumerate(lines, start=1):
            try:
                if trace is None:
                    trace = kind(line)
                else:
                    _take(trace, line)
            except TraceError as problem:
                raise TraceError(f"{path}, line {number}: {problem}") from None
    for problem in trace.problems:
        log.warning("%s; %d steps were read", problem, len(trace))
    return trace


def _take(trace: Trace, line: TraceLine | str) -> None:
    """Add a line of a file; a text says that the file ends here, too early."""
    if isinstance(line, StepRecord):
        trace.append(line)
    elif isinstance(line, RequestInfo):
        trace.add_request(line)
    elif isinstance(line, Keyframe):
        trace.start_from(line)
    elif isinstance(line, TraceEnd):
        if line.num_steps != len(trace):
            raise TraceError(f"the end line counts {line.num_steps} steps, there are {len(trace)}")
        trace.end = line.reason
    else:
        trace.end = "cut"
        trace.problems.append(line)


def _with_progress(lines: Iterator[Any], total: int | None, title: str, progress: bool) -> Iterator[Any]:
    if not progress:
        return lines
    from tqdm.auto import tqdm

    return tqdm(lines, total=total, desc=title, unit="line")


@contextlib.contextmanager
def _no_cyclic_gc() -> Iterator[None]:
    """Records hold no cycles: looking for some while millions of them are made only takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
