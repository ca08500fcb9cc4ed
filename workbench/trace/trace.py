"""The trace of a run: every step record in order, with what is needed to read them."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

import msgspec

from workbench.trace import display, storage
from workbench.trace.checks import BlockTableReplay, TraceError, block_size_of, num_blocks_of
from workbench.trace.recording import Recording
from workbench.trace.records import (
    Event,
    Keyframe,
    RequestInfo,
    StepRecord,
    TraceEndReason,
    TraceLine,
    TraceMeta,
)
from workbench.trace.requests import Requests

if TYPE_CHECKING:
    import pandas as pd

    from workbench.trace.file import TraceWriter
    from workbench.trace.metrics import TraceMetrics
    from workbench.trace.pool_state import Moment, PoolState


class Trace:
    """Every step of a run, in order: a sequence of StepRecord with the requests and the configuration beside it.

    One thread may append while others read: what was appended never changes. ``trace[k]``, negative indices and
    ``trace[j:k]`` work as on a list; a slice shares its records with the trace it was taken from.

    Args:
        meta: Where the trace comes from.

    Attributes:
        meta: Where the trace comes from and under which configuration.
        requests: RequestInfo by request id, in order of arrival.
        block_size: Tokens per KV block.
        num_blocks: KV blocks of the pool, block 0 included; None where the configuration does not say.
        end: "" while more steps may come, else "done", "stuck", "max_steps" or "cut".
        problems: What was wrong with the file the trace was loaded from, in words; empty for a whole one.

    Raises:
        TraceError: The configuration's block_size or num_blocks is not a sensible number.

    Example:
        >>> trace = Trace(TraceMeta(source="simulation", config={"block_size": 16}))
        >>> trace.add_request(RequestInfo("r0", num_prompt_tokens=3))
        >>> trace.append(StepRecord(0, arrived=("r0",), waiting=("r0",)))
        >>> len(trace), trace[-1].waiting
        (1, ('r0',))
    """

    def __init__(self, meta: TraceMeta) -> None:
        self.meta = meta
        self.block_size = block_size_of(meta)
        self.num_blocks = num_blocks_of(meta)
        self.end: TraceEndReason = ""
        self.problems: list[str] = []
        self.requests = Requests()
        self._keyframe: Keyframe | None = None
        self._steps: list[StepRecord] = []
        self._replay = BlockTableReplay(meta)
        self._recording: Recording | None = None
        self._writing = threading.Lock()  # between whoever appends and a recording that catches up with the trace
        self._whole: Trace = self
        self._offset = 0
        self._lazy: dict[str, Any] = {}
        self._lazy_lock = threading.RLock()

    # -- writing ------------------------------------------------------------------------------------------------

    def add_request(self, info: RequestInfo) -> None:
        """Add what a request asked for; it comes before the first step that names the request.

        Raises:
            TraceError: The request id is in the trace already, or the trace is a slice.
        """
        self._check_writable()
        with self._writing:
            self._replay.add_request(info)
            self.requests.add(info, len(self._steps))
            self._record(info)

    def start_from(self, keyframe: Keyframe) -> None:
        """Begin in the middle of a run: takes the block tables and the free queue from the keyframe.

        Raises:
            TraceError: There are steps already, or the keyframe names an unknown request or a block twice.
        """
        self._check_writable()
        with self._writing:
            self._replay.start_from(keyframe)
            self._keyframe = keyframe
            self._record(keyframe)

    def append(self, record: StepRecord) -> None:
        """Add the next step. A record that comes without block tables is checked and given them.

        Raises:
            TraceError: The record is not the next step, or does not follow from those before it.
        """
        self._check_writable()
        with self._writing:
            if not record.has_block_tables:
                self._replay.follow(record)
            elif self._steps and record.step != self._steps[-1].step + 1:
                raise TraceError(f"step {record.step} follows step {self._steps[-1].step}: steps must be contiguous")
            self._steps.append(record)
            self._record(record)

    def record_to(self, path: str | os.PathLike[str]) -> TraceWriter:
        """Write the trace to a file while it grows: what there is now, then every step as it is appended.

        A file that cannot be written any more (a full disk) ends the recording with a warning, not the run. There is
        one recording at a time: a second call goes on in the new file, and leaves the first one without an end line
        unless its writer was closed before.

        Args:
            path: A .jsonl or .jsonl.gz file; replaced if it exists.

        Returns:
            The writer; its ``close(reason)`` ends the recording.
        """
        self._check_writable()
        with self._writing:
            self._recording = Recording(path, self.meta, storage.lines_of(self))
            return self._recording.writer

    def _record(self, line: TraceLine) -> None:
        if self._recording is not None and not self._recording.write(line):
            self._recording = None

    def _check_writable(self) -> None:
        if self._whole is not self:
            raise TraceError("a slice of a trace cannot be added to: add to the trace it was taken from")

    def continued_from(self, keyframe: Keyframe) -> Trace:
        """The run from a step on as a trace of its own, which is appended to from now on in place of this one.

        So a run that goes on for long forgets its beginning: neither the steps before nor the requests that had
        ended by then are part of the new trace. This one stays as it is; a recording goes on with the new one.

        Args:
            keyframe: The scheduler's memory before one of the steps.

        Raises:
            TraceError: The trace is a slice or does not hold the keyframe's step.
        """
        self._check_writable()
        with self._writing:
            start = keyframe.step - self[0].step if len(self) else 0
            if not 0 <= start < len(self):
                raise TraceError(f"a trace cannot go on from step {keyframe.step}: it has {self.steps_in_words}")
            first = self[start]
            unfinished = {*first.running, *first.waiting, *first.aborted}
            trace = Trace(self.meta)
            for before, info in self.arrivals():
                if before > start or info.request_id in unfinished:
                    trace._replay.add_request(info)
                    trace.requests.add(info, max(0, before - start))
            trace.start_from(keyframe)
            trace._steps = self._steps[start:]
            trace.problems = list(self.problems)
            self._recording, trace._recording = None, self._recording
            return trace

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Write the trace to a file, whole or not at all.

        Args:
            path: Ends in .jsonl or .jsonl.gz; a file that is there is replaced when the new one is complete.
            progress: Show a progress bar.

        Raises:
            TraceError: The path has another ending.
            OSError: The file cannot be written; what was there before is untouched.
        """
        storage.save(self, path, progress=progress)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, progress: bool = False) -> Trace:
        """Read a trace from a file. Every record is checked, so that what is drawn from it can trust it.

        A file that was cut off is read as far as it goes: ``end`` is "cut", ``problems`` says where, and a warning
        is logged.

        Args:
            path: A file that ``save`` or a TraceWriter wrote, gzipped or not.
            progress: Show a progress bar.

        Raises:
            TraceError: Not a trace, another schema version, or contents that contradict themselves, with the line.
            OSError: The file cannot be read.
        """
        return storage.load(cls, path, progress=progress)

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The engine configuration by field name."""
        return self.meta.config

    @property
    def keyframe(self) -> Keyframe | None:
        """The scheduler's memory before the first step, when the run began before the trace; else None."""
        if self._offset == 0 or not self._steps:
            return self._whole._keyframe
        with self._lazy_lock:
            if "keyframe" not in self._lazy:
                self._lazy["keyframe"] = self._pool_history().keyframe_before(self._offset)
            return self._lazy["keyframe"]

    def arrivals(self) -> list[tuple[int, RequestInfo]]:
        """Each request, in order, with the number of steps in the trace before it was added."""
        return self.requests.arrivals()

    @property
    def events(self) -> list[Event]:
        """Everything that happened to requests, with reasons, in order."""
        return [event for record in self for event in record.events]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Trace: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Trace:
        if not isinstance(index, slice):
            try:
                return self._steps[index]
            except IndexError:
                raise IndexError(f"step {index} of a trace of {len(self)} steps") from None
        start, stop, stride = index.indices(len(self))
        if stride != 1:
            raise ValueError(f"a slice of a trace takes every step: stride must be 1, got {stride}")
        return self._slice(start, max(start, stop))

    def _slice(self, start: int, stop: int) -> Trace:
        part = Trace(self.meta)
        part._steps = self._steps[start:stop]
        part._whole, part._offset = self._whole, self._offset + start
        part.problems = list(self.problems)
        for before, info in self.arrivals():
            if before < stop or stop == len(self):
                part.requests.add(info, max(0, before - start))
        if stop == len(self):
            part.end = self.end
        return part

    @property
    def steps_in_words(self) -> str:
        """Which steps of the run are here."""
        if not len(self) or self[0].step == 0:
            return f"{len(self)} steps"
        return f"steps {self[0].step} to {self[-1].step}"

    def metrics(self) -> TraceMetrics:
        """Latencies per request, use per step and a summary; see workbench.trace.metrics for every definition.

        On a growing trace only the steps since the last call are read.
        """
        from workbench.trace.metrics_collector import MetricsCollector

        with self._lazy_lock:
            if "metrics" not in self._lazy:
                self._lazy["metrics"] = MetricsCollector(self)
            return self._lazy["metrics"].collect()

    def pool_state(self, index: int, moment: Moment = "scheduled") -> PoolState:
        """The state of every KV block at a step.

        Args:
            index: Index into the trace; negative counts from the end.
            moment: "scheduled" for the state after scheduling, in which the step's tables hold; "end" for the
                state after finished requests gave their blocks back.

        Raises:
            IndexError: There is no such step.
        """
        position = range(len(self))[index]
        return self._pool_history().state(self._offset + position, moment)

    def _pool_history(self) -> Any:
        from workbench.trace.pool_state import PoolHistory

        whole = self._whole
        with whole._lazy_lock:
            if "pool" not in whole._lazy:
                whole._lazy["pool"] = PoolHistory(whole)
            return whole._lazy["pool"]

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain dicts, lists and numbers."""
        return {
            "meta": msgspec.to_builtins(self.meta),
            "requests": [msgspec.to_builtins(info) for info in self.requests.values()],
            "steps": [msgspec.to_builtins(record) for record in self],
            "end": self.end,
        }

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with one row per chunk: its step, request, token range, arm, blocks and sampled token.

        Raises:
            ImportError: pandas is not installed.
        """
        from workbench.trace.export import to_pandas

        return to_pandas(self)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON) that opens in Perfetto and in chrome://tracing."""
        from workbench.trace.export import to_chrome_trace

        to_chrome_trace(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows the trace, step by step, in one file that needs no network.

        Raises:
            TraceError: This installation comes without the views.
        """
        views = _views("export_html")
        views.to_html(self, path)

    def watch(self, **options: Any) -> Any:
        """A view of the trace for a notebook cell; each call makes a new one.

        Args:
            **options: ``other`` (a trace to compare with), ``panels`` and ``theme`` of `workbench.viz.widget.watch`.
        """
        return _views("").watch(self, **options)

    def __repr__(self) -> str:
        ended = {"": "", "done": ", done"}.get(self.end, f", ended: {self.end}")
        tokens = sum(record.num_tokens for record in tuple(self._steps))
        return (
            f"Trace({self.meta.source}: {self.steps_in_words}, {len(self.requests)} requests, "
            f"{tokens} tokens scheduled{ended})"
        )

    def _repr_html_(self) -> str | None:
        return display.html("trace", self)


def _views(module: str) -> Any:
    """A module of the views, which know the trace while the trace does not know them."""
    try:
        return importlib.import_module(f"workbench.viz.{module}".rstrip("."))
    except ModuleNotFoundError as problem:
        raise TraceError(f"the views are not installed ({problem}): reinstall inference-workbench") from None
