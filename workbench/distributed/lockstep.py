"""Data parallelism: one engine per rank, each with its own requests, that take their steps together.

Replicas of a dense model need nothing of this; they are separate servers behind a router. But a model whose layers
wait for the other ranks (experts that are spread over them, say) hangs unless all ranks run their forward passes
together. So before every step the ranks tell each other what they are about to do, and a rank that has nothing to do
runs a dummy step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from workbench.distributed.link import Link
from workbench.distributed.ranks import SharedRunner
from workbench.engine.config import EngineConfig
from workbench.engine.engine import Engine
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.pipeline import Phases
from workbench.models.load import LoadedModel


class Agreement(NamedTuple):
    """What every rank is about to run.

    Attributes:
        num_tokens: Tokens of each rank's next step, by rank; 0 for a rank without work.
        has_prefill: Whether each rank's next step holds a prefill.
    """

    num_tokens: tuple[int, ...]
    has_prefill: tuple[bool, ...]

    @property
    def num_dummy_tokens(self) -> int:
        """Tokens a rank without work runs: as many as the busiest rank, 0 when nobody has any."""
        return max(self.num_tokens)


def agree(group: mx.distributed.Group, has_prefill: bool, num_tokens: int) -> Agreement:
    """Tell the other ranks about this rank's next step, and learn about theirs; every rank calls this together.

    One sum over the ranks of 2 x size integers, in which each rank fills its own places.

    Args:
        group: The ranks.
        has_prefill: From `Scheduler.peek_next_batch`.
        num_tokens: From `Scheduler.peek_next_batch`.
    """
    told = np.zeros((2, group.size()), dtype=np.int32)
    told[:, group.rank()] = num_tokens, has_prefill
    known = mx.distributed.all_sum(mx.array(told), group=group, stream=mx.cpu).tolist()
    return Agreement(tuple(known[0]), tuple(map(bool, known[1])))


class LockstepEngine(Engine):
    """An engine that takes each step together with the engines of the other ranks.

    ``step()``, ``step_into()`` and ``run()`` are the same calls on every rank: they return when there is nothing to do
    on any of them. Requests may come at any time.

    Args:
        model: This rank's model.
        group: The ranks.
        link: Ends the job when a rank is lost.
        config: See `Engine`.
        **options: See `Engine`.

    Attributes:
        agreement: What the ranks agreed on last.
        num_dummy_steps: Dummy steps this rank has run.
    """

    def __init__(
        self,
        model: LoadedModel,
        group: mx.distributed.Group,
        link: Link,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        self._group = group
        self._link = link
        self.agreement: Agreement | None = None
        self.num_dummy_steps = 0
        super().__init__(model, config, **options)

    def _make_runner(self) -> ModelRunner:
        runner = SharedRunner(self.model, self.config, self._link)
        runner.evaluates_whole_model = True  # layers that wait for each other have to be run by all ranks or by none
        return runner

    def _begin(self) -> Phases | None:
        while True:
            self._empty_inbox()  # not again before the step: it would no longer be the one that was agreed on
            has_prefill, num_tokens = self.scheduler.peek_next_batch()
            try:
                self.agreement = agree(self._group, has_prefill, num_tokens)
            except RuntimeError as problem:
                self._link.fail(f"the ranks cannot agree on a step: {problem}")
            num_dummy_tokens = self.agreement.num_dummy_tokens
            if num_tokens == 0 and num_dummy_tokens > 0:
                self.runner.forward(dummy_batch(num_dummy_tokens, self.config.block_size))
                self.num_dummy_steps += 1
            step = self._next_step()
            if step is not None or num_dummy_tokens == 0:
                return step


class _DummyBatch(PackedBatch):
    """A packed batch whose rows all write one slot, which only a block that nobody reads may do."""

    def __post_init__(self) -> None:
        """Nothing to check: `dummy_batch` makes no other."""


def dummy_batch(num_tokens: int, block_size: int) -> PackedBatch:
    """A batch that costs a forward pass and leaves no trace.

    Every row is a sequence of one token in block 0, the block that the scheduler never gives away; cached blocks stay
    as they are.

    Args:
        num_tokens: Rows.
        block_size: Tokens per KV block.
    """
    rows = np.arange(num_tokens + 1, dtype=np.int32)
    return _DummyBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=np.zeros(num_tokens, dtype=np.int32),
        slot_mapping=np.zeros(num_tokens, dtype=np.int64),
        cu_seqlens_q=rows,
        seqused_k=np.ones(num_tokens, dtype=np.int32),
        block_table=np.zeros((num_tokens, 1), dtype=np.int32),
        logits_rows=rows[:0],
        block_size=block_size,
    )
