"""Breakpoints: stop a running engine when a condition on the step's record holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from workbench.trace import StepRecord

Condition = Callable[[StepRecord], bool]

_FORMS = """\
    preemption                       a request lost its blocks
    free_blocks < 8                  fewer than 8 KV blocks are free after scheduling
    num_kv_computed[r3] >= 1024      request r3 has 1024 tokens in its KV cache, or more
    block 17                         block 17 came into a block table
    finish, finish r3                a request, or r3, ended"""


@dataclass(frozen=True, eq=False)
class Breakpoint:
    """A condition, and what to call it.

    Attributes:
        label: What a person sees.
        condition: Called with the record of each step; True stops the engine after that step.
    """

    label: str
    condition: Condition


def parse_breakpoint(text: str) -> Breakpoint:
    """A breakpoint from its written form.

    Raises:
        ValueError: Not one of the forms; the message lists them.
    """
    written = text.strip()
    if written == "preemption":
        return Breakpoint(written, lambda record: bool(record.preempted))
    if match := re.fullmatch(r"free_blocks\s*<\s*(\d+)", written):
        limit = int(match[1])
        return Breakpoint(written, lambda record: record.free_blocks < limit)
    if match := re.fullmatch(r"num_kv_computed\[(.+)\]\s*>=\s*(\d+)", written):
        request_id, reached = match[1].strip("'\""), int(match[2])
        # Once, in the step that crosses the line: "reaching", not "having reached".
        return Breakpoint(
            written,
            lambda record: any(c.request_id == request_id and c.start < reached <= c.end for c in record.chunks),
        )
    if match := re.fullmatch(r"block\s+(\d+)", written):
        block = int(match[1])
        return Breakpoint(written, lambda record: any(block in chunk.new_block_ids for chunk in record.chunks))
    if match := re.fullmatch(r"finish(?:\s+(.+))?", written):
        wanted = match[1]
        return Breakpoint(
            written, lambda record: bool(record.finished) if wanted is None else wanted in record.finished
        )
    raise ValueError(f"breakpoint {text!r} is not understood; the forms are\n{_FORMS}\nor a function of the StepRecord")


def make_breakpoint(condition: str | Condition, label: str = "") -> Breakpoint:
    """A breakpoint from its written form or from a function of the StepRecord.

    Raises:
        ValueError: The condition is neither.
    """
    if isinstance(condition, str):
        return parse_breakpoint(condition)
    if not callable(condition):
        raise ValueError(f"condition must be a string or a function of the StepRecord, got {condition!r}")
    return Breakpoint(label or getattr(condition, "__name__", repr(condition)), condition)
