"""Scheduling policies as objects: write an ordering, a chunk size or a victim of your own in a few lines of Python.

A policy is a subclass of SchedulingPolicy that overrides what it wants to decide; everything else stays as in vLLM V1.
It runs in the engine, ``Engine(model, config, policy=MyPolicy())``, and in a simulation, ``simulate(workload,
policy=MyPolicy())``, and every step's record shows what it did. What a policy cannot do is break a rule: budget,
seats, KV blocks and the limits on partial prefills hold whatever it answers.

    class LongestFirst(SchedulingPolicy):
        def waiting_order(self, view):
            return sorted(view.waiting, key=view.num_left, reverse=True)

Hooks may be called more than once for a step (``peek_next_batch()`` rehearses it), so they should decide from what
they see rather than count their calls. A hook that raises, or answers what it must not, is logged once and vLLM's rule
is used for that decision: a policy in the making does not take a running engine down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engine.config import EngineConfig
from workbench.engine.kv_cache_manager import KVCacheManager
from workbench.engine.request import Request

log = logging.getLogger("workbench")


@dataclass(frozen=True, slots=True)
class PolicyView:
    """What a policy decides from. Look, do not touch: requests are the scheduler's own.

    Attributes:
        step: Index of the step that is being scheduled.
        time: Seconds since the start of the trace; 0 in a simulation without a cost model.
        config: Limits in force.
        budget: Tokens of the step that nobody has been given yet.
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
    kv_cache: KVCacheManager

    @property
    def victims(self) -> tuple[Request, ...]:
        """Running requests that may lose their KV blocks: all but the first, so that somebody always gets through."""
        return self.running[1:] or self.running

    def num_left(self, request: Request) -> int:
        """Tokens of a request that are neither computed nor, while it waits, found in the prefix cache."""
        if request.status == "running":
            return request.num_tokens - request.num_kv_computed
        return request.num_tokens - len(self.kv_cache.find_cached_blocks(request)) * self.config.block_size


class SchedulingPolicy:
    """Decides in vLLM V1's way; override what is to be decided differently."""

    def running_order(self, view: PolicyView) -> Sequence[Request]:
        """Running requests in the order in which they get tokens; those left out get none in this step."""
        return view.running

    def waiting_order(self, view: PolicyView) -> Sequence[Request]:
        """Waiting requests in the order in which they are admitted; those left out are not looked at in this step.

        The first that finds no KV blocks ends the admissions of the step, so that nobody starves for want of blocks.
        """
        return view.waiting

    def max_chunk(self, request: Request, view: PolicyView) -> int | None:
        """Tokens of a request in this step at most, 1 or more; None for no limit of the policy's own."""
        return None

    def victim(self, view: PolicyView) -> Request:
        """The request of ``view.victims`` that loses its KV blocks when they run out."""
        return view.victims[-1]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({values})"


def described(config: EngineConfig, policy: SchedulingPolicy | None) -> dict[str, Any]:
    """A configuration as a trace holds it, with the policy where there is one."""
    return config.to_dict() | ({} if policy is None else {"scheduling_policy": repr(policy)})


class CheckedPolicy:
    """A policy whose answers are checked before the scheduler acts on them.

    Args:
        policy: The policy.

    Raises:
        ValueError: The object is not a SchedulingPolicy.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        if not isinstance(policy, SchedulingPolicy):
            raise ValueError(f"policy must be a workbench.engine.policy.SchedulingPolicy object, got {policy!r}")
        self.policy = policy
        self._told: set[str] = set()

    def running_order(self, view: PolicyView) -> Sequence[Request]:
        """The policy's order of the running requests."""
        return self._order("running_order", self.policy.running_order, view, view.running)

    def waiting_order(self, view: PolicyView) -> Sequence[Request]:
        """The policy's order of the waiting requests."""
        return self._order("waiting_order", self.policy.waiting_order, view, view.waiting)

    def max_chunk(self, request: Request, view: PolicyView) -> int | None:
        """The policy's limit on the chunk of a request."""

        def check(answer: Any) -> int | None:
            if answer is not None and (not isinstance(answer, int) or isinstance(answer, bool) or answer < 1):
                raise ValueError(f"must be None or an integer >= 1, got {answer!r}")
            return answer

        return self._ask("max_chunk", lambda: check(self.policy.max_chunk(request, view)), lambda: None)

    def victim(self, view: PolicyView) -> Request:
        """The policy's victim."""

        def check(answer: Any) -> Request:
            if not any(answer is request for request in view.victims):
                raise ValueError(f"must be one of view.victims, got {answer!r}")
            return answer

        return self._ask("victim", lambda: check(self.policy.victim(view)), lambda: view.victims[-1])

    def _order(
        self,
        hook: str,
        answer: Callable[[PolicyView], Iterable[Request]],
        view: PolicyView,
        allowed: tuple[Request, ...],
    ) -> Sequence[Request]:
        def checked() -> Sequence[Request]:
            order = list(answer(view))
            known = {id(request) for request in allowed}
            if not known.issuperset(map(id, order)) or len(set(map(id, order))) != len(order):
                raise ValueError(f"must hold requests of view.{hook.partition('_')[0]}, each once, got {order!r}")
            return order

        return self._ask(hook, checked, lambda: allowed)

    def _ask(self, hook: str, ask: Callable[[], Any], fall_back: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as problem:
            message = f"{self.policy!r}.{hook}: {type(problem).__name__}: {problem}"
            if hook not in self._told:
                self._told.add(hook)
                log.warning("%s; vLLM's rule is used instead", message, exc_info=problem)
            return fall_back()
