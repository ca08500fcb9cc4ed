"""The KV positions that requests had computed before a trace begins; a preemption may have thrown some away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.trace.readings.outputs_before import outputs_before

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


def computed_before(trace: Trace) -> dict[str, int | None]:
    """Number of KV positions of each request that had been computed at some time before the first step of a trace.

    A request with output tokens has computed everything before the last of them. Of a slice, the steps before it tell
    how far the others came. ``js/store.js`` counts the same way while steps arrive.

    Args:
        trace: A trace.

    Returns:
        The number for each request that arrived before the trace begins; None if the trace does not tell it.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 6}, "max_tokens": 9}]})
        >>> computed_before(trace), computed_before(trace[4:])
        ({}, {'a': 9})
    """
    outputs, held = outputs_before(trace), trace.keyframe.num_kv_computed if trace.keyframe else {}
    found = {
        name: None if number is None else trace.requests[name].num_prompt_tokens + number - 1 if number else 0
        for name, number in outputs.items()
    }
    in_prompt = {name for name, number in found.items() if number == 0}
    oldest = min((trace.requests[name].arrival_step for name in in_prompt), default=0)
    for index in range(trace.offset - 1, -1, -1):
        record = trace.whole[index]
        if not in_prompt or record.step < oldest:
            break
        for chunk in record.chunks:
            if chunk.request_id in in_prompt:
                found[chunk.request_id] = max(found[chunk.request_id] or 0, chunk.num_kv)
    return {name: max(number, held.get(name, 0)) if number is not None else None for name, number in found.items()}
