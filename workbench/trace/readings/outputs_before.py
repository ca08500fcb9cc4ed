"""The output tokens that requests had before a trace begins.

A trace begins in the middle of a run if it is a slice, or what is left of a run that forgets its oldest steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.trace.readings.latency import gives_token

if TYPE_CHECKING:
    from workbench.trace.lines import RequestInfo
    from workbench.trace.records import Chunk, StepRecord
    from workbench.trace.trace import Trace


def outputs_before(trace: Trace) -> dict[str, int | None]:
    """Number of output tokens of each request before the first step of a trace.

    The first chunk that sampled a token tells it, because the token's position is the end of that chunk. Of a slice,
    the steps before it tell the rest. ``js/store.js`` counts the same way while steps arrive.

    Args:
        trace: A trace.

    Returns:
        The number for each request that arrived before the trace begins; None if the trace does not tell it.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 6}, "max_tokens": 9}]})
        >>> outputs_before(trace), outputs_before(trace[4:])
        ({}, {'a': 4})
    """
    if not len(trace) or trace[0].step == 0:
        return {}
    infos = {name: info for name, info in trace.requests.items() if info.arrival_step < trace[0].step}
    found: dict[str, int | None] = dict.fromkeys(infos)
    for record in trace:
        if None not in found.values():
            return found
        for name in record.admitted:
            if found.get(name, 0) is None:
                found[name] = 0
        for chunk in record.chunks:
            name = chunk.request_id
            if found.get(name, 0) is None:
                found[name] = _outputs_before(chunk, record, infos[name])
    return found if trace.whole is trace else _with_earlier_steps(trace, infos, found)


def _outputs_before(chunk: Chunk, record: StepRecord, info: RequestInfo) -> int | None:
    """Number of output tokens before a chunk, None if the chunk does not tell it."""
    if gives_token(chunk, record, info):
        return _place(chunk, info)
    is_first_time = chunk.is_partial_prefill and not chunk.num_recomputed_tokens
    return 0 if is_first_time and chunk.num_kv <= info.num_prompt_tokens else None


def outputs_after(chunk: Chunk, info: RequestInfo) -> int:
    """Number of output tokens of a request after a chunk that gave it a token."""
    return _place(chunk, info) + max(1, len(chunk.accepted))


def _place(chunk: Chunk, info: RequestInfo) -> int:
    """Place in the output of the first token that a chunk appended."""
    return chunk.num_kv - len(chunk.drafts) - info.num_prompt_tokens


def _with_earlier_steps(
    part: Trace, infos: dict[str, RequestInfo], found: dict[str, int | None]
) -> dict[str, int | None]:
    """The same for requests that sampled nothing in a slice, from the steps before it."""
    whole, missing = part.whole, {name for name, number in found.items() if number is None}
    oldest = min((infos[name].arrival_step for name in missing), default=0)
    for index in range(part.offset - 1, -1, -1):
        record = whole[index]
        if not missing or record.step < oldest:
            break
        for chunk in record.chunks:
            name = chunk.request_id
            if name in missing and gives_token(chunk, record, infos[name]):
                found[name] = outputs_after(chunk, infos[name])
                missing.remove(name)
    begin = whole[0].step
    return found | {name: 0 for name in missing if infos[name].arrival_step >= begin}
