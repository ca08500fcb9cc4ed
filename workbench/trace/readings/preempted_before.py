"""The requests that are preempted when a trace begins: they ran before, and wait to resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


def preempted_before(trace: Trace) -> dict[str, int | None]:
    """The step that preempted each request which waits to resume when a trace begins.

    Args:
        trace: A trace. Of a slice, the steps before it tell; otherwise only the return of a request does.

    Returns:
        The step by request; None if it is in no earlier step that is known.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": name, "prompt": {"len": 16}, "max_tokens": 40} for name in "ab"]
        >>> trace = simulate({"config": {"num_blocks": 6}, "requests": requests})
        >>> preempted_before(trace), preempted_before(trace[20:])
        ({}, {'b': 17})
    """
    if not len(trace) or trace[0].step == 0:
        return {}
    open_requests = {name for name, info in trace.requests.items() if info.arrival_step < trace[0].step}
    found: dict[str, int | None] = {}
    oldest = min((trace.requests[name].arrival_step for name in open_requests), default=0)
    for index in range(trace.offset - 1, -1, -1):
        record = trace.whole[index]
        if not open_requests or record.step < oldest:
            return found
        found |= dict.fromkeys(open_requests.intersection(record.preempted), record.step)
        open_requests.difference_update(record.preempted, record.admitted, record.resumed)
    for record in trace:
        if not open_requests:
            return found
        found |= dict.fromkeys(open_requests.intersection(record.resumed))
        open_requests.difference_update(record.resumed, record.admitted, record.preempted)
    return found
