"""Judges the built-in scheduling policies: their orders, chunks and victims are written a second time here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from workbench.analysis.hunt.watch import BrokenLaw
from workbench.scheduler.policies import Deadline, DecodeFirst, ShortestRemainingFirst
from workbench.scheduler.policy import PolicyView, SchedulingPolicy
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.trace.laws import Broken


class JudgedOrder(SchedulingPolicy):
    """Stands between a scheduler and its policy; a policy that is not built in is not judged.

    Args:
        policy: The policy.

    Attributes:
        law: The law that is judged.
        is_on: Whether it is.
        scheduler: The scheduler.

    Raises:
        BrokenLaw: An answer is not that of the policy's rule.
    """

    law, is_on = "order", True
    scheduler: Scheduler

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy

    def __repr__(self) -> str:
        return repr(self._policy)

    def running_order(self, view: PolicyView) -> Sequence[Request]:
        """See `SchedulingPolicy.running_order`."""
        answer = self._policy.running_order(view)
        self._compare(answer, view.running, view, running=True)
        return answer

    def waiting_order(self, view: PolicyView) -> Sequence[Request]:
        """See `SchedulingPolicy.waiting_order`."""
        answer = self._policy.waiting_order(view)
        self._compare(answer, view.waiting, view, running=False)
        return answer

    def max_chunk(self, request: Request, view: PolicyView) -> int | None:
        """See `SchedulingPolicy.max_chunk`."""
        answer = self._policy.max_chunk(request, view)
        if type(self._policy) in _KNOWN:
            right = self._longest(request, view)
            self._expect(answer == right, view, request, f"its chunk has at most {answer} tokens, not {right}")
        return answer

    def victim(self, view: PolicyView) -> Request:
        """See `SchedulingPolicy.victim`."""
        answer = self._policy.victim(view)
        if type(self._policy) in _KNOWN:
            candidates = view.running[1:] or view.running
            right = candidates[-1]
            if isinstance(self._policy, Deadline):
                right = min(candidates, key=lambda other: -self._due(other, self._policy))
            self._expect(answer is right, view, answer, f"it is preempted, not {right.request_id!r}")
        return answer

    def _compare(self, answer: Sequence[Request], queue: Sequence[Request], view: PolicyView, *, running: bool) -> None:
        """Everybody is in the answer, in the order of the rule; equal ones keep the order of the queue."""
        if type(self._policy) not in _KNOWN:
            return
        place = {request.request_id: number for number, request in enumerate(queue)}
        left_out = place.keys() - {request.request_id for request in answer}
        self._expect(not left_out, view, None, f"{sorted(left_out)} are left out")
        ranks = {
            name: (running and queue[number].is_prefill, self._rank(queue[number], view), number)
            for name, number in place.items()
        }
        for first, second in pairwise(answer):
            in_order = ranks[first.request_id] < ranks[second.request_id]
            self._expect(in_order, view, second, f"it is served after {first.request_id!r}")

    def _rank(self, request: Request, view: PolicyView) -> Any:
        """The smaller the earlier."""
        policy = self._policy
        if isinstance(policy, ShortestRemainingFirst):
            return self._num_left(request) + policy.aging * request.arrival_step
        if isinstance(policy, Deadline):
            due = self._due(request, policy)
            return (due < view.time, due)
        return 0

    def _num_left(self, request: Request) -> int:
        """Tokens that are neither computed nor, before an admission, in the prefix cache."""
        own = self.scheduler.requests[request.request_id]
        if own.status == "running":
            return len(own.token_ids) - own.num_kv_computed
        return len(own.token_ids) - self.scheduler.kv_cache.get_computed_blocks(own).num_tokens

    @staticmethod
    def _due(request: Request, policy: Any) -> float:
        expected: float = request.num_prompt_tokens * policy.per_prompt_token + policy.base
        return request.arrival_time + expected

    def _longest(self, request: Request, view: PolicyView) -> int | None:
        """Prompts leave room for decodes, or for those that wait and are served before them."""
        if not request.is_prefill:
            return None
        if isinstance(self._policy, DecodeFirst):
            decodes = [other for other in view.running if not other.is_prefill]
            return self._policy.max_prefill_tokens if decodes else None
        if request.status != "running":
            return None
        rank = self._rank(request, view)
        return max(1, view.budget - sum(self._num_left(o) for o in view.waiting if self._rank(o, view) < rank))

    def _expect(self, holds: bool, view: PolicyView, request: Request | None, message: str) -> None:
        if self.is_on and not holds:
            name = "" if request is None else request.request_id
            said = f"a policy breaks its own rule: {message} ({self._policy!r})"
            raise BrokenLaw(Broken(self.law, view.step, name, said))


_KNOWN = (ShortestRemainingFirst, DecodeFirst, Deadline)
