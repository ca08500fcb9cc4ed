"""A request and its progress. The scheduler owns it; everyone else reads it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from workbench.engine.config import SamplingParams
from workbench.trace.records import RequestInfo

RequestStatus = Literal["waiting", "running", "preempted", "finished"]
FinishReason = Literal["length", "stop", "error", "abort"]


class Request:
    """One prompt on its way to its output.

    All progress is ``num_kv_computed`` against ``len(token_ids)``, and never against the prompt: a preempted
    request computes its prompt *and* the output it already has again.

    Attributes:
        request_id: Unique name.
        token_ids: Prompt and output tokens, one list that grows.
        num_prompt_tokens: How many of them are the prompt.
        num_kv_computed: Positions ``[0, num_kv_computed)`` have their KV, or get it in the step under way.
            vLLM's ``num_computed_tokens``.
        is_prefill: True until a chunk has been scheduled that reaches the last known token, and again after a
            preemption.
        block_table: Physical KV blocks in logical order. It only grows; a preemption starts a new list,
            because step records refer to the old one.
        block_hashes: Chained hash of each full block of ``token_ids``, as far as it has been needed.
        num_published_blocks: Leading blocks of the table that the prefix cache already knows.
        status: "waiting" (never admitted), "running", "preempted" (waiting again) or "finished".
        finish_reason: "length", "stop", "error" or "abort" once finished.
        priority: Smaller is served first under the "priority" policy.
        arrival_time: Seconds since the start of the trace.
        arrival_step: First step whose scheduling could see the request.
        max_tokens: Output tokens at most.
        sampling: How its tokens are chosen.
        num_preemptions: How often it lost its KV blocks.
        num_kv_lost: Positions ``[0, num_kv_lost)`` had KV before a preemption threw it away.
        overtaking_limit: Prefill tokens the scheduler may have computed in all by the time this prompt is through,
            once it has been passed over (``workbench.engine.partial_prefills``); None before.
        stop_token_ids: Tokens that end the request: its own, and the model's unless ``ignore_eos``.
    """

    __slots__ = (
        "arrival_step",
        "arrival_time",
        "block_hashes",
        "block_table",
        "finish_reason",
        "is_prefill",
        "max_tokens",
        "num_kv_computed",
        "num_kv_lost",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "overtaking_limit",
        "priority",
        "request_id",
        "sampling",
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
    ) -> None:
        sampling = sampling or SamplingParams()
        self.request_id = request_id
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_kv_computed = 0
        self.is_prefill = True
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0
        self.status: RequestStatus = "waiting"
        self.finish_reason: FinishReason | None = None
        self.priority = priority
        self.arrival_time = arrival_time
        self.arrival_step = arrival_step
        self.max_tokens = sampling.max_tokens
        self.sampling = sampling
        self.num_preemptions = 0
        self.num_kv_lost = 0
        self.overtaking_limit: int | None = None
        eos = () if sampling.ignore_eos else eos_token_ids
        self.stop_token_ids: frozenset[int] = frozenset((*sampling.stop_token_ids, *eos))

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status}, {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} output tokens, num_kv_computed={self.num_kv_computed})"
        )

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
    def is_finished(self) -> bool:
        """True once the request has ended, for whatever reason."""
        return self.status == "finished"

    def check_stop(self, token: int, max_model_len: int) -> FinishReason | None:
        """Why the request ends with ``token``, which has just been appended; None when it goes on.

        A stop token counts before a length limit, as in vLLM.
        """
        if token in self.stop_token_ids:
            return "stop"
        num_tokens = len(self.token_ids)
        if num_tokens - self.num_prompt_tokens >= self.max_tokens or num_tokens >= max_model_len:
            return "length"
        return None

    def copy(self) -> Request:
        """A request in the same state that can be scheduled without changing this one. Tokens are shared."""
        clone = Request.__new__(Request)
        for name in Request.__slots__:
            setattr(clone, name, getattr(self, name))
        clone.block_table = self.block_table.copy()
        return clone

    def info(self, prompt: str = "") -> RequestInfo:
        """What the request asked for, as a trace keeps it.

        Args:
            prompt: The prompt as text, when there was one.
        """
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
        )
