"""The trace of a run: every step record in order, with the requests and the configuration."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from typing import Any, Self, TypeVar, overload

import msgspec

from workbench.base.on_demand import find, picture, with_attached_methods
from workbench.base.text import counted, printable, shown
from workbench.trace import storage
from workbench.trace.checks import TraceChecker, block_size_of, groups_of, num_blocks_of
from workbench.trace.errors import TraceError
from workbench.trace.events import Events
from workbench.trace.file import TraceWriter
from workbench.trace.find_request import ByRequest, listed
from workbench.trace.lines import (
    DISTURBED,
    Keyframe,
    RequestInfo,
    Supplement,
    TraceEndReason,
    TraceLine,
    TraceMeta,
)
from workbench.trace.records import StepRecord

T = TypeVar("T")


@with_attached_methods
class Trace:
    """Every step of a run, in order: a sequence of StepRecord, with the requests and the configuration.

    One thread may append while others read: what was appended never changes. ``trace[k]``, negative indices and
    ``trace[j:k]`` work as on a list; a slice shares its records with the trace it was taken from.

    Args:
        meta: The trace's source and configuration.

    Attributes:
        meta: The trace's source and configuration.
        requests: RequestInfo by request id, in order of arrival.
        block_size: Tokens per KV block.
        kv_cache_groups: Its KV cache groups; one of full attention unless the configuration says otherwise.
        num_blocks: KV blocks of the pool, block 0 included; None if the configuration does not say.
        offset: Number of steps of the whole trace before the first of a slice.
        end: "" while more steps may come, else "done", "stuck", "max_steps", "part" or "cut".
        clock_drift: Seconds that the wall clock gained on the clock of the steps up to the last one; unset if it is not
            known.
        has_ended: Its file has an end line: nothing more is written to it, whatever became of the requests.
        problems: Descriptions of what is wrong with the file that the trace was loaded from; empty for a whole file.

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
        self.kv_cache_groups = groups_of(meta)
        self.num_blocks = num_blocks_of(meta)
        self.end: TraceEndReason = ""
        self.has_ended = False
        self.clock_drift: float | msgspec.UnsetType = msgspec.UNSET
        self.problems: list[str] = []
        self.requests = Requests()
        self._keyframe: Keyframe | None = None
        self._steps: list[StepRecord] = []
        self._supplements: dict[tuple[int, str], Supplement] = {}
        self._checker = TraceChecker(meta, self.requests.ids)
        self._run = _Run(self)
        self._slice_of: Trace | None = None
        self.offset = 0
        self._lazy: dict[str, Any] = {}
        self._lazy_lock = threading.RLock()

    # -- writing ------------------------------------------------------------------------------------------------

    def add_request(self, info: RequestInfo) -> None:
        """Add what a request asked for; it comes before the first step that names the request.

        Raises:
            TraceError: The request id is in the trace already, the prompt is not as long as the request says, or the
                trace is a slice or continued by another one.
        """
        run = self._run
        with run.lock:
            if run.newest is not self:
                self._check_writable()
            if info.request_id in self.requests:
                raise TraceError(f"request {shown(info.request_id)} arrives twice")
            if info.prompt_token_ids and len(info.prompt_token_ids) != info.num_prompt_tokens:
                raise TraceError(
                    f"request {shown(info.request_id)} has num_prompt_tokens {info.num_prompt_tokens} "
                    f"and {len(info.prompt_token_ids)} prompt_token_ids"
                )
            self.requests.add(info, len(self._steps))
            run.record(info)

    def start_from(self, keyframe: Keyframe) -> None:
        """Begin in the middle of a run: takes the block tables and the free queue from the keyframe.

        Raises:
            TraceError: There are steps already, the keyframe names an unknown request or a block twice, or the trace
                is a slice or continued by another one.
        """
        with self._run.lock:
            self._check_writable()
            self._checker.start_from(keyframe)
            self._keyframe = keyframe
            self._run.record(keyframe)

    def append(self, record: StepRecord) -> None:
        """Add the next step. A record that comes without block tables is checked and given them.

        Raises:
            TraceError: The record is not the next step or does not follow from those before it, or the trace is a
                slice or continued by another one.
        """
        run, steps = self._run, self._steps
        run.lock.acquire()  # in every step; a with statement takes twice the time
        try:
            if run.newest is not self:
                self._check_writable()
            if not record.has_block_tables:
                self._checker.check(record)
            elif steps and record.step != steps[-1].step + 1:
                raise TraceError(f"step {record.step} follows step {steps[-1].step}: steps must be contiguous")
            steps.append(record)
            if run.writer is not None:
                run.record(record)
        finally:
            run.lock.release()

    def add_supplement(self, supplement: Supplement) -> None:
        """Add facts that became known about a step after its record was made; the record stays as it is.

        May be called from any thread. If the run continues in another trace (``continued_from``), that one gets the
        supplement. If the step is no longer in that trace, only the recording gets it.

        Raises:
            TraceError: There is no such step yet, it has a supplement of this name already, or the trace is a slice.
        """
        self._check_whole()
        run = self._run
        with run.lock:
            if run.newest._check_supplement(supplement):
                run.newest._supplements[supplement.step, supplement.name] = supplement
            run.record(supplement)

    def mark_disturbed(self, steps: Iterable[int], by: str = "a loading page") -> None:
        """Mark steps during which this process was busy with something else: fits of step durations leave them out.

        The mark is the step's supplement "disturbed", so a file has it too. A step that is not in the trace, or is
        marked already, is passed over. May be called from any thread.

        Args:
            steps: Numbers of steps.
            by: The other work.

        Raises:
            TraceError: The trace is a slice.
        """
        self._check_whole()
        run = self._run
        with run.lock:
            newest = run.newest
            first = newest._steps[0].step if newest._steps else 0
            for step in steps:
                if first <= step < first + len(newest._steps) and (step, DISTURBED) not in newest._supplements:
                    mark = Supplement(step, DISTURBED, {"by": by})
                    newest._supplements[step, DISTURBED] = mark
                    run.record(mark)

    def _check_supplement(self, supplement: Supplement) -> bool:
        """Whether the step of a supplement is in the trace; False if the trace begins after it."""
        first = self._steps[0].step if self._steps else self._keyframe.step if self._keyframe is not None else 0
        if supplement.step >= first + len(self._steps):
            raise TraceError(
                f"supplement {supplement.name!r} names step {supplement.step}, the trace has {self.steps_in_words}"
            )
        if (supplement.step, supplement.name) in self._supplements:
            raise TraceError(f"step {supplement.step} has a supplement {supplement.name!r} already")
        return supplement.step >= first

    def record_to(self, path: str | os.PathLike[str]) -> TraceWriter:
        """Write the trace to a file while it grows: its present contents, then every line as it is added.

        A file that can no longer be written (a full disk) ends the recording with a warning, not the run. There is one
        recording of a run at a time: a second call continues in the new file, and leaves the first one without an end
        line unless its writer was closed before. If the run continues in another trace, that one is recorded.

        Args:
            path: A .jsonl or .jsonl.gz file; replaced if it exists, unless another run records to it.

        Returns:
            The writer; its ``close(reason)`` ends the recording.

        Raises:
            TraceError: The file's name has another ending, another run records to it, or the trace is a slice.
            OSError: The file cannot be written.
        """
        self._check_whole()
        with self._run.lock:
            if (before := self._run.writer) is not None and before.is_at(path):
                before.abandon()  # all that it has is written again
                self._run.writer = None
            writer = TraceWriter(path, self.meta)
            try:
                for line in storage.lines_of(self._run.newest):
                    writer.write(line, flush=False)
            except BaseException:
                writer.abandon()
                raise
            self._run.writer = writer
            return writer

    @property
    def whole(self) -> Trace:
        """The trace that a slice was taken from; the trace itself if it is none."""
        # A trace without an attribute for itself ends with its last reader, before Python looks for cycles.
        return self if self._slice_of is None else self._slice_of

    @property
    def is_followed(self) -> bool:
        """Whether it is a slice behind whose last step the run has more steps."""
        return self.offset + len(self) < len(self.whole)

    @property
    def is_part(self) -> bool:
        """Whether the run has steps before the first one of the trace, or behind its last one."""
        return self.is_followed or self.end == "part" or (len(self) > 0 and self[0].step > 0)

    def _check_whole(self) -> None:
        if self._slice_of is not None:
            raise TraceError("a slice of a trace cannot be added to: add to the trace it was taken from")

    def _check_writable(self) -> None:
        self._check_whole()
        if self._run.newest is not self:
            raise TraceError("this trace is continued by another one: add to that one")

    def continued_from(self, keyframe: Keyframe) -> Trace:
        """The run from a step on as another trace, which is appended to from now on in place of this one.

        So a long run forgets its beginning: neither the steps before nor the requests that had ended by then are part
        of the new trace. This one stays as it is; a recording continues with the new one.

        Args:
            keyframe: The scheduler's memory before one of the steps.

        Raises:
            TraceError: The trace is a slice, does not hold the keyframe's step, or is continued already.
        """
        with self._run.lock:
            self._check_writable()
            start = keyframe.step - self[0].step if len(self) else 0
            if not 0 <= start < len(self):
                raise TraceError(f"a trace cannot continue from step {keyframe.step}: it has {self.steps_in_words}")
            first = self[start]
            unfinished = {*first.running, *first.waiting, *first.aborted}
            trace = Trace(self.meta)
            for before, info in self.arrivals():
                if before >= start or info.request_id in unfinished:  # an asynchronous step may not know the newest yet
                    trace.requests.add(info, max(0, before - start))
            trace.start_from(keyframe)
            trace._steps = self._steps[start:]
            trace._supplements = {key: said for key, said in self._supplements.items() if said.step >= first.step}
            trace.problems = list(self.problems)
            trace._run, self._run.newest = self._run, trace
            return trace

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Write the trace to a file, whole or not at all.

        Args:
            path: Ends in .jsonl or .jsonl.gz; a file that is there is replaced when the new one is complete.
            progress: Show a progress bar.

        Raises:
            TraceError: The path has another ending, or a run records to it.
            OSError: The file cannot be written; what was there before is untouched.
        """
        storage.save(self, path, progress=progress)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, progress: bool = False) -> Self:
        """Read a trace from a file. Every record is checked, so that what is drawn from it can trust it.

        A file that was cut off is read as far as it goes: ``end`` is "cut", ``problems`` says where, and a warning
        is logged.

        Args:
            path: A file that ``save`` or a TraceWriter wrote, gzipped or not.
            progress: Show a progress bar.

        Raises:
            TraceError: Not a trace, a version that cannot be read, or contents that contradict themselves, with the
                line.
            OSError: The file cannot be read.
        """
        return storage.load(cls, path, progress=progress)

    def __reduce__(self) -> tuple[Callable[..., Trace], tuple[Any, ...]]:
        """Pickles and copies hold the lines of ``save``: a separate trace, also of a slice or of a growing one."""
        return storage.unpickled, (type(self), storage.pickled(self), list(self.problems))

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Mapping[str, Any]:
        """The engine configuration by field name."""
        return self.meta.config

    @property
    def keyframe(self) -> Keyframe | None:
        """The scheduler's memory before the first step, when the run began before the trace; else None."""
        if self.offset == 0 or not self._steps:
            return self.whole._keyframe
        return self.reading("keyframe", lambda part: find("Trace.keyframe_before")(part, 0))

    def arrivals(self) -> list[tuple[int, RequestInfo]]:
        """Each request, in order, with the number of steps in the trace before it was added."""
        return self.requests.arrivals()

    @property
    def supplements(self) -> list[Supplement]:
        """Facts that became known about steps after their records were made, in the order in which they came."""
        return [said for said in list(self.whole._supplements.values()) if self._holds(said.step)]

    def supplement(self, step: int, name: str) -> Mapping[str, Any] | None:
        """The facts of one name that became known about a step after its record was made.

        Args:
            step: Index of the step (``StepRecord.step``).
            name: The kind of facts, such as "shadow".

        Returns:
            The facts, None as long as there are none.
        """
        said = self.whole._supplements.get((step, name))
        return said.facts if said is not None and self._holds(step) else None

    @property
    def disturbed(self) -> frozenset[int]:
        """Numbers of the steps that `mark_disturbed` marked, in this process or before the trace was written."""
        return frozenset(said.step for said in self.supplements if said.name == DISTURBED)

    def _holds(self, step: int) -> bool:
        return bool(self._steps) and self._steps[0].step <= step <= self._steps[-1].step

    @property
    def events(self) -> Events:
        """Everything that happened to requests, with reasons, in order."""
        return Events(event for record in self for event in record.events)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Every step, in order; the same as ``tuple(trace)``."""
        return tuple(self)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Self:
        if not isinstance(index, slice):
            try:
                return self._steps[index]
            except IndexError:
                raise IndexError(f"step {index} of a trace of {len(self)} steps") from None
            except TypeError:
                reason = f"a trace has its steps by number, got {shown(index)}; requests are in trace.requests, by id"
                raise TypeError(reason) from None
        start, stop, stride = index.indices(len(self))
        if stride != 1:
            raise ValueError(f"a slice of a trace takes every step: stride must be 1, got {stride}")
        return self._slice(start, max(start, stop))

    def _slice(self, start: int, stop: int) -> Self:
        part = type(self)(self.meta)
        part._steps = self._steps[start:stop]
        part._slice_of, part.offset, part._run = self.whole, self.offset + start, self._run
        part.problems = list(self.problems)
        named = _named_in(part._steps) if start else ()
        for before, info in self.arrivals():
            if (before < stop or stop == len(self)) and (before >= start or info.request_id in named):
                part.requests.add(info, max(0, before - start))
        if stop == len(self):
            part.end, part.clock_drift = self.end, self.clock_drift
        return part

    @property
    def steps_in_words(self) -> str:
        """The steps of the run that are in the trace, for a message."""
        if not len(self) or self[0].step == 0:
            return counted(len(self), "step")
        return f"steps {self[0].step} to {self[-1].step}"

    def reading(self, name: str, make: Callable[[Trace], T]) -> T:
        """Read something from the trace once and keep it with the trace.

        Args:
            name: Its name.
            make: Makes it at the first call.
        """
        with self._lazy_lock:
            if name not in self._lazy:
                self._lazy[name] = make(self)
            return self._lazy[name]

    def reading_so_far(self, name: str, make: Callable[[Trace], T]) -> T:
        """The same for something that changes as the trace grows: it is made again after anything was added.

        Threads that ask at once may each make it: nobody waits for another one's work.
        """
        size = (len(self), len(self.requests), len(self.whole._supplements))
        kept = self._lazy.get(name)
        if kept is None or kept[0] != size:
            self._lazy[name] = kept = (size, make(self))
        found: T = kept[1]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain dicts, lists and numbers."""
        return {
            "meta": msgspec.to_builtins(self.meta),
            "requests": [msgspec.to_builtins(info) for info in self.requests.values()],
            "steps": [msgspec.to_builtins(record) for record in self],
            "supplements": [msgspec.to_builtins(supplement) for supplement in self.supplements],
            "end": self.end,
        }

    def __str__(self) -> str:
        ended = {"": "", "done": ", done", "part": ", a part of a longer run"}.get(self.end, f", ended: {self.end}")
        tokens = sum(record.num_tokens for record in tuple(self._steps))
        return (
            f"{printable(self.meta.source)}: {self.steps_in_words}, {counted(len(self.requests), 'request')}, "
            f"{counted(tokens, 'token')} scheduled{ended}"
        )

    def __repr__(self) -> str:
        return f"Trace({self})"

    def _repr_html_(self) -> str | None:
        return picture("Trace", self)

    def __panel__(self) -> Any:
        """The view as a Panel component, for ``pn.panel(trace)`` and layouts."""
        return find("Trace.__panel__")(self)


def _named_in(steps: Iterable[StepRecord]) -> set[str]:
    """Ids of the requests that were in some steps."""
    named: set[str] = set()
    for step in steps:
        named.update(step.running, step.waiting, step.arrived, step.finished, step.aborted, step.preempted)
    return named


class Requests(Mapping[str, RequestInfo]):
    """RequestInfo by request id, in order of arrival. May be iterated while the engine adds to it.

    Equal lists and mappings in the sampling of several requests, such as long stop strings, are kept once.
    """

    def __init__(self) -> None:
        self._arrivals: ByRequest[tuple[int, RequestInfo]] = ByRequest()
        self._settings: dict[str, Any] = {}

    def add(self, info: RequestInfo, num_steps_before: int) -> None:
        """Add a request that arrives after this number of steps of the trace."""
        if any(isinstance(value, list | dict) for value in info.sampling.values()):
            info = self._shared(info)
        self._arrivals[info.request_id] = (num_steps_before, info)

    def _shared(self, info: RequestInfo) -> RequestInfo:
        """The same with lists and mappings that another request has already."""
        shared = {
            name: self._settings.setdefault(repr(value), value)
            for name, value in info.sampling.items()
            if isinstance(value, list | dict)
        }
        return msgspec.structs.replace(info, sampling={**info.sampling, **shared})

    def arrivals(self) -> list[tuple[int, RequestInfo]]:
        """Each request with the number of steps in the trace before it was added."""
        return list(self._arrivals.values())

    @property
    def ids(self) -> KeysView[str]:
        """The request ids; grows with the requests, and finds a name without a call of Python."""
        return self._arrivals.keys()

    def __getitem__(self, request_id: str) -> RequestInfo:
        return self._arrivals[request_id][1]

    def get(self, request_id: str, default: Any = None) -> Any:
        """The request of an id, or a default without the message of an error."""
        found = self._arrivals.get(request_id)
        return default if found is None else found[1]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._arrivals

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._arrivals))

    def __len__(self) -> int:
        return len(self._arrivals)

    def __repr__(self) -> str:
        return f"requests({listed(self)})"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


class _Run:
    """The state shared by the traces of one run, each of which continues the one before (``Trace.continued_from``).

    Attributes:
        newest: The trace that steps are added to.
        writer: The file that the run is recorded to.
        lock: Held while something is added: the engine adds steps, other threads add supplements.
    """

    def __init__(self, newest: Trace) -> None:
        self.newest = newest
        self.writer: TraceWriter | None = None
        self.lock = threading.Lock()

    def record(self, line: TraceLine) -> None:
        """Write a line to the recording, if there is one."""
        if self.writer is not None and not self.writer.record(line):
            self.writer = None
