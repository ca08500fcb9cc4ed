"""The part of a scheduler that the hunt needs: six methods, and a few more that let it check more.

    class MyScheduler:
        def __init__(self, config): ...          # the workload's configuration, a dict under EngineConfig's names
        def add(self, request): ...              # a LiveRequest: request_id, token_ids, max_tokens, priority, ...
        def abort(self, request_id): ...
        def schedule(self): ...                  # -> Plan([Chunk(request_id, start, num_tokens), ...])
        def update(self, plan, tokens): ...      # tokens: {request_id: [ids]} -> {request_id: "length" | "stop"}
        def block_tables(self, request_id): ...  # -> [[block ids]], one list per KV cache group
        def free_blocks(self): ...               # -> the free block ids, or their number

Block ids count from 1; 0 stands for a place without a block, and the pool's ``num_blocks`` includes it, as in vLLM.
``workbench hunt --scheduler module:factory`` calls the factory with the configuration; a factory that raises ValueError
refuses it. A KV cache whose size the scheduler does not know is told by ``config["num_blocks"]``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from workbench.hunt.drive import LiveRequest, Plan


class Counters(NamedTuple):
    """A scheduler's own counters of a request, which the laws compare with their own recount.

    Attributes:
        token_ids: Its known tokens.
        status: "waiting", "running" or "preempted".
        num_kv_computed: Tokens whose KV is computed.
        num_output_placeholders: Output tokens that steps in flight will give.
        num_in_flight_tokens: Tokens of its chunks in flight.
        num_stale_output_tokens: Those of them that were scheduled before its latest preemption.

    A number of None is not compared.
    """

    token_ids: list[int]
    status: str
    num_kv_computed: int | None = None
    num_output_placeholders: int | None = None
    num_in_flight_tokens: int | None = None
    num_stale_output_tokens: int | None = None


class DrivenScheduler(Protocol):
    """A scheduler as the hunt drives it. See the text above."""

    def add(self, request: LiveRequest) -> None:
        """Take a request; its ``token_ids`` is the prompt, to be copied."""

    def abort(self, request_id: str) -> None:
        """End an unfinished request."""

    def schedule(self) -> Plan:
        """Decide a step."""

    def update(self, plan: Plan, tokens: Mapping[str, Sequence[int]]) -> Mapping[str, str]:
        """Take in the output of the oldest step in flight.

        Args:
            plan: The step.
            tokens: The new tokens of each request whose chunk samples; requests that have ended are left out.

        Returns:
            The requests that end with it, with "length" or "stop".
        """

    def block_tables(self, request_id: str) -> Sequence[Sequence[int]]:
        """The block table of each KV cache group of an unfinished request."""

    def free_blocks(self) -> Collection[int] | int:
        """The free blocks, or their number."""


class TellsMore(DrivenScheduler, Protocol):
    """Optional parts. The laws that need one are checked if the scheduler has it."""

    depth: int
    """Maximum number of steps in flight: 2 with asynchronous scheduling."""

    allows: Collection[str]
    """Rules of `workbench.laws.rules` that it breaks on purpose, by their messages."""

    def foresee(self, requests: Sequence[LiveRequest]) -> None:
        """Learn which requests will come; called once, before the first step."""

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Take the draft tokens of the next step."""

    def queues(self) -> tuple[Sequence[str], Sequence[str]]:
        """The running requests in order of admission, and the waiting ones in queue order."""

    def counters(self, request_id: str) -> Counters:
        """Its own counters of an unfinished request."""

    def pool(self) -> Mapping[str, Any]:
        """The fields of `workbench.laws.SchedulerState` from ``ref_counts`` on."""

    def close(self) -> None:
        """Called when the run is over."""
