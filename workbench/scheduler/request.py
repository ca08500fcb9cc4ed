"""A request and its progress. The scheduler owns it; everything else only reads it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from workbench.config import SamplingParams
    from workbench.scheduler.flight import Flight
    from workbench.trace.lines import RequestInfo

RequestStatus = Literal["waiting", "running", "preempted", "finished"]
FinishReason = Literal["length", "stop", "error", "abort"]


class Grammar(Protocol):
    """The rules of a request's output, as far as the scheduler sees them.

    Attributes:
        is_ready: Whether it has been compiled. Its request waits until then.
        error: Why it cannot be compiled, which ends its request; "" if nothing is wrong.
    """

    @property
    def is_ready(self) -> bool:
        """Whether it has been compiled."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot be compiled."""
        ...

    def release(self) -> None:
        """Give back what it holds: its request has ended."""
        ...


class Request:
    """One prompt on its way to its output.

    All progress is ``num_kv_computed`` against ``len(token_ids)``, and never against the prompt: a preempted
    request computes its prompt *and* the output it already has again.

    Attributes:
        request_id: Unique name.
        token_ids: Prompt and output tokens, one list that grows.
        num_prompt_tokens: Number of prompt tokens among them.
        num_kv_computed: Positions ``[0, num_kv_computed)`` have their KV, or get it in the current step.
            vLLM's ``num_computed_tokens``.
        is_prefill: True until a chunk has been scheduled that reaches the last known token, and again after a
            preemption.
        block_tables: For each KV cache group the physical blocks in logical order, 0 in a place that is not held. A
            list only grows; one whose places become 0 is copied before, and a preemption starts new lists, because
            step records refer to the old ones.
        block_hashes: Chained hash of each full block of ``token_ids``, as far as they have been needed.
        num_cached_blocks: For each group the leading places of the table that the prefix cache has seen already.
        num_removed_blocks: For each group the leading places of the table whose blocks were given back.
        block_boundary: A chunk that ends before it neither needs nor fills a block; 0 if every chunk may. The KV cache
            manager sets it.
        shared_prefix_boundary: End of a prefix that it shares with an earlier request, and that some groups have not
            kept in the prefix cache; 0 for none.
        status: "waiting" (never admitted), "running", "preempted" (waiting again) or "finished".
        finish_reason: "length", "stop", "error" or "abort" once finished.
        priority: Smaller is served first under the "priority" policy.
        arrival_time: Seconds since the start of the trace.
        arrival_step: First step whose scheduling could see the request.
        max_tokens: Maximum number of output tokens.
        max_num_tokens: Number of prompt and output tokens with which it ends.
        sampling: The parameters by which its tokens are chosen.
        num_preemptions: Number of times it lost its KV blocks.
        num_kv_lost: Positions ``[0, num_kv_lost)`` had KV before a preemption threw it away.
        num_ahead: Tokens behind the known ones that its next chunk may compute: drafts, and output that is to come.
        flight: Its drafts and its output that is to come; None if it never had any.
        overtaking_limit: Maximum number of prefill tokens that the scheduler may have computed in all when this prompt
            is complete, once it has been passed over (``workbench.scheduler.partial_prefills``); None before.
        frugal: It is computed without drafts and with as few blocks as possible, because it cannot be served otherwise
            (docs/limits.md).
        cache_salt: Only requests with the same salt find each other's blocks in the prefix cache.
        adapter: Name of the adapter (LoRA) that it is computed with; "" for the model alone.
        grammar: The rules of its output; None if it is free.
        stop_token_ids: Tokens that end the request: its own, and the model's unless ``ignore_eos``.
    """

    __slots__ = (
        "adapter",
        "arrival_step",
        "arrival_time",
        "block_boundary",
        "block_hashes",
        "block_tables",
        "cache_salt",
        "finish_reason",
        "flight",
        "frugal",
        "grammar",
        "is_prefill",
        "max_num_tokens",
        "max_tokens",
        "num_ahead",
        "num_cached_blocks",
        "num_kv_computed",
        "num_kv_lost",
        "num_preemptions",
        "num_prompt_tokens",
        "num_removed_blocks",
        "overtaking_limit",
        "priority",
        "request_id",
        "sampling",
        "shared_prefix_boundary",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        arrival_step: int = 0,
        eos_token_ids: Collection[int] = frozenset(),
        cache_salt: str = "",
        adapter: str = "",
    ) -> None:
        if sampling is None:
            from workbench.config import SamplingParams  # a caller that gives parameters has imported it already

            sampling = SamplingParams()
        self.request_id = request_id
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_kv_computed = 0
        self.is_prefill = True
        self.block_hashes: list[bytes] = []
        self.reset_blocks(1)
        self.shared_prefix_boundary = 0
        self.status: RequestStatus = "waiting"
        self.finish_reason: FinishReason | None = None
        self.priority = priority
        self.arrival_time = arrival_time
        self.arrival_step = arrival_step
        self.max_tokens = sampling.max_tokens
        self.max_num_tokens = self.num_prompt_tokens + sampling.max_tokens
        self.sampling = sampling
        self.num_preemptions = 0
        self.num_kv_lost = 0
        self.num_ahead = 0
        self.flight: Flight | None = None
        self.overtaking_limit: int | None = None
        self.frugal = False
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.grammar: Grammar | None = None
        eos = () if sampling.ignore_eos else eos_token_ids
        self.stop_token_ids: frozenset[int] = frozenset((*sampling.stop_token_ids, *eos))

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, num_kv_computed={self.num_kv_computed})"
        )

    def reset_blocks(self, num_groups: int) -> None:
        """Begin new, empty block tables."""
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_cached_blocks = [0] * num_groups
        self.num_removed_blocks = [0] * num_groups
        self.block_boundary = 0

    @property
    def block_table(self) -> list[int]:
        """The block table of the first group, and of the only one in most models."""
        return self.block_tables[0]

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def draft_token_ids(self) -> Sequence[int]:
        """Draft tokens that its next chunk verifies; -1 for one that is not known yet."""
        return () if self.flight is None else self.flight.drafts

    @property
    def num_output_placeholders(self) -> int:
        """Output tokens that scheduled steps will give it, drafts included; 0 in synchronous scheduling."""
        return 0 if self.flight is None else self.flight.placeholders

    @property
    def num_in_flight_tokens(self) -> int:
        """Tokens of its chunks whose step has not been updated yet; counted in asynchronous scheduling only."""
        return 0 if self.flight is None else self.flight.num_tokens

    @property
    def num_stale_output_tokens(self) -> int:
        """Those of them that were scheduled before its latest preemption."""
        return 0 if self.flight is None else self.flight.stale

    def copy(self) -> Request:
        """A request in the same state that can be scheduled without changing this one. Tokens are shared."""
        clone = copy.copy(self)
        clone.block_tables = [table.copy() for table in self.block_tables]
        clone.num_cached_blocks = self.num_cached_blocks.copy()
        clone.num_removed_blocks = self.num_removed_blocks.copy()
        clone.flight = self.flight and self.flight.copy()
        return clone

    def info(self, prompt: str = "") -> RequestInfo:
        """The request's parameters, as a trace keeps them.

        Args:
            prompt: The prompt as text, when there was one.
        """
        from workbench.trace.lines import RequestInfo

        return RequestInfo(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            prompt_token_ids=tuple(self.prompt_token_ids),
            prompt=prompt,
            max_tokens=self.max_tokens,
            arrival_step=self.arrival_step,
            arrival_time=self.arrival_time,
            priority=self.priority,
            sampling=self.sampling.non_default(),
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )
