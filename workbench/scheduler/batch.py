"""One step as ``Scheduler.schedule()`` decided it and ``Scheduler.update()`` completes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from workbench.scheduler.request import FinishReason, Request
from workbench.trace.fields import EMPTY
from workbench.trace.pool_change import NO_CHANGE, PoolChange
from workbench.trace.reasons import Reason
from workbench.trace.records import Arm, Chunk, KernelLaunch, Layout, LimitedBy, Load, StepRecord, TableChange

Sampled = Sequence[int | Sequence[int] | None]
"""For each chunk its token, or its tokens; None for a chunk that does not sample."""


def only(tokens: int | Sequence[int]) -> int:
    """The token of a chunk without drafts, which may come in a list."""
    return tokens[0] if isinstance(tokens, Sequence) else tokens


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

    @property
    def num_kv(self) -> int:
        """Length of the request's KV as its last row saw it."""
        return self.start - self.ahead + self.num_tokens

    @property
    def num_prompt_rows(self) -> int:
        """Its first rows whose logits are wanted because the token behind each of them is one of the prompt."""
        if self.request.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(self.start + self.num_tokens, self.request.num_prompt_tokens - 1) - self.start)

    @property
    def num_logits(self) -> int:
        """Number of last rows whose logits are wanted: one for the next token and for each draft, or all."""
        return self.num_tokens if self.num_prompt_rows else (1 + len(self.drafts) if self.samples else 0)

    def check_output(self, tokens: int | Sequence[int] | None, finish: Mapping[str, FinishReason]) -> None:
        """Check that tokens fit this chunk; see `ScheduledBatch.check_outputs`."""
        name, most = self.request_id, 1 + len(self.drafts)
        if (tokens is None) is self.samples and finish.get(name) != "error":
            what = "samples and needs a token" if self.samples else "samples nothing and takes no token"
            raise ValueError(f"the chunk of request {name!r} {what}, got {tokens!r}")
        if isinstance(tokens, Sequence) and not 1 <= len(tokens) <= most:
            drafts = f"from 1 to {most} tokens: its accepted drafts and the token after them"
            allowed = drafts if most > 1 else "1 token"
            raise ValueError(
                f"the chunk of request {name!r} has {most - 1} drafts and gives {allowed}, got {len(tokens)}"
            )


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
        loads: KV that was loaded from the second tier.
        prefill_continued: A running request that was in the middle of its prompt is in the batch, or was.
        end: The end of the step, and
        timings: the seconds of its phases: set by a simulation, which knows both.
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
    loads: tuple[Load, ...] = ()
    pool: PoolChange = NO_CHANGE
    pool_end: PoolChange = NO_CHANGE
    num_cached_end: int = 0
    prefill_continued: bool = False
    end: float = 0.0
    timings: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    _chunk_of: dict[str, ScheduledChunk] | None = None

    @property
    def finished(self) -> tuple[str, ...]:
        """Requests that ended with this step, in order."""
        return tuple(self.finish_reasons)

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

    def check_outputs(self, sampled: Sampled, finish: Mapping[str, FinishReason]) -> None:
        """Check that tokens and ends fit the batch.

        Raises:
            ValueError: They do not.
        """
        if len(sampled) != len(self.chunks):
            raise ValueError(f"sampled has {len(sampled)} entries, the batch has {len(self.chunks)} chunks")
        for chunk, tokens in zip(self.chunks, sampled):
            if type(tokens) is not int or not chunk.samples:  # not the one token that most chunks give
                chunk.check_output(tokens, finish)
        if unknown := set(finish).difference(chunk.request_id for chunk in self.chunks) if finish else ():
            raise ValueError(f"finish names {sorted(unknown)}, which are not in the batch")

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
            withdrawn_block_ids=self.withdrawn_block_ids, loads=self.loads, pool=self.pool, pool_end=self.pool_end,
            num_cached_end=self.num_cached_end, token_budget=self.token_budget,
            long_prefill_cap=self.long_prefill_cap, kernel=kernel,
            **(times if "time" in times else {"time": self.time, **times}),
        )  # fmt: skip
        if self.tables is None:
            record.attach_block_tables(self.layout, [chunk.request.block_tables[0] for chunk in self.chunks])
        else:
            record.attach_tables_of_groups(self.layout, self.tables)
        return record
