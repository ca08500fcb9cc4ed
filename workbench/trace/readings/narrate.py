"""One plain sentence for a step, made from its record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from workbench.base.text import counted, duration, printable
from workbench.trace.fields import EMPTY
from workbench.trace.readings.outputs_before import outputs_after
from workbench.trace.reasons import Reason, describe

if TYPE_CHECKING:
    from workbench.trace.lines import RequestInfo
    from workbench.trace.records import Chunk, StepRecord

MAX_NAMES = 3
"""Maximum number of requests that a sentence names; more are counted."""

MAX_NAME_CHARACTERS = 24
MAX_REASON_CHARACTERS = 240

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

ENDS = {
    "length": "hit max_tokens",
    "stop": "model ended",
    "error": "failed",
    "abort": "aborted",
}
"""Words for the reasons for which requests finish."""


class _Output(Protocol):
    """A RequestOutput, as far as its end depends on it."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def error(self) -> str: ...


MAX_IN_REPR, MAX_ID = 3, 32
"""Maximum number of requests in the repr of a step, and of characters of an id in it."""


def end_words(finish_reason: str | None, error: str = "", *, hit_max_model_len: bool = False) -> str:
    """The end of a request, such as "hit max_tokens"; "running" until then."""
    words = ENDS.get(finish_reason, finish_reason) if finish_reason else "running"
    words = "hit max_model_len" if hit_max_model_len else words
    return f"{words}: {error}" if error else words


def hits_max_model_len(step: StepRecord, info: RequestInfo | None) -> bool:
    """Whether a step ends a request at max_model_len: for its length, before it has max_tokens."""
    if info is None or step.finish_reasons.get(info.request_id) != "length":
        return False
    return any(
        outputs_after(chunk, info) < info.max_tokens for chunk in step.chunks if chunk.request_id == info.request_id
    )


def end_of(output: _Output, requests: Mapping[str, RequestInfo]) -> str:
    """The end of the request of an output; the requests of its trace tell its max_tokens."""
    info = requests.get(output.request_id)
    is_cut = output.finish_reason == "length" and info is not None and len(output.token_ids) < info.max_tokens
    return end_words(output.finish_reason, output.error, hit_max_model_len=is_cut)


def narrate(step: StepRecord, requests: Mapping[str, RequestInfo] = EMPTY) -> str:
    """One sentence about a step: its work, the requests that start, end or lose their blocks, and those that wait.

    Args:
        step: The record.
        requests: The requests of its trace, ``trace.requests``, which tell max_model_len from max_tokens as an end.

    Returns:
        A single line without control characters.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": name, "prompt": {"len": 100}, "max_tokens": 4} for name in ("a", "b", "c")]
        >>> trace = simulate({"requests": requests}, config={"max_num_batched_tokens": 150})
        >>> for step in trace[:3]:
        ...     print(narrate(step))
        Step 0: 150 prompt tokens of a and b share one pass; c waits: the token budget is used up.
        Step 1: 149 prompt tokens and 1 reply share one pass.
        Step 2: 1 prompt token and 2 replies share one pass.
    """
    return f"Step {step.step:,}: {narrate_briefly(step, requests)}."


def in_one_line(step: StepRecord) -> str:
    """The repr of a step: its number, its tokens and their requests, those that wait, and its duration."""
    ids = [chunk.request_id for chunk in step.chunks]
    named = [printable(f"{one[:MAX_ID]}..." if len(one) > MAX_ID else one) for one in ids[:MAX_IN_REPR]]
    more = f" and {len(ids) - MAX_IN_REPR:,} more" if len(ids) > MAX_IN_REPR else ""
    of_budget = f"{step.num_tokens:,} of {step.token_budget:,} tokens"
    parts = [of_budget if step.token_budget else counted(step.num_tokens, "token")]
    if ids:
        parts[0] += f" for {', '.join(named)}{more}"
    if step.waiting:
        parts.append(f"{len(step.waiting):,} waiting")
    if step.duration:
        parts.append(duration(step.duration))
    return f"StepRecord(step {step.step}: {'; '.join(parts)})"


def narrate_briefly(step: StepRecord, requests: Mapping[str, RequestInfo] = EMPTY) -> str:
    """The sentence without the number of the step and without its full stop."""
    return "; ".join([_work(step), *_starts(step), *_endings(step, requests), *_waiting(step)])


def _work(step: StepRecord) -> str:
    """The work of the forward pass."""
    prefills = [chunk for chunk in step.chunks if chunk.arm != "decode"]
    num_replies, num_tokens = len(step.chunks) - len(prefills), sum(chunk.num_tokens for chunk in prefills)
    if not step.chunks:
        return "nothing is computed"
    if not prefills:
        # A request that is aborted during the step gets no token. No chunk has one in a recording without token ids.
        growing = [chunk for chunk in step.chunks if chunk.sampled is not None] or step.chunks
        if len(growing) == 1:
            return f"the reply to {_name(growing[0].request_id)} grows{_by(growing)}"
        return f"{len(growing):,} replies grow{_by(growing)}"
    again = sum(chunk.num_recomputed_tokens for chunk in prefills)
    # A preempted request computes its prompt and its output so far again.
    kind = "token" if again or any(chunk.request_id in step.resumed for chunk in prefills) else "prompt token"
    words = counted(num_tokens, kind)
    if num_replies:
        words += f" and {counted(num_replies, 'reply', 'replies')} share one pass"
    elif len(prefills) == 1:
        words = f"{_part_of_prompt(prefills[0], kind)} {'takes' if num_tokens == 1 else 'take'} one pass"
    else:
        words += f" of {_names(chunk.request_id for chunk in prefills)} share one pass"
    return f"{words}, {again:,} of them again" if again else words


def _by(chunks: Sequence[Chunk]) -> str:
    """The growth of the replies of decode chunks: one token each, unless drafts were accepted."""
    tokens = sum([len(chunk.sampled_before) + 1 for chunk in chunks])
    if tokens == len(chunks):
        return " by one token" + (" each" if len(chunks) > 1 else "")
    return f" by {tokens:,} tokens"


def _part_of_prompt(chunk: Chunk, kind: str) -> str:
    name, number = _name(chunk.request_id), f"{chunk.num_tokens:,}"
    noun = kind if chunk.num_tokens == 1 else f"{kind}s"
    last = not chunk.is_partial_prefill
    if chunk.num_cached_tokens:
        rest = f"{number} {noun} of {name}"
        return f"{rest} (the prefix cache has {counted(chunk.num_cached_tokens, 'token')})"
    if chunk.num_tokens == 1 and (chunk.start == 0 or last):
        place = "only" if chunk.start == 0 and last else "last" if last else "first"
        return f"the {place} {noun} of {name}"
    if chunk.start == 0:
        return f"all {number} {noun} of {name}" if last else f"the first {number} {noun} of {name}"
    return f"the last {number} {noun} of {name}" if last else f"{number} more {noun} of {name}"


def _starts(step: StepRecord) -> list[str]:
    """The requests that come back after a preemption, and the hits of those that share a pass."""
    parts = []
    if step.resumed:
        parts.append(f"{_names(step.resumed)} {'is' if len(step.resumed) == 1 else 'are'} resumed")
    hits = [chunk for chunk in step.chunks if chunk.num_cached_tokens] if len(step.chunks) > 1 else []
    if hits:
        num_cached = counted(sum(chunk.num_cached_tokens for chunk in hits), "token")
        parts.append(f"the prefix cache has {num_cached} of {_names(chunk.request_id for chunk in hits)}")
    return parts


def _endings(step: StepRecord, requests: Mapping[str, RequestInfo]) -> list[str]:
    parts = []
    if step.preempted:
        verb = "loses its KV blocks" if len(step.preempted) == 1 else "lose their KV blocks"
        parts.append(f"{_names(step.preempted)} {verb} and must start again")
    by_end: dict[str, list[str]] = {}
    for request_id in step.finished:
        reason, is_cut = step.finish_reasons.get(request_id), hits_max_model_len(step, requests.get(request_id))
        by_end.setdefault(f" ({end_words(reason, hit_max_model_len=is_cut)})" if reason else "", []).append(request_id)
    for why, request_ids in by_end.items():
        parts.append(f"{_names(request_ids)} {'is' if len(request_ids) == 1 else 'are'} done{why}")
    if step.aborted:
        parts.append(f"{_names(step.aborted)} {'was' if len(step.aborted) == 1 else 'were'} aborted")
    return parts


def _waiting(step: StepRecord) -> list[str]:
    """Those that wait, grouped by reason, in queue order; a preempted request has been named already."""
    names: Sequence[str] = step.waiting
    if step.preempted:
        names = [request_id for request_id in names if request_id not in step.preempted]
    if names and not step.passed_over:
        return [_waits(names, _reason(step.waiting_reason))]
    by_reason: dict[Reason | None, list[str]] = {}
    for request_id in names:
        by_reason.setdefault(step.passed_over.get(request_id, step.waiting_reason), []).append(request_id)
    return [_waits(request_ids, _reason(reason)) for reason, request_ids in list(by_reason.items())[:2]]


def _waits(request_ids: Sequence[str], reason: str) -> str:
    return f"{_names(request_ids)} {'waits' if len(request_ids) == 1 else 'wait'}" + (f": {reason}" if reason else "")


def _reason(reason: Reason | None) -> str:
    """A scheduler's reason as part of a sentence."""
    if reason is not None and reason.kind == "token_budget" and reason.needed is None:
        return "the token budget is used up"
    if reason is not None and reason.kind == "seats":
        seats = "the only seat is" if reason.value == 1 else f"all {reason.value:,} seats are"
        return f"{seats} taken ({reason.limit})"
    return shown(reason)


def shown(reason: Reason | None) -> str:
    """A reason as a view shows it: of bounded length, without control characters; "" for none."""
    return "" if reason is None else _plain(describe(reason, _names), MAX_REASON_CHARACTERS).rstrip(".")


def _names(request_ids: Iterable[str]) -> str:
    ids = request_ids if isinstance(request_ids, Sequence) else list(request_ids)
    shown = [_name(request_id) for request_id in ids[: MAX_NAMES if len(ids) <= MAX_NAMES else MAX_NAMES - 1]]
    if more := len(ids) - len(shown):
        shown.append(f"{more:,} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _name(request_id: str) -> str:
    return _plain(request_id, MAX_NAME_CHARACTERS)


def _plain(text: str, limit: int) -> str:
    """Text of bounded length without characters that could break the line or turn the direction of writing."""
    safe = _UNSAFE.sub("·", text[: limit + 1])
    return safe if len(safe) <= limit else f"{safe[: limit - 1]}…"
