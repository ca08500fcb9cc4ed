"""Breakpoints: conditions on the record of a step that stop a running engine after that step."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from workbench.base.text import counted
from workbench.trace.records import StepRecord

log = logging.getLogger("workbench")

Condition = Callable[[StepRecord], Any]

_FORMS = """\
    preemption                       a request lost its blocks
    free_blocks < 8                  free KV blocks fall below 8
    num_kv_computed[r3] >= 1024      request r3 reaches 1024 tokens in the KV cache
    block 17                         block 17 is added to a block table
    finish, finish r3                a request, or r3, ends"""


@dataclass
class Breakpoint:
    """A condition that is checked after every step.

    Attributes:
        number: Its number, for ``Breakpoints.remove``.
        label: Description of the condition.
        condition: Called with the record of each step.
        every_time: Stop after every step for which the condition is true, not only when it becomes true.
        hits: Number of times that it has stopped the engine.
    """

    number: int
    label: str
    condition: Condition
    every_time: bool = True
    hits: int = 0
    _was_true: bool = field(default=False, repr=False)

    def check(self, record: StepRecord) -> bool:
        """Whether to stop after this step."""
        is_true = bool(self.condition(record))
        hit = is_true and (self.every_time or not self._was_true)
        self._was_true = is_true
        self.hits += hit
        return hit


class Breakpoints:
    """The breakpoints of one engine, shared by all its views.

    Attributes:
        stopped_by: (step, label) of the breakpoint that stopped the latest run, None when none did.
    """

    def __init__(self) -> None:
        self._breakpoints: list[Breakpoint] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # views and cells add breakpoints, the engine's thread checks them
        self.stopped_by: tuple[int, str] | None = None

    def __repr__(self) -> str:
        told = "; ".join(f"{each.number}: {each.label}, {counted(each.hits, 'hit')}" for each in self) or "none"
        return f"Breakpoints({told})"

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(tuple(self._breakpoints))

    def __len__(self) -> int:
        return len(self._breakpoints)

    def add(self, condition: str | Condition, label: str = "", *, every_time: bool = True) -> Breakpoint:
        """Stop after every step for which a condition holds.

        Args:
            condition: "preemption", "free_blocks < 8", "num_kv_computed[r3] >= 1024", "block 17", "finish",
                "finish r3", or a function that takes a StepRecord. The function is called on the engine's thread and
                must be quick; one that raises is removed.
            label: Description of the condition.
            every_time: False to stop only when the condition becomes true, as "free_blocks" does.

        Raises:
            ValueError: The condition is not understood.

        Example:
            >>> breakpoints = Breakpoints()
            >>> breakpoints.add("preemption").label
            'a request is preempted'
            >>> breakpoints.add(lambda step: len(step.waiting) > 3, "more than 3 wait").number
            2
        """
        if isinstance(condition, str):
            return self._add_written(condition)
        if not callable(condition):
            raise ValueError(f"condition must be a string or a function of the StepRecord, got {condition!r}")
        label = label or getattr(condition, "__name__", "condition")
        made = Breakpoint(next(self._numbers), label, condition, every_time)
        with self._lock:
            self._breakpoints.append(made)
        return made

    def _add_written(self, text: str) -> Breakpoint:
        written = text.strip()
        if written == "preemption":
            return self.on_preemption()
        if match := re.fullmatch(r"free_blocks\s*<\s*(\d+)", written):
            return self.on_free_blocks_below(int(match[1]))
        if match := re.fullmatch(r"num_kv_computed\[(.+)\]\s*>=\s*(\d+)", written):
            return self.on_num_kv_computed(match[1].strip("'\""), int(match[2]))
        if match := re.fullmatch(r"block\s+(\d+)", written):
            return self.on_block(int(match[1]))
        if match := re.fullmatch(r"finish(?:\s+(.+))?", written):
            return self.on_finish(match[1])
        raise ValueError(
            f"breakpoint {text!r} is not understood; the forms are\n{_FORMS}\nor a function of the StepRecord"
        )

    def on_preemption(self) -> Breakpoint:
        """Stop after a step in which a request is preempted."""
        return self.add(lambda record: record.preempted, "a request is preempted")

    def on_free_blocks_below(self, blocks: int) -> Breakpoint:
        """Stop when fewer than ``blocks`` KV blocks are free after scheduling."""
        blocks = _at_least("blocks", blocks, 1)
        return self.add(lambda record: record.free_blocks < blocks, f"free blocks below {blocks}", every_time=False)

    def on_num_kv_computed(self, request_id: str, tokens: int) -> Breakpoint:
        """Stop when a request reaches ``tokens`` tokens in the KV cache."""
        tokens = _at_least("tokens", tokens, 1)
        return self.add(
            lambda record: any(c.request_id == request_id and c.start < tokens <= c.end for c in record.chunks),
            f"{request_id} reaches {tokens} tokens",
        )

    def on_block(self, block: int) -> Breakpoint:
        """Stop when a physical block is added to a block table."""
        block = _at_least("block", block, 1)
        return self.add(lambda record: any(block in c.new_block_ids for c in record.chunks), f"block {block} is taken")

    def on_finish(self, request_id: str | None = None) -> Breakpoint:
        """Stop when a request ends, or when any request ends if none is named."""
        if request_id is None:
            return self.add(lambda record: record.finished, "a request ends")
        return self.add(lambda record: request_id in record.finished, f"{request_id} ends")

    def remove(self, number: int) -> None:
        """Remove a breakpoint.

        Raises:
            ValueError: There is no breakpoint with this number.
        """
        with self._lock:
            kept = [item for item in self._breakpoints if item.number != number]
            if len(kept) == len(self._breakpoints):
                raise ValueError(f"there is no breakpoint {number!r}")
            self._breakpoints = kept

    def clear(self) -> None:
        """Remove all breakpoints."""
        with self._lock:
            self._breakpoints = []

    def check(self, record: StepRecord) -> bool:
        """Whether to stop after this step; called once for each, on the engine's thread."""
        stop = False
        for item in self:
            try:
                hit = item.check(record)
            except Exception:
                log.exception("breakpoint %r raised and was removed", item.label)
                self.remove(item.number)
                continue
            if hit:
                self.stopped_by, stop = (record.step, item.label), True
        return stop


def _at_least(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value
