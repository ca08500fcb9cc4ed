"""Why a request waits or lost its KV blocks, as facts, and the sentence that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Literal

import msgspec

Kind = Literal[
    "token_budget",
    "seats",
    "kv_blocks",
    "partial_prefills",
    "state_boundary",
    "output_in_flight",
    "behind",
    "preempted",
    "policy",
    "grammar",
    "adapter",
    "transfer",
    "encoder",
    "unknown",
]
"""The kind of obstacle between a request and its place in a step.

``token_budget``: the step has too few tokens left for it.
``seats``: as many requests run as may run.
``kv_blocks``: too few KV blocks are free.
``partial_prefills``: a limit on prompts in progress.
``state_boundary``: its chunk has to end at a state of the recurrent layers, and cannot now.
``output_in_flight``: with asynchronous scheduling, its output of an earlier step has not come in yet.
``behind``: it stands behind a request that is not admitted.
``preempted``: it lost its KV blocks in this step.
``policy``: the scheduling policy left it out.
``adapter``: as many other adapters run as may run.
``grammar``, ``transfer``, ``encoder``: its grammar is not compiled, its KV has not been transferred yet, or the
encoder's budget is spent.
``unknown``: the record does not know.
"""

Rule = Literal[
    "",
    "whole_prompt",
    "padding_drafts",
    "preemption",
    "last_admitted",
    "priority",
    "policy",
    "cache_reset",
    "long_prompt",
    "overtaken",
    "not_considered",
    "same_step",
]
"""The rule that applied, if the kind and the limit leave several.

For ``token_budget``: ``whole_prompt`` if the prompt must not be split, ``padding_drafts`` if drafts that only fill up
its rows count. For ``kv_blocks`` and ``preempted``: ``preemption`` if nobody is admitted because somebody was
preempted, or the rule that chose the victim, ``last_admitted``, ``priority`` or ``policy``; ``cache_reset`` if the
prefix cache was reset. For ``partial_prefills``: ``long_prompt`` if others may overtake it, ``overtaken`` if it may not
overtake a long prompt any more, ``not_considered`` behind more requests than a step looks at. For ``state_boundary``:
``same_step`` if another request computes the state in this step.
"""


class Reason(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request was not scheduled, or was preempted. ``str(reason)`` says it as part of a sentence.

    Nothing reads the sentence: every answer is decided by the fields.

    Attributes:
        kind: See `Kind`. For a preemption that of the shortage: ``kv_blocks``.
        limit: The field of EngineConfig that limits; "" for none.
        value: The value of that field.
        needed: Tokens, blocks or seats that the request needs; None if they were not counted.
        available: The number of them that there were.
        behind: For ``behind`` the request in front; the other fields are those of its reason.
        front: For ``behind`` the kind of the reason of the request in front.
        rule: See `Rule`.
        requests: The requests that are in the way: the long prompts in progress, one for each adapter that runs, those
            preempted in this step, or the one that needed a victim's blocks.
        num_tokens: Tokens that the needed blocks are for.
        reserved: Free blocks that the watermark keeps, and ``available`` does not count.
        priority: The victim's priority, if the rule chose it by that.
        text: Words for the rest: the policy that chose a victim, or the sentence of an older file.
    """

    kind: Kind = "unknown"
    limit: str = ""
    value: int | float | str | None = None
    needed: int | None = None
    available: int | None = None
    behind: str = ""
    front: Kind | Literal[""] = ""
    rule: Rule = ""
    requests: tuple[str, ...] = ()
    num_tokens: int = 0
    reserved: int = 0
    priority: int | None = None
    text: str = ""

    @property
    def root(self) -> Kind:
        """The kind under which the time of waiting counts: for ``behind`` that of the request in front."""
        return self.front or self.kind

    def for_those_behind(self, request_id: str) -> Reason:
        """The reason of the requests that stand behind one that has this reason."""
        return msgspec.structs.replace(self, kind="behind", behind=request_id, front=self.kind)

    def as_preempted(self) -> Reason:
        """The reason for which a request waits in the step that preempted it for this reason."""
        return msgspec.structs.replace(self, kind="preempted")

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        names, defaults = self.__struct_fields__, self.__struct_defaults__
        given = [(name, getattr(self, name), default) for name, default in zip(names, defaults)]
        return f"Reason({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})"

    def _repr_html_(self) -> str:
        return f"<p><b>{self.kind}</b>: {escape(str(self))}</p>"


UNKNOWN = Reason()
"""The reason of a request about which a record does not know more."""


def describe(reason: Reason, names: Callable[[Sequence[str]], str] = ", ".join) -> str:
    """A reason as part of a sentence; the only place where one becomes words.

    Args:
        reason: The reason.
        names: Joins the ids of requests; they can be long, and contain anything.
    """
    match reason.root:
        case "token_budget":
            words = _of_budget(reason)
        case "seats":
            words = f"{reason.limit} reached ({reason.value})"
        case "kv_blocks":
            words = _of_blocks(reason, names)
        case "partial_prefills":
            words = _of_partial_prefills(reason, names)
        case "state_boundary" if reason.rule == "same_step":
            words = "its prefix ends at a state that another request computes in this step"
        case "state_boundary":
            words = "no state can be reached with the rest of the token budget"
        case "preempted":
            words = f"preempted in this step: {_of_blocks(reason, names)}"
        case "adapter" if reason.limit:
            words = f"{reason.limit} reached ({reason.value}), and its adapter is not one of those of "
            words += names(reason.requests)
        case "policy":
            words = f"left out by {reason.text or 'the policy'}"
        case "transfer" if reason.num_tokens:
            words = f"{reason.num_tokens} tokens of its KV are on their way from the second tier"
        case kind:
            words = _OTHERS[kind] if not reason.text else reason.text
    return f"waiting behind {names([reason.behind])}: {words}" if reason.kind == "behind" else words


_OTHERS = {
    "output_in_flight": "its output of the step in flight has not come in yet",
    "grammar": "its grammar is not compiled yet",
    "adapter": "no slot is free for its adapter",
    "transfer": "its KV has not been transferred yet",
    "encoder": "the budget of the encoder is used up",
    "behind": "the reason of the request in front is not known",
    "unknown": "not admitted by the engine",
}


def _of_budget(reason: Reason) -> str:
    left = reason.available or 0
    if reason.rule == "padding_drafts":
        return f"{reason.needed} tokens with padding drafts, {left} of the token budget left"
    if reason.rule == "whole_prompt":
        return f"{reason.needed} tokens in one step, {left} of the token budget left"
    if not isinstance(reason.value, int):
        return "token budget used up"
    return f"token budget used up ({reason.value - left} of {reason.value})"


def _of_blocks(reason: Reason, names: Callable[[Sequence[str]], str]) -> str:
    match reason.rule:
        case "preemption":
            return f"nobody is admitted in a step that preempts {names(reason.requests)}"
        case "last_admitted" | "priority" | "policy":
            chosen = {
                "last_admitted": "last admitted",
                "priority": f"lowest priority ({reason.priority})",
                "policy": f"chosen by {reason.text}",
            }[reason.rule]
            blocks = "KV block" if reason.needed == 1 else "KV blocks"
            who = names(reason.requests)
            return f"{who} needs {reason.needed} more {blocks}, {reason.available} free; {chosen}"
        case "cache_reset":
            return "the prefix cache was reset"
    if reason.needed is None:
        return "the KV blocks ran out" if reason.available is None else "no KV block is free"
    kept = f", {reason.reserved} of them kept by the watermark" if reason.reserved else ""
    free = f"{(reason.available or 0) + reason.reserved} free{kept}"
    return f"no free KV blocks: needs {reason.needed:,} more for {reason.num_tokens or 0:,} tokens, {free}"


def _of_partial_prefills(reason: Reason, names: Callable[[Sequence[str]], str]) -> str:
    match reason.rule:
        case "overtaken":
            return "a long prompt in front has been overtaken as often as it may be"
        case "not_considered":
            return "behind more requests than a step looks at"
        case "long_prompt":
            return f"long prompt: {reason.limit} ({reason.value}) in progress, {names(reason.requests) or reason.text}"
    return f"{reason.limit} ({reason.value}) in progress"
