"""What one call of ``Scheduler.schedule()`` decided, and the record that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from workbench.engine.request import Request
from workbench.trace.records import Arm, Chunk, KernelLaunch, LimitedBy, StepRecord


class ScheduledChunk(msgspec.Struct, gc=False):
    """Tokens ``[start, start + num_tokens)`` of one request, to be computed in this step.

    A struct that the garbage collector does not track: hundreds are made in every step.

    Attributes:
        request: The request; its block table covers the chunk.
        start: ``num_kv_computed`` before the step.
        num_tokens: Tokens of the chunk.
        arm: How ``update()`` handles it.
        limited_by: Why it is not longer.
        samples: It reaches the last known token, so the step samples the next one.
        new_block_ids: Blocks appended to the block table for it; the whole table at an admission.
        num_cached_tokens: Tokens found in the prefix cache at this admission.
        num_recomputed_tokens: Tokens whose KV had been there before a preemption.
    """

    request: Request
    start: int
    num_tokens: int
    arm: Arm
    limited_by: LimitedBy = "complete"
    samples: bool = True
    new_block_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0


@dataclass(slots=True)
class ScheduledBatch:
    """The chunks of one step in scheduling order, with every decision and its reason.

    The fields are those of :class:`workbench.trace.StepRecord`, which this becomes in ``Scheduler.update()``.
    """

    step: int
    time: float
    token_budget: int
    long_prefill_cap: int
    arrived: tuple[str, ...]
    aborted: tuple[str, ...]
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    preempt_reasons: dict[str, str] = field(default_factory=dict)
    unscheduled_block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    waiting_reason: str = ""
    passed_over: dict[str, str] = field(default_factory=dict)
    free_blocks: int = 0
    cached_block_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the packed batch."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def has_prefill(self) -> bool:
        """True when any chunk is more than the next token of a request whose prefill is complete."""
        return any(chunk.arm != "decode" for chunk in self.chunks)

    def explain_waiting(self, budget: int, no_seat: str) -> None:
        """Say why waiting requests were left out, where the walk along the queue has not said so already.

        Args:
            budget: What is left of the token budget.
            no_seat: The reason that remains when nothing else was in the way.
        """
        if self.preempted:
            self.waiting_reason = f"{', '.join(self.preempted)} preempted in this step: nobody is admitted"
            for request_id, reason in self.preempt_reasons.items():
                self.passed_over[request_id] = f"preempted in this step: {reason}"
        elif self.waiting_reason:
            return
        elif budget <= 0:
            self.waiting_reason = f"token budget used up ({self.token_budget - budget} of {self.token_budget})"
        else:
            self.waiting_reason = no_seat

    def to_record(
        self,
        chunks: list[Chunk],
        finish_reasons: dict[str, str],
        *,
        block_size: int,
        free_blocks_end: int,
        timings: dict[str, float] | None = None,
        kernel: KernelLaunch | None = None,
    ) -> StepRecord:
        """The immutable record of the step.

        Args:
            chunks: The chunks with what became of them, in scheduling order.
            finish_reasons: Why requests ended with the step, in the order in which they did.
            block_size: Tokens per KV block.
            free_blocks_end: Free KV blocks now.
            timings: Seconds per phase; kept, not copied, so that a caller may add the phase it is in.
            kernel: What the attention kernel was handed.
        """
        record = StepRecord(
            step=self.step,
            time=self.time,
            chunks=tuple(chunks),
            arrived=self.arrived,
            admitted=tuple(self.admitted),
            resumed=tuple(self.resumed),
            preempted=tuple(self.preempted),
            finished=tuple(finish_reasons),
            aborted=self.aborted,
            running=self.running,
            waiting=self.waiting,
            waiting_reason=self.waiting_reason,
            passed_over=self.passed_over,
            finish_reasons=finish_reasons,
            preempt_reasons=self.preempt_reasons,
            unscheduled_block_ids=self.unscheduled_block_ids,
            free_blocks=self.free_blocks,
            free_blocks_end=free_blocks_end,
            cached_block_ids=self.cached_block_ids,
            token_budget=self.token_budget,
            long_prefill_cap=self.long_prefill_cap,
            timings={} if timings is None else timings,
            kernel=kernel,
        )
        record.attach_block_tables(block_size, [chunk.request.block_table for chunk in self.chunks])
        return record
