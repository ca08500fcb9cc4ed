"""Scheduling policies as objects: define an order, a chunk size or a victim in a few lines of Python.

A policy is a subclass of SchedulingPolicy that overrides the decisions it makes; the others stay as in vLLM V1.
It runs in the engine, ``Engine(model, config, policy=MyPolicy())``, and in a simulation, ``simulate(workload,
policy=MyPolicy())``, and every step's record shows what it did. A policy cannot break a rule: budget, seats,
KV blocks and the limits on partial prefills hold for any answer.

    class LongestFirst(SchedulingPolicy):
        def waiting_order(self, view):
            return sorted(view.waiting, key=view.num_left, reverse=True)

Hooks may be called more than once for a step (``peek_next_batch()`` rehearses it), so they should decide from the view
they are given and not count their calls. If a hook raises or gives an invalid answer, that is logged once and vLLM's
rule is used for the decision: a bug in a policy does not stop a running engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from workbench.base.field_checks import refuse_misspelt_methods
from workbench.config import EngineConfig
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.queues import Plan, Queues, ServiceOrder
from workbench.scheduler.request import Request
from workbench.trace.reasons import Reason, Rule

T = TypeVar("T")
log = logging.getLogger("workbench")


class RequestView:
    """A request as a policy sees it: every attribute of `Request`, read-only; lists are tuples.

    Annotations call it a Request, because that is how a policy uses it.
    """

    __slots__ = ("_request",)
    _request: Request

    def __init__(self, request: Request) -> None:
        object.__setattr__(self, "_request", request)

    def __getattr__(self, name: str) -> Any:
        """The attribute of the request."""
        value = getattr(self._request, name)
        return tuple(value) if isinstance(value, list) else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse.

        Raises:
            AttributeError: Always: a changed request would no longer be the one that was checked and recorded.
        """
        raise AttributeError(f"a policy decides and does not change requests: {name} cannot be set")

    def __repr__(self) -> str:
        return repr(self._request)


def _own(shown: Request) -> Request:
    """The scheduler's request behind one that a policy was shown."""
    return getattr(shown, "_request", shown)


class KVCacheView:
    """The KV blocks and the prefix cache as a policy sees them: questions, and nothing that changes them."""

    __slots__ = ("_kv_cache",)

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache

    @property
    def num_free_blocks(self) -> int:
        """Number of free KV blocks."""
        return self._kv_cache.num_free_blocks

    def num_cached_tokens(self, request: Request) -> int:
        """Number of tokens at the start of a waiting request that are found in the prefix cache."""
        return self._kv_cache.get_computed_blocks(_own(request)).num_tokens


@dataclass(frozen=True, slots=True)
class PolicyView:
    """The state that a policy decides from. It is read-only.

    Attributes:
        step: Index of the step that is being scheduled.
        time: Seconds since the start of the trace; 0 in a simulation without a cost model.
        config: Limits in force.
        budget: Tokens of the step that no request has been given yet.
        running: Running requests in the order of their admission.
        waiting: Waiting requests in the order of the queue.
        num_free_blocks: Free KV blocks.
        kv_cache: The KV blocks and the prefix cache.
    """

    step: int
    time: float
    config: EngineConfig
    budget: int
    running: tuple[Request, ...]
    waiting: tuple[Request, ...]
    num_free_blocks: int
    kv_cache: KVCacheView

    @property
    def victims(self) -> tuple[Request, ...]:
        """Running requests that may lose their KV blocks: all but the first, so that one always completes."""
        return self.running[1:] or self.running

    def num_left(self, request: Request) -> int:
        """Tokens of a request that are neither computed nor, while it waits, found in the prefix cache."""
        if request.status == "running":
            return request.num_tokens - request.num_kv_computed
        return request.num_tokens - self.kv_cache.num_cached_tokens(request)


class SchedulingPolicy:
    """Decides as vLLM V1 does; a subclass overrides the methods that decide differently.

    Example:
        >>> from workbench import SchedulingPolicy, simulate
        >>> class ShortPromptsFirst(SchedulingPolicy):
        ...     def waiting_order(self, view):
        ...         return sorted(view.waiting, key=lambda request: request.num_prompt_tokens)
        >>> requests = [{"id": "long", "prompt": {"len": 90}}, {"id": "short", "prompt": {"len": 9}}]
        >>> workload = {"requests": requests, "config": {"max_num_seqs": 1}}
        >>> simulate(workload)[0].running, simulate(workload, policy=ShortPromptsFirst())[0].running
        (('long',), ('short',))
    """

    def __init_subclass__(cls) -> None:
        refuse_misspelt_methods(cls, SchedulingPolicy)

    def running_order(self, view: PolicyView) -> Sequence[Request]:
        """Running requests in the order in which they get tokens; those left out get none in this step."""
        return view.running

    def waiting_order(self, view: PolicyView) -> Sequence[Request]:
        """Waiting requests in the order in which they are admitted; those left out are not admitted in this step.

        The first that finds no KV blocks ends the admissions of the step, so that no request starves.
        """
        return view.waiting

    def max_chunk(self, request: Request, view: PolicyView) -> int | None:
        """Maximum number of tokens of a request in this step, 1 or more; None for no limit."""
        return None

    def victim(self, view: PolicyView) -> Request:
        """The request of ``view.victims`` that loses its KV blocks when they run out."""
        return view.victims[-1]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({values})"


def described(config: EngineConfig, policy: SchedulingPolicy | None) -> dict[str, Any]:
    """A configuration as a trace holds it, with the policy if one is in force."""
    told = config.to_dict() | ({} if policy is None else {"scheduling_policy": repr(policy)})
    return told | ({} if isinstance(config.eviction, str) else {"eviction": repr(config.eviction)})


class PolicyOrder(ServiceOrder):
    """The order of a policy, whose answers are checked before the scheduler acts on them.

    Args:
        config: Limits and policies.
        queues: The requests.
        kv_cache: Their KV blocks.
        policy: Decides.

    Attributes:
        failure: The first error of the policy; vLLM's rule was used instead.
        logs: Whether the first error of each hook is logged.

    Raises:
        ValueError: The object is not a SchedulingPolicy.
    """

    decodes_plainly = False

    def __init__(
        self, config: EngineConfig, queues: Queues, kv_cache: KVCacheManager, policy: SchedulingPolicy
    ) -> None:
        if not isinstance(policy, SchedulingPolicy):
            raise ValueError(f"policy must be a workbench.scheduler.policy.SchedulingPolicy object, got {policy!r}")
        super().__init__(config, queues, kv_cache)
        self.policy = policy
        self.failure: BaseException | None = None
        self.logs = True
        self._told: set[str] = set()
        self._views: dict[Request, Request] = {}
        self._snapshot: object = None

    def running_order(self, batch: ScheduledBatch) -> Sequence[Request]:
        """The policy's order of the running requests."""
        return self._order("running", self.policy.running_order, self._view(batch, batch.token_budget))

    def waiting_order(self, batch: ScheduledBatch, budget: int, num_seats: int) -> Sequence[Request]:
        """The policy's order of the waiting requests."""
        return self._order("waiting", self.policy.waiting_order, self._view(batch, budget))

    def limit_chunk(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """Shorten a chunk to the policy's limit."""
        plan.limit(batch.long_prefill_cap or sys.maxsize, "long_prefill_token_threshold")
        view = self._view(batch, plan.room)

        def ask() -> int | None:
            answer = self.policy.max_chunk(self._shown(plan.request), view)
            if answer is not None and (not isinstance(answer, int) or isinstance(answer, bool) or answer < 1):
                raise ValueError(f"must be None or an integer >= 1, got {answer!r}")
            return answer

        limit = self._ask("max_chunk", ask, None)
        if limit is not None and limit < plan.num_tokens:
            plan.limit(limit, "policy")
            plan.steady = limit
        return super().limit_chunk(plan, batch)

    def not_reached(self) -> Reason:
        """The policy left them out."""
        return Reason("policy", "policy", self.config.policy, text=repr(self.policy))

    def victim(self, batch: ScheduledBatch, budget: int) -> tuple[Request, Rule]:
        """The policy's victim."""
        view = self._view(batch, budget)

        def ask() -> Request:
            answer = self.policy.victim(view)
            if not any(answer is request for request in view.victims):
                raise ValueError(f"must be one of view.victims, got {answer!r}")
            return _own(answer)

        return self._ask("victim", ask, _own(view.victims[-1])), "policy"

    def _view(self, batch: ScheduledBatch, budget: int) -> PolicyView:
        """The present state, as the policy may see it."""
        running, waiting = snapshot = self.queues.snapshot()
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._views = {request: self._shown(request) for request in (*running, *waiting)}
            self._running, self._waiting = (tuple(map(self._shown, queue)) for queue in snapshot)
        free = self.kv_cache.num_free_blocks
        return PolicyView(
            batch.step, batch.time, self.config, budget, self._running, self._waiting, free, KVCacheView(self.kv_cache)
        )

    def _shown(self, request: Request) -> Request:
        """A request as the policy sees it: the same object as long as it is queued."""
        return self._views.get(request) or cast(Request, RequestView(request))

    def _order(
        self,
        queue: Literal["running", "waiting"],
        order: Callable[[PolicyView], Iterable[Request]],
        view: PolicyView,
    ) -> Sequence[Request]:
        allowed: tuple[Request, ...] = getattr(view, queue)

        def ask() -> Sequence[Request]:
            answer = list(order(view))
            known = {id(request) for request in allowed}
            if not known.issuperset(map(id, answer)) or len(set(map(id, answer))) != len(answer):
                raise ValueError(f"must hold requests of view.{queue}, each once, got {answer!r}")
            return [_own(request) for request in answer]

        return self._ask(f"{queue}_order", ask, [_own(request) for request in allowed])

    def _ask(self, hook: str, ask: Callable[[], T], fall_back: T) -> T:
        try:
            return ask()
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # SystemExit too: a policy must not end the run
            self.failure = self.failure or problem
            message = f"{self.policy!r}.{hook}: {type(problem).__name__}: {problem}"
            if self.logs and hook not in self._told:
                self._told.add(hook)
                log.warning("%s; vLLM's rule is used instead", message, exc_info=problem)
            return fall_back
