"""The laws over a trace: its records are counted step by step, and every number in them is checked."""

from __future__ import annotations

from itertools import islice

from workbench.trace import Keyframe, StepRecord, Trace
from workbench.trace.laws.checker import Checker
from workbench.trace.laws.law import Broken
from workbench.trace.laws.state import Limits

OUR_SOURCES = ("engine", "simulation")
"""Sources of traces of our scheduler, which may use the named exceptions."""


def check(trace: Trace) -> list[Broken]:
    """Check that a run kept the laws of `workbench.trace.laws.LAWS`.

    A window, a slice or a recording that was cut off is checked for what it holds. The named exceptions of
    docs/limits.md are left out in runs of our scheduler, and reported in recordings of others.

    Returns:
        The broken laws in order, each once per rule and request; empty when all hold.

    Example:
        >>> from workbench import simulate
        >>> simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]}).check()
        []
    """
    ours, starts = trace.meta.source in OUR_SOURCES, not trace.keyframe and (not len(trace) or trace[0].step == 0)
    with_tokens = trace.config.get("token_ids_recorded", True)
    checker = Checker(Limits.of(trace.config), allow_exceptions=ours, whole=starts, with_tokens=with_tokens)
    checker.history.whole_queue = ours and starts
    if len(trace) and not starts:
        _begin(checker, trace)
    record: StepRecord | None = None
    following = islice(trace, 1, None)
    for record in trace:
        after = next(following, None)
        for request_id in record.arrived:
            checker.add(trace.requests[request_id])
        checker.step(record, next_aborted=after.aborted if after is not None else record.running)
    if trace.end == "stuck" and record is not None:
        left = (*record.running, *record.waiting)
        if left and not any(broken.law == "progress" for broken in checker.broken):
            stuck = f"the run is stuck with {len(left)} requests left"
            checker.broken.append(Broken("progress", record.step, left[0], stuck))
    return checker.broken


def _begin(checker: Checker, trace: Trace) -> None:
    """Take over what the trace says of the run before it: running requests first, then the queue."""
    first, keyframe = trace[0], trace.keyframe or Keyframe(trace[0].step)
    order = {name: place for place, name in enumerate((*first.running, *reversed(first.preempted)))}
    for request_id in sorted(keyframe.block_tables, key=lambda name: order.get(name, 0)):
        tables = (keyframe.block_tables[request_id], *keyframe.other_tables.get(request_id, ()))
        checker.add_running(trace.requests[request_id], keyframe.num_kv_computed.get(request_id, 0), tables)
    history = checker.history
    for request_id in (*first.running, *first.waiting, *first.preempted, *first.aborted):
        if request_id not in history.requests and request_id not in first.arrived:
            history.add(trace.requests[request_id], None, whole=False)
