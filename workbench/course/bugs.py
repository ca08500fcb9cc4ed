"""Four bugs that inference engines have shipped, to be planted and hunted in notebook 10. Hunt before you read on.

Each one is a small change to a healthy engine and acts while ``planted(name)`` is open. What they have in common is
that nothing crashes: the engine answers, and the answer is wrong, late, or different from yesterday's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from workbench.engine import pipeline, sampler
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.request import Request
from workbench.engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from workbench.engine.scheduler import Scheduler

Patches = Iterator[Any]


def _slots_from_the_first_block() -> Patches:
    """A chunk is taken to begin at the beginning of a block: in vLLM's words, a rounded-up slot mapping."""
    prepare = pipeline.prepare_unified

    def prepare_aligned(batch: ScheduledBatch, block_size: int, **options: Any) -> PackedBatch:
        packed = prepare(batch, block_size, **options)
        for index, chunk in enumerate(batch.chunks):
            if chunk.num_tokens == 1:
                continue
            begin, end = packed.cu_seqlens_q[index : index + 2]
            places = chunk.start // block_size * block_size + np.arange(chunk.num_tokens)
            table = packed.block_table[index].astype(np.int64)
            packed.slot_mapping[begin:end] = table[places // block_size] * block_size + places % block_size
        return packed

    yield patch.object(pipeline, "prepare_unified", prepare_aligned)


def _progress_against_the_prompt() -> Patches:
    """After a preemption only the prompt is computed again, and the output's KV is believed to be there."""
    settle = Scheduler._settle_chunk

    def settle_prompt(self: Scheduler, chunk: ScheduledChunk) -> None:
        request: Request = chunk.request
        is_resumed = request.num_kv_lost > 0 and chunk.start < request.num_prompt_tokens
        if is_resumed and chunk.start + chunk.num_tokens == request.num_tokens:
            settle(self, chunk)
            chunk.num_tokens = request.num_prompt_tokens - chunk.start
        else:
            settle(self, chunk)

    yield patch.object(Scheduler, "_settle_chunk", settle_prompt)


def _one_random_stream() -> Patches:
    """Random numbers come from one generator, and intermediate chunks take one, too."""
    stream = np.random.default_rng(0)
    prepare = pipeline.prepare_unified

    def prepare_and_draw(batch: ScheduledBatch, block_size: int, **options: Any) -> PackedBatch:
        stream.random(sum(not chunk.samples for chunk in batch.chunks))
        return prepare(batch, block_size, **options)

    yield patch.object(pipeline, "prepare_unified", prepare_and_draw)
    yield patch.object(sampler, "keyed_uniform", lambda key, position: float(stream.random()))


def _prompts_first() -> Patches:
    """Prompts in progress take the whole budget before anybody who decodes is looked at."""
    order = Scheduler._running_order

    def prompts_first(self: Scheduler, *arguments: Any) -> list[Request]:
        return sorted(order(self, *arguments), key=lambda request: not request.is_prefill)

    yield patch.object(Scheduler, "_running_order", prompts_first)


BUGS: dict[str, Callable[[], Patches]] = {
    "A": _slots_from_the_first_block,
    "B": _progress_against_the_prompt,
    "C": _one_random_stream,
    "D": _prompts_first,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug in every engine of this process until the block ends.

    Args:
        name: "A", "B", "C" or "D".

    Raises:
        ValueError: Another name.
    """
    if name not in BUGS:
        raise ValueError(f"bug must be one of {', '.join(BUGS)}, got {name!r}")
    with ExitStack() as stack:
        for change in BUGS[name]():
            stack.enter_context(change)
        yield


def unplanted() -> None:
    """Say what the bugs were."""
    for name, bug in BUGS.items():
        print(f"{name}: {bug.__doc__}")
