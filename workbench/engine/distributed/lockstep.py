"""Data parallelism: one engine per rank, each with its own requests, which take their steps together.

Replicas of a dense model do not need this; they are separate servers behind a router. But a model whose layers wait for
the other ranks (such as experts that are spread over them) hangs unless all ranks run their forward passes together. So
before every step each rank announces its next step to the others, and a rank without work runs a dummy step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from workbench.base.compatibility import LOCKSTEP
from workbench.config import EngineConfig, SamplingParams
from workbench.engine.distributed.group import sum_over_ranks
from workbench.engine.distributed.link import Link
from workbench.engine.distributed.ranks import SharedRunner
from workbench.engine.engine import Engine
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import GroupTables, PackedBatch
from workbench.engine.step import Step
from workbench.models.load import LoadedModel
from workbench.trace.kv_groups import KVCacheGroup

if TYPE_CHECKING:
    from workbench.engine.grammar import Grammar


class Agreement(NamedTuple):
    """The next step of every rank.

    Attributes:
        num_tokens: Number of tokens in each rank's next step, by rank; 0 for a rank without work.
        has_prefill: Whether each rank's next step contains a prefill, by rank.
    """

    num_tokens: tuple[int, ...]
    has_prefill: tuple[bool, ...]

    @property
    def num_dummy_tokens(self) -> int:
        """Number of tokens that a rank without work runs: that of the busiest rank, 0 if no rank has work."""
        return max(self.num_tokens)


def agree(group: mx.distributed.Group, has_prefill: bool, num_tokens: int) -> Agreement:
    """Exchange the next steps of all ranks; every rank calls this together.

    One sum over the ranks of 2 x size integers, in which each rank fills its own places.

    Args:
        group: The ranks.
        has_prefill: From `Scheduler.peek_next_batch`.
        num_tokens: From `Scheduler.peek_next_batch`.
    """
    rank, size = group.rank(), group.size()
    announced = [0] * (2 * size)
    announced[rank], announced[size + rank] = num_tokens, int(has_prefill)
    known = sum_over_ranks(group, announced)
    return Agreement(tuple(known[:size]), tuple(map(bool, known[size:])))


class LockstepStep(Step):
    """A step that begins when all ranks have agreed on it.

    Args:
        group: The ranks.
        link: Ends the job when a rank is lost.
        *parts: See `Step`.
        **options: See `Step`.

    Attributes:
        agreement: The latest agreement of the ranks.
        num_dummy_steps: Number of dummy steps that this rank has run.
    """

    def __init__(self, group: mx.distributed.Group, link: Link, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._group = group
        self._link = link
        self.agreement: Agreement | None = None
        self.num_dummy_steps = 0

    def begin(self) -> bool:
        """Agree on the next step; whether there is one for this rank. False if no rank has work."""
        while True:
            self.empty_inbox()  # not again before the step, which would then differ from the agreement
            has_prefill, num_tokens = self.scheduler.peek_next_batch()
            try:
                self.agreement = agree(self._group, has_prefill, num_tokens)
            except RuntimeError as problem:
                self._link.fail(f"the ranks cannot agree on a step: {problem}")
            num_dummy_tokens = self.agreement.num_dummy_tokens
            if num_tokens == 0 and num_dummy_tokens > 0:
                self.runner.forward(dummy_batch(num_dummy_tokens, self.runner.groups))
                self.num_dummy_steps += 1
            if self.has_work() or num_dummy_tokens == 0:
                return self.has_work()


class LockstepEngine(Engine):
    """An engine that takes each step together with the engines of the other ranks.

    Every rank makes the same calls of ``step()``, ``step_into()`` and ``run()``, which return when no rank has work.
    Requests may arrive at any time.

    Args:
        model: This rank's model.
        group: The ranks.
        link: Ends the job when a rank is lost.
        config: See `Engine`.
        **options: See `Engine`.
    """

    _step: LockstepStep
    _situations = (LOCKSTEP,)

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
        super().__init__(model, config, **options)

    def _make_runner(self) -> ModelRunner:
        # Layers that wait for each other run on all ranks or on none.
        return SharedRunner(self.model, self.config, self._link, one_table=False, computes_all=True)

    def _make_step(self, *parts: Any, **options: Any) -> LockstepStep:
        return LockstepStep(self._group, self._link, *parts, **options)

    def _compile(self, sampling: SamplingParams, num_prompt_tokens: int) -> Grammar | None:
        # If a grammar became ready between an agreement and its step, the step would have more tokens than agreed.
        if (grammar := super()._compile(sampling, num_prompt_tokens)) is not None:
            grammar.wait()
        return grammar

    @property
    def agreement(self) -> Agreement | None:
        """The latest agreement of the ranks."""
        return self._step.agreement

    @property
    def num_dummy_steps(self) -> int:
        """Number of dummy steps that this rank has run."""
        return self._step.num_dummy_steps


class _DummyBatch(PackedBatch):
    """A packed batch whose rows all write the same slot, which is harmless only in a block that is never read."""

    def __post_init__(self) -> None:
        """Check nothing: only `dummy_batch` makes one."""


def dummy_batch(num_tokens: int, groups: Sequence[KVCacheGroup]) -> PackedBatch:
    """A batch that runs a forward pass and changes nothing.

    Its rows are one sequence in block 0, which the scheduler never hands out; cached blocks, and the states of
    requests, stay as they are.

    Args:
        num_tokens: Number of rows.
        groups: The KV cache groups of the model.
    """

    def tables(group: KVCacheGroup) -> GroupTables:
        slots = np.zeros(num_tokens if group.is_attention else 0, dtype=np.int64)
        return GroupTables(np.zeros((1, -(-num_tokens // group.block_size)), np.int32), slots, group.block_size)

    first = tables(next((group for group in groups if group.is_attention), groups[0]))
    return _DummyBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=np.zeros(num_tokens, dtype=np.int32),
        slot_mapping=first.slot_mapping,
        cu_seqlens_q=np.array([0, num_tokens], dtype=np.int32),
        seqused_k=np.array([num_tokens], dtype=np.int32),
        block_table=first.block_table,
        logits_rows=np.zeros(0, dtype=np.int32),
        block_size=first.block_size,
        request_ids=("",),
        by_group=tuple(map(tables, groups)) if len(groups) > 1 else (),
    )
