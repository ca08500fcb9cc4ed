"""The laws over a trace: its records are counted step by step, and every number in them is checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

from workbench.laws.checker import Checker
from workbench.laws.history import Known
from workbench.laws.law import Broken
from workbench.laws.state import Limits
from workbench.trace import Keyframe, StepRecord, Trace

OUR_SOURCES = ("engine", "simulation")
"""Sources of traces of our scheduler, which may use the named exceptions."""


def check(trace: Trace) -> list[Broken]:
    """Check that a run kept the laws of `workbench.laws.LAWS`.

    A window, a slice or a recording that was cut off is checked for what it holds. The named exceptions of
    docs/limits.md are left out in runs of our scheduler, and reported in recordings of others.

    Returns:
        The broken laws in order, each once per rule and request; empty when all hold.

    Example:
        >>> from workbench import simulate
        >>> simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]}).check()
        []
    """
    return _Replay(trace).check()


class _Replay:
    """The moments of a trace, one after another."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.limits = Limits.of(trace.config)
        starts = not trace.keyframe and (not len(trace) or trace[0].step == 0)
        ours = trace.meta.source in OUR_SOURCES
        self.checker = Checker(self.limits, allow_exceptions=ours, whole=starts)
        self.history = self.checker.history
        self.history.whole_queue = ours and starts
        self._in_flight: deque[StepRecord] = deque()
        self.with_tokens = trace.config.get("token_ids_recorded", True)

    def check(self) -> list[Broken]:
        """The broken laws."""
        trace, checker = self.trace, self.checker
        self._begin()
        record: StepRecord | None = None
        following = islice(trace, 1, None)
        for record in trace:
            after = next(following, None)
            for request_id in record.arrived:
                self._add(request_id, whole=True)
            checker.scheduled(record, tables=record.block_tables_by_group)
            for request_id, reason in record.finish_reasons.items():
                if reason == "error":
                    checker.crashed(record.step, "its step failed", request_id)
            self._take_output(record)
            aborted = after.aborted if after is not None else record.running
            checker.look(record, next_aborted=aborted)
        if trace.end == "stuck" and record is not None:
            left = (*record.running, *record.waiting)
            if left and not any(broken.law == "progress" for broken in checker.broken):
                stuck = f"the run is stuck with {len(left)} requests left"
                checker.broken.append(Broken("progress", record.step, left[0], stuck))
        return checker.broken

    def _take_output(self, record: StepRecord) -> None:
        """Count the output that came in at the end of a step.

        When steps overlap it is that of the step before; also that of the step itself, if no other one followed.
        """
        reasons, in_flight = record.finish_reasons, self._in_flight
        in_flight.append(record)
        own: set[str] = set()
        if self.limits.asynchronous:
            own = {chunk.request_id for chunk in record.chunks if chunk.sampled is not None}.intersection(reasons)
        else:
            own.update(reasons)
        earlier = {name: reason for name, reason in reasons.items() if name not in own}
        if len(in_flight) > 1:
            self._count(in_flight.popleft(), earlier)
        else:
            self.history.updated(None, earlier)
        if own or not self.limits.asynchronous:
            self._count(in_flight.popleft(), {name: reasons[name] for name in own})

    def _count(self, record: StepRecord, reasons: Mapping[str, str]) -> None:
        self.history.updated(record.chunks, reasons, with_tokens=self.with_tokens)

    def _begin(self) -> None:
        """Take over what the trace says of the run before it: running requests first, then the queue."""
        trace, history = self.trace, self.history
        if history.whole or not len(trace):
            return
        first, keyframe = trace[0], trace.keyframe or Keyframe(trace[0].step)
        order = {name: place for place, name in enumerate((*first.running, *reversed(first.preempted)))}
        for request_id in sorted(keyframe.block_tables, key=lambda name: order.get(name, 0)):
            tables = (keyframe.block_tables[request_id], *keyframe.other_tables.get(request_id, ()))
            known = self._add(request_id, whole=False)
            history.runs(known, keyframe.num_kv_computed.get(request_id, 0), [list(table) for table in tables])
        for request_id in (*first.running, *first.waiting, *first.preempted, *first.aborted):
            if request_id not in history.requests and request_id not in first.arrived:
                self._add(request_id, whole=False)

    def _add(self, request_id: str, *, whole: bool) -> Known:
        info = self.trace.requests[request_id]
        has_tokens = whole and self.with_tokens and info.prompt_token_ids
        return self.history.add(request_id, info, list(info.prompt_token_ids) if has_tokens else None, whole=whole)
