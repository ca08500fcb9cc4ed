"""Workbench's own scheduler behind the hunt's protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from workbench.analysis.hunt.drive import LiveRequest
from workbench.analysis.hunt.evictions import Judged
from workbench.analysis.hunt.orders import JudgedOrder
from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.admission import check_servable
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.checked import state_of
from workbench.scheduler.eviction import Eviction
from workbench.scheduler.policy import PolicyOrder, SchedulingPolicy, described
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.arrivals import GrammarArrival
from workbench.simulation.run import ArrivingGrammar
from workbench.simulation.workload import read_workload
from workbench.trace.laws import Limits, SchedulerState


class OwnScheduler:
    """A `workbench.scheduler.scheduler.Scheduler`. Its batches are the steps that the laws read.

    Args:
        config: The workload's configuration.
        policy: Makes the policy object, of scheduling or of eviction; None for vLLM's rules.
        make: Makes the scheduler. A step takes a second of its clock.
        as_vllm: It accepts what no schedule can serve, and lets requests wait forever, as vLLM does.

    Attributes:
        judges: Compare the answers of policies with their rules; each has a ``law``, and ``is_on``.

    Raises:
        ValueError: The configuration is refused.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        policy: Callable[[], SchedulingPolicy | Eviction] | None = None,
        make: Callable[..., Scheduler] = Scheduler,
        *,
        as_vllm: bool = False,
    ) -> None:
        self._as_vllm = as_vllm
        self._config: EngineConfig = read_workload({"config": config, "requests": []})[0]
        chosen = policy() if policy else None
        if isinstance(chosen, Eviction):
            caches = self._config.enable_prefix_caching
            self._config, chosen = replace(self._config, eviction=chosen if caches else "lru"), None
        order = None if chosen is None else JudgedOrder(chosen)
        self.scheduler: Scheduler = make(
            self._config,
            clock=lambda: float(self.scheduler.step),
            policy=order,
            **({"as_vllm": True} if as_vllm else {}),
        )
        self.judges: list[Judged | JudgedOrder] = []
        if (policy_order := self.scheduler.order.find(PolicyOrder)) is not None:
            policy_order.logs = False  # `schedule` raises what it would log
        if order is not None:
            order.scheduler = self.scheduler
            self.judges.append(order)
        pool = self.scheduler.kv_cache.block_pool
        self._judged = None if pool.eviction is None else Judged(pool.eviction, pool)
        if self._judged is not None:
            pool.eviction = cast(Eviction, self._judged)
            self.judges.append(self._judged)
        self._num_admitted = 0
        self.depth = 2 if self._config.async_scheduling else 1
        self.limits = Limits.of(described(self._config, self.scheduler.policy))
        self._latest: ScheduledBatch | None = None

    def add(self, request: LiveRequest) -> None:
        """Take a request.

        Raises:
            ValueError: No schedule can serve it.
        """
        if not self._as_vllm:
            check_servable(self._config, request.num_prompt_tokens, request.max_tokens)
        self.scheduler.add_request(self._request(request))

    def foresee(self, requests: Sequence[LiveRequest]) -> None:
        """Learn which requests will come, as in a simulation."""
        self.scheduler.kv_cache.foresee(map(self._request, requests))

    def _request(self, request: LiveRequest) -> Request:
        made = Request(
            request.request_id,
            list(request.token_ids),
            priority=request.priority,
            arrival_time=request.arrival_time,
            arrival_step=self.scheduler.step,
            sampling=SamplingParams(
                max_tokens=request.max_tokens, stop_token_ids=request.stop_token_ids, ignore_eos=True
            ),
            cache_salt=request.cache_salt,
            adapter=request.adapter,
        )
        if request.ready_step is not None:
            made.grammar = ArrivingGrammar(GrammarArrival(request.ready_step), self.scheduler)
        return made

    def abort(self, request_id: str) -> None:
        """End a request."""
        self.scheduler.abort_request(request_id)

    def schedule(self) -> ScheduledBatch:
        """Decide a step.

        Raises:
            Exception: The policy failed. A scheduler alone would use vLLM's rule instead.
        """
        self._latest = self.scheduler.schedule()
        order = self.scheduler.order.find(PolicyOrder)
        if order is not None and order.failure is not None:
            raise order.failure if isinstance(order.failure, Exception) else RuntimeError(repr(order.failure))
        self._num_admitted += len(self._latest.admitted)
        if self._judged is not None:
            self._judged.expect_admissions(self._num_admitted)
        return self._latest

    def update(self, plan: ScheduledBatch, tokens: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Take in the output of the oldest step in flight."""
        assert self._latest is not None
        before = set(self._latest.finish_reasons)
        rows = [tokens.get(chunk.request_id, (0,)) if chunk.samples else None for chunk in plan.chunks]
        self.scheduler.update(plan, rows)
        return {name: reason for name, reason in self._latest.finish_reasons.items() if name not in before}

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Take the draft tokens of the next step."""
        self.scheduler.set_drafts(drafts)

    def counters(self, request_id: str) -> tuple[Any, ...]:
        """The request's tokens; the rest is in ``state()``."""
        return (self.scheduler.requests[request_id].token_ids,)

    def block_tables(self, request_id: str) -> list[list[int]]:
        """The block tables of a request."""
        return self.scheduler.requests[request_id].block_tables

    def free_blocks(self) -> int:
        """The number of free blocks."""
        return self.scheduler.num_free_blocks

    def state(self) -> SchedulerState:
        """The state that the laws read."""
        return state_of(self.scheduler)
