"""One step as ``Scheduler.schedule()`` decided it and ``Scheduler.update()`` completes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from workbench.scheduler.request import Request
from workbench.trace.fields import EMPTY
from workbench.trace.pool_change import NO_CHANGE, PoolChange
from workbench.trace.reasons import Reason
from workbench.trace.records import Arm, Chunk, KernelLaunch, Layout, LimitedBy, StepRecord, TableChange


class ScheduledChunk(msgspec.Struct, gc=False):
    """Tokens ``[start, start + num_tokens)`` of one request, to be computed in this step.

    A struct that the garbage collector does not track: hundreds are made in every step.

    Attributes:
        request: The request; its block table covers the chunk.
        start: ``num_kv_computed`` before the step.
        num_tokens: Tokens of the chunk.
        samples: It reaches the last known token, so the step samples the next one.
        arm: Its role, which says what ``update()`` does with it.
        sampled: The last token that ``update()`` appended; None without one.
        limited_by: The limit that keeps it from being longer.
        new_block_ids: Entries appended to the first KV cache group's block table; the whole table at an admission.
        num_cached_tokens: Tokens found in the prefix cache at this admission.
        num_recomputed_tokens: Tokens whose KV had been there before a preemption.
        text: The text that these tokens added to the output; the engine's output processor sets it.
        drafts: Draft tokens in its last rows; -1 for one that the scheduler does not know. An engine that does know it,
            with asynchronous steps, puts it here before the forward pass.
        sampled_before: Tokens that ``update()`` appended before it: accepted drafts.
        num_accepted: Drafts that the verification accepted, those behind the request's end included.
        ahead: Rejected drafts of earlier steps that ``start`` counts.
        discarded: Its output was thrown away, because the request had ended in the meantime.
        removed: Places of that table that became 0.
        other_groups: The changes of the tables of the groups after the first.
        is_padded: The drafts only fill up the rows of an admission: they are unknown and never accepted.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    arm: Arm
    sampled: int | None = None
    limited_by: LimitedBy = "complete"
    new_block_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    text: str = ""
    drafts: tuple[int, ...] = ()
    sampled_before: tuple[int, ...] = ()
    num_accepted: int = 0
    ahead: int = 0
    discarded: bool = False
    removed: tuple[int, ...] = ()
    other_groups: tuple[TableChange, ...] = ()
    is_padded: bool = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def is_partial_prefill(self) -> bool:
        """More of the prompt follows in a later step."""
        return not self.samples


@dataclass(slots=True)
class ScheduledBatch:
    """The chunks of one step in scheduling order, with every decision and its reason.

    The fields are those of :class:`workbench.trace.StepRecord`, which ``to_record()`` makes of them once ``update()``
    has added what became of the chunks. With asynchronous scheduling ``finish_reasons`` and ``free_blocks_end`` come
    from the update of the batch before, which is made while this one is computed.

    Attributes:
        layout: The KV cache group whose slots the record shows.
        tables: For each chunk the block tables of all groups with their lengths at the end of ``schedule()``; None when
            there is one group, and its table stays as it is until ``to_record()``.
        unscheduled_changes: Blocks that a preempted request had been given in this very step in the groups after the
            first.
        withdrawn_block_ids: Blocks that were cached in this step for chunks that were taken out of the batch again.
        prefill_continued: A running request that was in the middle of its prompt is in the batch, or was.
    """

    step: int
    time: float
    layout: Layout
    token_budget: int
    long_prefill_cap: int
    arrived: tuple[str, ...]
    aborted: tuple[str, ...]
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    preempt_reasons: dict[str, Reason] = field(default_factory=dict)
    unscheduled_block_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    waiting_reason: Reason | None = None
    passed_over: dict[str, Reason] = field(default_factory=dict)
    free_blocks: int = 0
    cached_block_ids: tuple[int, ...] = ()
    finish_reasons: dict[str, str] = field(default_factory=dict)
    free_blocks_end: int = 0
    tables: list[list[tuple[list[int], int]]] | None = None
    unscheduled_changes: dict[str, tuple[TableChange, ...]] = field(default_factory=dict)
    withdrawn_block_ids: tuple[int, ...] = ()
    pool: PoolChange = NO_CHANGE
    pool_end: PoolChange = NO_CHANGE
    num_cached_end: int = 0
    prefill_continued: bool = False
    _chunk_of: dict[str, ScheduledChunk] | None = None

    def chunk_of(self, request: Request) -> ScheduledChunk | None:
        """The chunk of a request; None when it has none."""
        if self._chunk_of is None:
            self._chunk_of = {chunk.request.request_id: chunk for chunk in self.chunks}
        return self._chunk_of.get(request.request_id)

    @property
    def block_size(self) -> int:
        """Tokens per block of the group that ``layout`` names."""
        return self.layout.block_size

    @property
    def num_tokens(self) -> int:
        """Rows of the packed batch."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def has_prefill(self) -> bool:
        """True when any chunk is more than the next token of a request whose prefill is complete."""
        return any(chunk.arm != "decode" for chunk in self.chunks)

    def explain_preemption(self) -> None:
        """Give every waiting request its reason in a step that preempted some, and therefore admitted nobody."""
        for request_id, reason in self.preempt_reasons.items():
            self.passed_over[request_id] = reason.as_preempted()
        self.waiting_reason = replace(reason, rule="preemption", requests=self.preempted)

    def to_record(self, *, kernel: KernelLaunch | None = None, **times: Any) -> StepRecord:
        """The immutable record of the step.

        Args:
            kernel: The launch of the attention kernel.
            **times: Fields of the record that tell times, such as those of a `StepSpan`.
        """
        chunks = [  # field by field: astuple() takes twice the time
            Chunk(
                c.request.request_id, c.start, c.num_tokens, not c.samples, c.arm, c.sampled, c.limited_by,
                c.new_block_ids, c.num_cached_tokens, c.num_recomputed_tokens, c.text, c.drafts, c.sampled_before,
                c.num_accepted, c.ahead, c.discarded, c.removed, c.other_groups,
            )
            for c in self.chunks
        ]  # fmt: skip
        record = StepRecord(
            step=self.step, chunks=tuple(chunks), arrived=self.arrived, admitted=self.admitted, resumed=self.resumed,
            preempted=self.preempted, finished=tuple(self.finish_reasons), aborted=self.aborted, running=self.running,
            waiting=self.waiting, waiting_reason=self.waiting_reason, passed_over=self.passed_over or EMPTY,
            finish_reasons=self.finish_reasons or EMPTY, preempt_reasons=self.preempt_reasons or EMPTY,
            unscheduled_block_ids=self.unscheduled_block_ids or EMPTY,
            unscheduled_changes=self.unscheduled_changes or EMPTY, free_blocks=self.free_blocks,
            free_blocks_end=self.free_blocks_end, cached_block_ids=self.cached_block_ids,
            withdrawn_block_ids=self.withdrawn_block_ids, pool=self.pool, pool_end=self.pool_end,
            num_cached_end=self.num_cached_end, token_budget=self.token_budget,
            long_prefill_cap=self.long_prefill_cap, kernel=kernel,
            **(times if "time" in times else {"time": self.time, **times}),
        )  # fmt: skip
        if self.tables is None:
            record.attach_block_tables(self.layout, [chunk.request.block_tables[0] for chunk in self.chunks])
        else:
            record.attach_tables_of_groups(self.layout, self.tables)
        return record
