"""The record of one step: what was chosen, why, where it lies in memory and what came out.

Every view, metric and export reads these records and nothing else. A record is small because it holds
*changes*: a chunk carries the KV blocks that were added to its request's table in this step. The full table is
still at hand (`StepRecord.block_tables`), because block tables only ever grow: a record keeps a reference to
the request's append-only list and the length it had. A preempted request starts a new list when it resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from workbench.trace import display
from workbench.trace.bounds import BlockId, Count, Rows, Seconds, TokenId, Tokens, Window

SCHEMA_VERSION = 1
"""Version of the trace file format. A reader refuses a file of another version by name."""

MAX_MASK_CELLS = 2**28
"""Largest attention mask that is built, in cells (256 MiB)."""

Arm = Literal["decode", "new_final", "intermediate", "cached_final"]
"""How a scheduled chunk is handled after the forward pass.

``decode``: one new token of a request whose prefill is complete; samples.
``new_final``: the whole remaining prompt of a request first scheduled in this step; samples.
``intermediate``: a prompt chunk with more prompt to follow; samples nothing.
``cached_final``: the last prompt chunk of a request admitted in an earlier step (or resumed); samples.
"""

LimitedBy = Literal[
    "complete", "token_budget", "long_prefill_token_threshold", "partial_prefill_slot", "max_model_len", "policy"
]
"""Why a chunk is not longer. ``complete`` means it reaches the request's last known token."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens ``[start, start + num_tokens)`` of one request, computed in one step.

    Attributes:
        request_id: The request.
        start: ``num_kv_computed`` of the request before the step.
        num_tokens: Rows of the packed batch that belong to this chunk.
        is_partial_prefill: More of the prompt follows in a later step.
        arm: Which of the four post-processing arms handled the chunk.
        sampled: The sampled token id, None when this chunk samples nothing.
        limited_by: Why the chunk is not longer.
        new_block_ids: Physical KV blocks appended to the block table in this step. For a request admitted or
            resumed in this step this is the whole table, prefix-cache hits first.
        num_cached_tokens: Tokens found in the prefix cache at this admission (0 when not admitted in this step).
        num_recomputed_tokens: Tokens of this chunk whose KV had been computed before a preemption threw it away.
        text: Text this step's token added to the output ("" without a tokenizer).
    """

    request_id: str
    start: Tokens
    num_tokens: Rows
    is_partial_prefill: bool
    arm: Arm
    sampled: TokenId | None
    limited_by: LimitedBy
    new_block_ids: tuple[BlockId, ...] = ()
    num_cached_tokens: Tokens = 0
    num_recomputed_tokens: Tokens = 0
    text: str = ""

    @property
    def end(self) -> int:
        """``num_kv_computed`` of the request after the step."""
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """True for a decode row."""
        return self.arm == "decode"


class WorkItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One item of the attention work list: some query rows of a sequence against a range of its KV.

    Attributes:
        seq: Index of the sequence in the packed batch (its chunk's index).
        q_start: First query row, counted in the packed batch.
        num_rows: Query rows of the item.
        kv_start: First KV position read.
        kv_end: One past the last KV position read.
        split: Index of this KV split; partial results of a row are merged when there is more than one.
        num_splits: KV splits of these query rows.
    """

    seq: Count
    q_start: Tokens
    num_rows: Rows
    kv_start: Tokens
    kv_end: Tokens
    split: Count = 0
    num_splits: Rows = 1


class KernelLaunch(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the attention kernel of a step was handed; the same for every layer with the same window.

    Attributes:
        backend: Name of the attention backend that ran.
        grid: Launch grid in threads (x, y, z); empty where the backend has no grid.
        threadgroup: Threads per threadgroup (x, y, z); empty where there are none.
        block_q: Query rows per work item at most.
        block_kv: KV positions per inner tile.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements per head.
        dtype: Element type of q and of the KV cache, such as "float32".
        windows: Sliding window of each layer, -1 for full attention; a single entry when all layers agree.
        work_items: The work list of the layers whose window is ``windows[0]``.
        details: Further facts of a backend (measured bytes, a self-test's result), by name.
    """

    backend: str
    grid: tuple[Count, ...] = ()
    threadgroup: tuple[Count, ...] = ()
    block_q: Count = 1
    block_kv: Count = 1
    num_heads: Count = 0
    num_kv_heads: Count = 0
    head_dim: Count = 0
    dtype: str = ""
    windows: tuple[Window, ...] = (-1,)
    work_items: tuple[WorkItem, ...] = ()
    details: dict[str, Any] = {}


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a request in a step, with its reason: a row of the event log."""

    step: int
    kind: Literal["arrive", "admit", "resume", "preempt", "finish", "abort"]
    request_id: str
    reason: str = ""


class RequestInfo(msgspec.Struct, frozen=True, omit_defaults=True, tag="request", tag_field="kind"):
    """What a request asked for, written to the trace when it arrives.

    Attributes:
        request_id: The request.
        num_prompt_tokens: Length of the prompt in tokens.
        prompt_token_ids: The prompt; empty when a recording leaves tokens out.
        prompt: The prompt as text, when there was one.
        max_tokens: Output tokens at most.
        arrival_step: The first step whose scheduling could see the request.
        arrival_time: Seconds since the start of the trace.
        priority: Smaller is served first under the "priority" policy.
        sampling: Sampling parameters that differ from the defaults, by name.
    """

    request_id: str
    num_prompt_tokens: Rows
    prompt_token_ids: tuple[TokenId, ...] = ()
    prompt: str = ""
    max_tokens: Count = 16
    arrival_step: Count = 0
    arrival_time: Seconds = 0.0
    priority: int = 0
    sampling: dict[str, Any] = {}


class TraceMeta(msgspec.Struct, frozen=True, tag="meta", tag_field="kind"):
    """First line of a trace: where it comes from and under which configuration.

    Attributes:
        schema_version: Version of this format.
        source: "engine", "simulation", or another engine's name and version, such as "vllm 0.33.0".
        config: The engine configuration by field name.
        model: Facts about the model (name, layers, heads, dtype), by name.
        versions: Versions of the software that wrote the trace.
        created: Wall-clock time of the first step, seconds since the epoch.
    """

    schema_version: int = SCHEMA_VERSION
    source: str = "engine"
    config: dict[str, Any] = {}
    model: dict[str, Any] = {}
    versions: dict[str, str] = {}
    created: Seconds = 0.0


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True, dict=True, tag="step", tag_field="kind"):
    """One engine step. Immutable; all sequences are in scheduling order.

    Attributes:
        step: Index of the step.
        time: Start of the step in seconds since the start of the trace.
        chunks: What was scheduled, in scheduling order; ``chunks[i]`` is sequence ``i`` of the packed batch.
        arrived: Requests added since the previous step.
        admitted: Requests taken from the waiting queue for the first time.
        resumed: Preempted requests taken back from the waiting queue.
        preempted: Requests that lost their KV blocks, in order.
        finished: Requests that ended with this step, in order.
        aborted: Requests aborted before this step was scheduled.
        running: Running requests after scheduling, in admission order.
        waiting: Waiting requests after scheduling, in queue order.
        waiting_reason: Why the waiting requests that are not named in ``passed_over`` were left out.
        passed_over: Reasons of waiting requests that have one of their own.
        finish_reasons: "length", "stop", "error" or "abort" for each request in ``finished``.
        preempt_reasons: Why each request in ``preempted`` was chosen.
        unscheduled_block_ids: Blocks that a request in ``preempted`` had been given in this very step, before it was
            taken out of the batch again; they are in no chunk.
        free_blocks: Free KV blocks after scheduling, before finished requests gave theirs back.
        free_blocks_end: Free KV blocks after the step.
        cached_block_ids: Blocks whose content was published to the prefix cache in this step.
        token_budget: ``max_num_batched_tokens`` in force.
        long_prefill_cap: Chunk cap in force in this step, 0 for none.
        timings: Seconds spent in "schedule", "prepare", "forward", "sample" and "update".
        kernel: What the attention kernel was handed; None in a simulation.
    """

    step: Count
    time: Seconds = 0.0
    chunks: tuple[Chunk, ...] = ()
    arrived: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    waiting_reason: str = ""
    passed_over: dict[str, str] = {}
    finish_reasons: dict[str, str] = {}
    preempt_reasons: dict[str, str] = {}
    unscheduled_block_ids: dict[str, tuple[BlockId, ...]] = {}
    free_blocks: Count = 0
    free_blocks_end: Count = 0
    cached_block_ids: tuple[BlockId, ...] = ()
    token_budget: Count = 0
    long_prefill_cap: Count = 0
    timings: dict[str, Seconds] = {}
    kernel: KernelLaunch | None = None

    # -- block tables: attached by whoever appends the record to a trace -------------------------------------

    def attach_block_tables(self, block_size: int, tables: Sequence[list[int]]) -> None:
        """Give the record its full block tables. Called once, by the scheduler or by a trace that is loaded.

        Args:
            block_size: Tokens per KV block.
            tables: For each chunk the request's append-only list of block ids; the present length is kept.
        """
        self.__dict__["_block_size"] = block_size
        # Two tuples rather than one of pairs: the cyclic garbage collector then has one object a step to look at.
        self.__dict__["_tables"] = tuple(tables)
        self.__dict__["_table_lengths"] = tuple(map(len, tables))

    @property
    def has_block_tables(self) -> bool:
        """Whether the record is part of a trace, or was made by a scheduler that knows its block tables."""
        return "_tables" in self.__dict__

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        try:
            return self.__dict__["_block_size"]
        except KeyError:
            raise AttributeError(
                "this StepRecord is not part of a Trace: block tables come from the records before it; "
                "use Trace.load(path)[step]"
            ) from None

    def block_table(self, index: int) -> list[int]:
        """The block table of ``chunks[index]`` after scheduling, as physical block ids in logical order."""
        _ = self.block_size
        return self.__dict__["_tables"][index][: self.__dict__["_table_lengths"][index]]

    @property
    def block_tables(self) -> dict[str, list[int]]:
        """Full block table after scheduling, for each scheduled request."""
        return {chunk.request_id: self.block_table(i) for i, chunk in enumerate(self.chunks)}

    # -- what follows from the chunks ------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Rows of the packed batch, T."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_decode_tokens(self) -> int:
        """Rows that are decodes."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.arm == "decode")

    @property
    def num_prefill_tokens(self) -> int:
        """Rows that belong to prompt chunks (or recomputed output of a resumed request)."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def num_kv_computed(self) -> dict[str, int]:
        """KV progress after this step, for each scheduled request (vLLM's ``num_computed_tokens``)."""
        return {chunk.request_id: chunk.end for chunk in self.chunks}

    @property
    def not_scheduled(self) -> dict[str, str]:
        """The reason for every waiting request that was left out, in queue order."""
        return {rid: self.passed_over.get(rid, self.waiting_reason) for rid in self.waiting}

    @property
    def cu_seqlens_q(self) -> list[int]:
        """Cumulative query lengths, ``[0, n0, n0 + n1, ...]``; sequence i owns rows [cu[i], cu[i + 1])."""
        bounds = [0]
        for chunk in self.chunks:
            bounds.append(bounds[-1] + chunk.num_tokens)
        return bounds

    @property
    def seqused_k(self) -> list[int]:
        """KV length of each sequence, this step's tokens included."""
        return [chunk.end for chunk in self.chunks]

    @cached_property
    def positions(self) -> np.ndarray:
        """Position of every packed row in its own sequence, int32 [T]."""
        parts = [np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in self.chunks]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @cached_property
    def slot_mapping(self) -> np.ndarray:
        """KV slot (block id * block_size + offset) that every packed row writes, int64 [T]."""
        size = self.block_size
        parts = []
        for index, chunk in enumerate(self.chunks):
            positions = np.arange(chunk.start, chunk.end, dtype=np.int64)
            table = np.asarray(self.block_table(index), dtype=np.int64)
            parts.append(table[positions // size] * size + positions % size)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def mask(self) -> np.ndarray:
        """Block-diagonal causal mask, bool [T, total_kv]; True where a row may attend.

        Columns are the KV positions of the sequences one after another, in the order of ``chunks``.

        Raises:
            ValueError: The mask would have more than MAX_MASK_CELLS cells; it grows with T times the KV length.
        """
        ends = np.asarray(self.seqused_k, dtype=np.int64)
        cells = self.num_tokens * int(ends.sum())
        if cells > MAX_MASK_CELLS:
            raise ValueError(
                f"the mask of step {self.step} would have {cells} cells, allowed are {MAX_MASK_CELLS}: "
                "cu_seqlens_q, positions and seqused_k say the same in less space"
            )
        mask = np.zeros((self.num_tokens, int(ends.sum())), dtype=bool)
        row = column = 0
        for chunk in self.chunks:
            rows = np.arange(chunk.start, chunk.end)[:, None]
            keys = np.arange(chunk.end)[None, :]
            mask[row : row + chunk.num_tokens, column : column + chunk.end] = keys <= rows
            row, column = row + chunk.num_tokens, column + chunk.end
        return mask

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that happened to requests in this step, with reasons."""
        hits = {chunk.request_id: chunk.num_cached_tokens for chunk in self.chunks}

        def hit(rid: str) -> str:
            return f"{hits[rid]} tokens found in the prefix cache" if hits.get(rid) else ""

        return (
            *(Event(self.step, "arrive", rid) for rid in self.arrived),
            *(Event(self.step, "abort", rid) for rid in self.aborted),
            *(Event(self.step, "preempt", rid, self.preempt_reasons.get(rid, "")) for rid in self.preempted),
            *(Event(self.step, "admit", rid, hit(rid)) for rid in self.admitted),
            *(Event(self.step, "resume", rid, hit(rid)) for rid in self.resumed),
            *(Event(self.step, "finish", rid, self.finish_reasons.get(rid, "")) for rid in self.finished),
        )

    def _repr_html_(self) -> str | None:
        return display.html("step", self)

    def chunk(self, request_id: str) -> Chunk:
        """The chunk of a request in this step.

        Raises:
            KeyError: The request was not scheduled; the message says why.
        """
        for chunk in self.chunks:
            if chunk.request_id == request_id:
                return chunk
        reason = self.not_scheduled.get(request_id, "it is not waiting either")
        raise KeyError(f"request {request_id!r} was not scheduled in step {self.step}: {reason}")


class Keyframe(msgspec.Struct, frozen=True, tag="keyframe", tag_field="kind"):
    """The scheduler's memory before a step, so that a trace can begin in the middle of a run.

    Attributes:
        step: The step that follows.
        block_tables: Block table of every request that holds KV blocks, in order of admission.
        num_kv_computed: KV progress of the same requests.
        free_block_ids: The free queue, next to be handed out first.
        cached_block_ids: Every block whose content is in the prefix cache, owned or free.
    """

    step: Count
    block_tables: dict[str, tuple[BlockId, ...]] = {}
    num_kv_computed: dict[str, Tokens] = {}
    free_block_ids: tuple[BlockId, ...] = ()
    cached_block_ids: tuple[BlockId, ...] = ()


TraceEndReason = Literal["", "done", "stuck", "max_steps", "cut"]
"""How a trace ended: "" while it is live, "done" when every request ended, "stuck" when nothing more could be
scheduled, "max_steps" when the steps asked for were taken, "cut" when its file ends too early."""


class TraceEnd(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """Last line of a trace: how it ended and how many steps came before."""

    reason: TraceEndReason = ""
    num_steps: Count = 0


TraceLine = TraceMeta | RequestInfo | Keyframe | StepRecord | TraceEnd
"""What a line of a trace file decodes to, told apart by its "kind" field."""
