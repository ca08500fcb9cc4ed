"""Four bugs that inference engines have shipped, for the hunt in notebook 10. Hunt before you read further.

Each bug is a small change to a healthy engine, made while the context of ``planted(name)`` is open. None of them
crashes: the engine answers, and the answer is wrong, late, or different from yesterday's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from workbench.base.field_checks import suggestion
from workbench.engine import sampler, step
from workbench.engine.packed_batch import PackedBatch
from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk
from workbench.scheduler.queues import ServiceOrder
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler

Patches = Iterator[Any]
"""Patches of the engine, as `unittest.mock.patch.object` makes them."""


def _slots_from_block_start() -> Patches:
    """The slots of a chunk are counted from the start of its first block, as if every chunk began at a block."""
    prepare = step.prepare_unified

    def prepare_aligned(batch: ScheduledBatch, block_size: int, **options: Any) -> PackedBatch:
        packed = prepare(batch, block_size, **options)
        for index, chunk in enumerate(batch.chunks):
            if chunk.num_tokens == 1:
                continue
            begin, end = packed.cu_seqlens_q[index : index + 2]
            positions = chunk.start // block_size * block_size + np.arange(chunk.num_tokens)
            table = packed.block_table[index].astype(np.int64)
            packed.slot_mapping[begin:end] = table[positions // block_size] * block_size + positions % block_size
        return packed

    yield patch.object(step, "prepare_unified", prepare_aligned)


def _progress_against_prompt() -> Patches:
    """After a preemption only the prompt is recomputed; the KV of the output is believed to be in the cache."""
    advance = Scheduler._advance

    def advance_prompt(self: Scheduler, chunk: ScheduledChunk) -> None:
        request: Request = chunk.request
        is_resumed = request.num_kv_lost > 0 and chunk.start < request.num_prompt_tokens
        if is_resumed and chunk.start + chunk.num_tokens == request.num_tokens:
            advance(self, chunk)
            chunk.num_tokens = request.num_prompt_tokens - chunk.start
        else:
            advance(self, chunk)

    yield patch.object(Scheduler, "_advance", advance_prompt)


def _shared_random_stream() -> Patches:
    """All requests draw random numbers from one generator, and parts of a prompt draw one too."""
    stream = np.random.default_rng(0)
    prepare = step.prepare_unified

    def prepare_and_draw(batch: ScheduledBatch, block_size: int, **options: Any) -> PackedBatch:
        stream.random(sum(not chunk.samples for chunk in batch.chunks))
        return prepare(batch, block_size, **options)

    yield patch.object(step, "prepare_unified", prepare_and_draw)
    yield patch.object(sampler, "keyed_uniform", lambda key, position: float(stream.random()))


def _prompts_first() -> Patches:
    """Prompts in progress are scheduled before decodes, and take the whole token budget."""
    order = ServiceOrder.running_order

    def prompts_first(self: ServiceOrder, *arguments: Any) -> list[Request]:
        return sorted(order(self, *arguments), key=lambda request: not request.is_prefill)

    yield patch.object(ServiceOrder, "running_order", prompts_first)


BUGS: dict[str, Callable[[], Patches]] = {
    "A": _slots_from_block_start,
    "B": _progress_against_prompt,
    "C": _shared_random_stream,
    "D": _prompts_first,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Context manager: plant a bug in all engines of this process.

    Args:
        name: "A", "B", "C" or "D".

    Raises:
        ValueError: There is no bug of this name.
    """
    if name not in BUGS:
        raise ValueError(f"bug must be one of {', '.join(BUGS)}, got {name!r}{suggestion(name, BUGS)}")
    with ExitStack() as stack:
        for change in BUGS[name]():
            stack.enter_context(change)
        yield


def unplanted() -> None:
    """Print the explanations of the bugs."""
    for name, bug in BUGS.items():
        print(f"{name}: {bug.__doc__}")
