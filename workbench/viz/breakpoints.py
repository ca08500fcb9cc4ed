"""Breakpoints: conditions on a step that pause the engine after it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from workbench.trace.records import StepRecord

log = logging.getLogger("workbench")

Condition = Callable[[StepRecord], Any]


@dataclass
class Breakpoint:
    """A condition that is looked at after every step.

    Attributes:
        number: Its number, for removing it.
        label: What it waits for, in words.
        condition: Called with the record of each step; the engine pauses when it becomes true.
        every_time: Pause in every step in which it is true, not only when it becomes true.
        hits: How often it paused the engine.
    """

    number: int
    label: str
    condition: Condition
    every_time: bool = False
    hits: int = 0
    _was_true: bool = field(default=False, repr=False)

    def check(self, record: StepRecord) -> bool:
        """Whether this step is one to pause after."""
        is_true = bool(self.condition(record))
        hit = is_true and (self.every_time or not self._was_true)
        self._was_true = is_true
        self.hits += hit
        return hit


class Breakpoints:
    """The breakpoints of one engine, shared by all its views.

    Args:
        controller: The engine: anything with ``on_step(listener)`` and ``pause()``.

    Attributes:
        stopped_by: (step, label) of the breakpoint that paused the engine last, None before the first.
    """

    def __init__(self, controller: Any) -> None:
        if not hasattr(controller, "on_step"):
            raise ValueError("breakpoints need a live engine: a recording can only be looked at")
        self._breakpoints: list[Breakpoint] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # Weak, so that the table of all breakpoints does not keep its own keys alive.
        self._pause = WeakMethod(controller.pause)
        self.stopped_by: tuple[int, str] | None = None
        controller.on_step(self._after_step)

    def __iter__(self) -> Any:
        return iter(tuple(self._breakpoints))

    def __len__(self) -> int:
        return len(self._breakpoints)

    def add(self, condition: Condition, label: str = "", *, every_time: bool = True) -> Breakpoint:
        """Pause after every step for which a function is true.

        Args:
            condition: Takes a StepRecord, on the engine's thread; must be quick. A condition that raises is removed.
            label: What it waits for, in words.
            every_time: False to pause only when the condition becomes true.

        Example:
            >>> breakpoints.add(lambda step: len(step.waiting) > 3, "more than 3 wait")   # doctest: +SKIP
        """
        label = label or getattr(condition, "__name__", "condition")
        breakpoint_ = Breakpoint(next(self._numbers), label, condition, every_time)
        with self._lock:
            self._breakpoints.append(breakpoint_)
        return breakpoint_

    def on_preemption(self) -> Breakpoint:
        """Pause after a step in which a request is preempted."""
        return self.add(lambda record: record.preempted, "a request is preempted")

    def on_free_blocks_below(self, blocks: int) -> Breakpoint:
        """Pause when fewer than ``blocks`` KV blocks are free after scheduling."""
        blocks = _at_least("blocks", blocks, 1)
        return self.add(lambda record: record.free_blocks < blocks, f"free blocks below {blocks}", every_time=False)

    def on_num_kv_computed(self, request_id: str, tokens: int) -> Breakpoint:
        """Pause when a request has ``tokens`` tokens in the KV cache."""
        tokens = _at_least("tokens", tokens, 1)
        return self.add(
            lambda record: any(
                chunk.request_id == request_id and chunk.start < tokens <= chunk.end for chunk in record.chunks
            ),
            f"{request_id} reaches {tokens} tokens",
        )

    def on_block(self, block: int) -> Breakpoint:
        """Pause when a physical block is put into a block table."""
        block = _at_least("block", block, 1)
        return self.add(
            lambda record: any(block in chunk.new_block_ids for chunk in record.chunks), f"block {block} is taken"
        )

    def remove(self, number: int) -> None:
        """Remove a breakpoint.

        Raises:
            ValueError: There is none with this number.
        """
        with self._lock:
            kept = [breakpoint_ for breakpoint_ in self._breakpoints if breakpoint_.number != number]
            if len(kept) == len(self._breakpoints):
                raise ValueError(f"there is no breakpoint {number!r}")
            self._breakpoints = kept

    def _after_step(self, record: StepRecord) -> None:
        for breakpoint_ in self:
            try:
                hit = breakpoint_.check(record)
            except Exception:
                log.exception("breakpoint %r raised and was removed", breakpoint_.label)
                self.remove(breakpoint_.number)
                continue
            if hit:
                self.stopped_by = record.step, breakpoint_.label
                pause = self._pause()
                if pause is not None:
                    pause()


def _at_least(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


_OF: WeakKeyDictionary[Any, Breakpoints] = WeakKeyDictionary()
_OF_LOCK = threading.Lock()


def breakpoints_of(controller: Any) -> Breakpoints:
    """The breakpoints of an engine.

    Raises:
        ValueError: A recording, which cannot be stopped.
    """
    with _OF_LOCK:
        found = _OF.get(controller)
        if found is None:
            found = _OF[controller] = Breakpoints(controller)
        return found
