"""The subject of the laws: the limits in force, and a scheduler's state as a neutral object.

A scheduler of any kind can be checked from its steps alone, in the form of a `workbench.trace.StepRecord`; the live
batch of our scheduler has the same attributes. An adapter that also gives a :class:`SchedulerState` lets the laws
compare the scheduler's books with the recount.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from workbench.trace.kv_groups import KVCacheGroup, read_groups
from workbench.trace.laws.known import Known


class RequestState(Protocol):
    """An unfinished request; `workbench.scheduler.request.Request` says what each attribute means."""

    request_id: str
    token_ids: list[int]
    status: Any
    num_kv_computed: int

    @property
    def num_output_placeholders(self) -> int:
        """See `workbench.scheduler.request.Request`."""
        ...

    @property
    def num_in_flight_tokens(self) -> int:
        """See `workbench.scheduler.request.Request`."""
        ...

    @property
    def num_stale_output_tokens(self) -> int:
        """See `workbench.scheduler.request.Request`."""
        ...


Step = Any
"""A `workbench.trace.StepRecord`, or a live batch, which has the same attributes and may still be incomplete."""

Chunk = Any
"""One of its chunks."""


def is_special(chunk: Chunk) -> bool:
    """Whether our scheduler serves a chunk's request frugally, or wants the logits of its prompt: without a hit."""
    request = getattr(chunk, "request", None)
    return request is not None and (request.frugal or request.sampling.prompt_logprobs is not None)


@dataclass(frozen=True)
class Limits:
    """The limits in force, from a configuration by field name: an EngineConfig's, or that of a recording.

    Attributes:
        token_budget: Tokens of a step; 0 if it is not known.
        max_running: Seats; None if it is not known.
        max_model_len: Longest sequence in tokens; None for no limit.
        groups: The KV cache groups.
        policy: "fcfs" or "priority".
        has_policy: A policy object decides the order of service.
        has_own_order: It does, or the limits on partial prefills do.
        asynchronous: A step is scheduled while the one before it is in flight.
        num_drafts: Maximum number of drafts of a request in a step.
        writes_ahead: The proposer of drafts writes KV behind a chunk, or may do so.
        num_lookahead_tokens: Slots behind a chunk that the proposer of drafts writes; 0 if it is not known.
        prefix_caching: Blocks are found again by their content.
        chunked_prefill: Prompts may be split over steps.
        admits_whole: A request is admitted only if all of its tokens fit into free blocks.
        num_watermark_blocks: Blocks that an admission leaves free while others run.
        num_blocks: KV blocks of the pool, block 0 included; None if it is not known.
        max_partial_prefills: ``max_num_partial_prefills``.
        max_long_partial_prefills: The field of this name.
        long_threshold: Tokens beyond which a prompt is long.
        caps_chunks: Whether the threshold is also the longest chunk.
        adapts_cap: Whether the longest chunk is at least a fair share of the budget.
        max_in_flight: Maximum number of tokens in the steps in flight; 0 if it is not known.
    """

    token_budget: int
    max_running: int | None
    max_model_len: int | None
    groups: tuple[KVCacheGroup, ...]
    policy: str
    has_policy: bool
    has_own_order: bool
    asynchronous: bool
    num_drafts: int
    writes_ahead: bool
    num_lookahead_tokens: int
    prefix_caching: bool
    chunked_prefill: bool
    admits_whole: bool
    num_watermark_blocks: int
    num_blocks: int | None
    max_partial_prefills: int | None
    max_long_partial_prefills: int | None
    long_threshold: int
    caps_chunks: bool
    adapts_cap: bool
    max_in_flight: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """Read a configuration; what it does not contain is not limited."""
        batched = config.get("max_num_batched_tokens") or 0
        budget = config.get("max_num_scheduled_tokens") or batched
        num_blocks = config.get("num_blocks")
        num_blocks = num_blocks if isinstance(num_blocks, int) else None
        partial, long = config.get("max_num_partial_prefills"), config.get("max_long_partial_prefills")
        num_drafts = config.get("num_speculative_tokens") or config.get("num_spec_tokens") or 0
        given = config.get("speculative", {"method": ""})  # a recording does not say which
        method = (given or {}).get("method", "ngram")
        return cls(
            token_budget=budget,
            max_running=config.get("max_num_active_seqs") or config.get("max_num_seqs"),
            max_model_len=config.get("max_model_len"),
            groups=read_groups(config),
            policy=config.get("policy") or "fcfs",
            has_policy="scheduling_policy" in config,
            has_own_order=partial is not None or long is not None or "scheduling_policy" in config,
            asynchronous=bool(config.get("async_scheduling")),
            num_drafts=num_drafts,
            writes_ahead=num_drafts > 0 and method not in ("ngram", "custom"),
            num_lookahead_tokens=num_drafts if method in ("draft_model", "eagle") else 0,
            prefix_caching=bool(config.get("enable_prefix_caching")),
            chunked_prefill=bool(config.get("enable_chunked_prefill", True)),
            admits_whole=bool(config.get("scheduler_reserve_full_isl", True)),
            num_watermark_blocks=int((config.get("watermark") or 0.0) * (num_blocks or 0)),
            num_blocks=num_blocks,
            max_partial_prefills=partial,
            max_long_partial_prefills=long,
            long_threshold=config.get("long_prefill_token_threshold") or budget,
            caps_chunks=bool(config.get("long_prefill_token_threshold")) and partial is long is None,
            adapts_cap=bool(config.get("long_prefill_token_threshold_adaptive")),
            max_in_flight=batched * (2 if config.get("async_scheduling") else 1),
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether there is one KV cache group, of full attention."""
        return len(self.groups) == 1 and self.groups[0].kind == "full_attention"

    @cached_property
    def block_size(self) -> int:
        """Tokens per block of the first group."""
        return self.groups[0].block_size

    @cached_property
    def has_exact_tables(self) -> bool:
        """Whether a request holds the blocks of its computed tokens, and no other one."""
        return self.is_plain and not self.num_drafts and not self.asynchronous

    @cached_property
    def recycled(self) -> tuple[tuple[int, int, int], ...]:
        """The groups whose blocks are given back: index, block size, and the tokens before a row that it reads."""
        return tuple(
            (index, group.block_size, group.sliding_window - 1 if group.sliding_window else 1)
            for index, group in enumerate(self.groups)
            if group.sliding_window or (group.kind == "mamba" and self.prefix_caching)
        )

    @cached_property
    def caches_states(self) -> bool:
        """Whether chunks end where a state of recurrent layers can be cached."""
        return self.prefix_caching and any(group.kind == "mamba" for group in self.groups)


class SchedulerState(NamedTuple):
    """A scheduler's state at one moment. It refers to the scheduler's own lists and is read at once.

    The first three are enough for the law of blocks.

    Attributes:
        num_blocks: KV blocks of the pool, block 0 included; it is never handed out.
        free_blocks: Ids of the free blocks, in a set or the like; or their number.
        tables: The block tables of the requests that hold blocks: a list of block ids for each KV cache group, 0 in a
            place without a block. Requests that hold none may be left out.
        requests: Unfinished requests by id; None if their counters are not known.
        running: Running requests in the order of their admission, with ``requests``.
        waiting: Waiting requests in queue order, with ``requests``.
        ref_counts: Number of tables that hold each block, by block id; None if the scheduler counts none.
        cached_blocks: The blocks that the prefix cache can find, with their hashes; None if it is not known.
        blocks_by_hash: The same the other way round; None if it is not known.
        block_keys: For a request, a KV cache group and a place of its table, the hashes under which the block may be
            cached: those of its tokens that end inside it, in order, and the number of them in a full block. The
            request has ``tokens``, ``salt`` and a list ``hashes`` in which those of its blocks may be kept. None if the
            scheduler's hashes cannot be recomputed.
    """

    num_blocks: int
    free_blocks: Collection[int] | int
    tables: Mapping[str, list[list[int]]]
    requests: Mapping[str, RequestState] | None = None
    running: Collection[RequestState] = ()
    waiting: Collection[RequestState] = ()
    ref_counts: Sequence[int] | None = None
    cached_blocks: Mapping[int, bytes] | None = None
    blocks_by_hash: Mapping[bytes, Sequence[int]] | None = None
    block_keys: Callable[[Known, int, int], tuple[Sequence[bytes], int]] | None = None
