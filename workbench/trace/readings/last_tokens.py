"""The latest output token of each request before a step: the gap to its next token began with it.

A part of a run has neither that token nor the first arrival of the run. Its keyframe keeps both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from workbench.trace.lines import LastToken, RequestInfo
from workbench.trace.readings.latency import gives_token
from workbench.trace.run_zero import run_zero

if TYPE_CHECKING:
    from workbench.trace.lines import Keyframe
    from workbench.trace.trace import Trace


def last_tokens_before(trace: Trace) -> Mapping[str, LastToken]:
    """The latest token, before a trace begins, of each request that was open then and had one, as far as it is known.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 6}, "max_tokens": 9}]})
        >>> last_tokens_before(trace), last_tokens_before(trace[4:])
        ({}, {'a': LastToken(step=3, end=0.0)})
    """
    return _last_tokens(trace.whole, trace.offset)


def with_times(keyframe: Keyframe, trace: Trace) -> Keyframe:
    """The beginning of a part of a trace, with the zero of its run if there is a clock, and its latest tokens.

    A step before it that is not in the trace yet may give further tokens: then none are known.
    """
    if not len(trace):
        return keyframe
    if trace[-1].end > 0:
        keyframe = msgspec.structs.replace(keyframe, zero=run_zero(trace))
    index = keyframe.step - trace[0].step
    if index > len(trace):
        return keyframe
    return msgspec.structs.replace(keyframe, last_tokens=_last_tokens(trace, index))


def _last_tokens(trace: Trace, index: int) -> Mapping[str, LastToken]:
    """The latest tokens before a step of a trace that is not a slice; ``len(trace)`` stands for the next step."""
    before = trace.keyframe.last_tokens if trace.keyframe is not None else {}
    if not index:
        return before
    latest = trace[index - 1]
    missing = {*latest.running, *latest.waiting}.difference(latest.finished)
    found: dict[str, LastToken] = {}
    for place in range(index - 1, -1, -1):
        if not missing:
            break
        record = trace[place]
        for chunk in record.chunks:
            name = chunk.request_id
            if name in missing and gives_token(chunk, record, trace.requests.get(name) or RequestInfo(name, 0)):
                found[name] = LastToken(record.step, record.end)
                missing.remove(name)
        missing.difference_update(record.arrived)
    return {name: before[name] for name in missing if name in before} | found
