"""Three policies to use, to compare and to learn from: see ``workbench.scheduler.policy`` for what a policy is."""

from __future__ import annotations

from typing import Any

from workbench.base.field_checks import integer, number
from workbench.scheduler.policy import PolicyView, SchedulingPolicy
from workbench.scheduler.request import Request


class _ByPlace(SchedulingPolicy):
    """Decodes go first, then the request with the smallest place, running or waiting."""

    def _place(self, request: Request, view: PolicyView) -> Any:
        """A request's place: anything that compares with those of others."""
        raise NotImplementedError

    def running_order(self, view: PolicyView) -> list[Request]:
        """Decodes, which have one token left, then prompts by place."""
        return sorted(view.running, key=lambda request: (request.is_prefill, self._place(request, view)))

    def waiting_order(self, view: PolicyView) -> list[Request]:
        """By place."""
        return sorted(view.waiting, key=lambda request: self._place(request, view))

    def max_chunk(self, request: Request, view: PolicyView) -> int | None:
        """A running prompt leaves room in the step for those that wait and go before it.

        Running requests are served before waiting ones, so a long prompt that is to let others by has to take less.
        """
        if not request.is_prefill or request.status != "running":
            return None
        own = self._place(request, view)
        wanted = sum(view.num_left(other) for other in view.waiting if self._place(other, view) < own)
        return max(1, view.budget - wanted)


class ShortestRemainingFirst(_ByPlace):
    """The request with the fewest tokens left goes first, and waiting counts.

    A request's place is its tokens left plus ``aging`` times the step of its arrival. Of two requests the shorter goes
    first unless the longer has waited for as many more steps as it has more tokens, divided by ``aging``: no stream of
    short requests holds a long one off for longer than that.

    Args:
        aging: Tokens that one step of waiting makes up for.

    Example:
        >>> from workbench import ShortestRemainingFirst, simulate
        >>> requests = [{"id": "long", "prompt": {"len": 90}}, {"id": "short", "prompt": {"len": 9}}]
        >>> simulate({"requests": requests, "config": {"max_num_seqs": 1}}, policy=ShortestRemainingFirst())[0].running
        ('short',)
    """

    def __init__(self, aging: float = 64.0) -> None:
        self.aging = number("aging", aging, 0.0, low_open=True)

    def _place(self, request: Request, view: PolicyView) -> float:
        return view.num_left(request) + self.aging * request.arrival_step


class DecodeFirst(SchedulingPolicy):
    """Decodes go first, and prompts are limited in each step: streams stay even, prompts take longer.

    Args:
        max_prefill_tokens: Maximum number of tokens of one prompt in a step while anything decodes.

    Example:
        >>> from workbench import DecodeFirst, simulate
        >>> requests = [{"id": "chat", "prompt": {"len": 5}}, {"id": "long", "prompt": {"len": 300}, "arrival_step": 2}]
        >>> trace = simulate({"requests": requests}, policy=DecodeFirst(max_prefill_tokens=100))
        >>> [(chunk.request_id, chunk.num_tokens) for chunk in trace[2].chunks]
        [('chat', 1), ('long', 100)]
    """

    def __init__(self, max_prefill_tokens: int = 128) -> None:
        self.max_prefill_tokens = integer("max_prefill_tokens", max_prefill_tokens, 1)

    def running_order(self, view: PolicyView) -> list[Request]:
        """Decodes before prompts, each in the order of admission."""
        return sorted(view.running, key=lambda request: request.is_prefill)

    def max_chunk(self, request: Request, view: PolicyView) -> int | None:
        """The limit on prompts, unless nothing decodes."""
        anything_decodes = any(not other.is_prefill for other in view.running)
        return self.max_prefill_tokens if request.is_prefill and anything_decodes else None


class Deadline(_ByPlace):
    """Earliest deadline first, where a first token is due ``base + per_prompt_token * prompt tokens`` after arrival.

    Requests that are late already go behind those that can still be in time, because hurrying them gains nothing; the
    victim of a shortage is the one whose deadline is farthest away. Needs a clock: the engine has one, a simulation
    has one with a cost model.

    Args:
        base: Seconds.
        per_prompt_token: Seconds per prompt token.

    Example:
        >>> from workbench import CostModel, Deadline, simulate
        >>> requests = [{"id": "long", "prompt": {"len": 900}}, {"id": "short", "prompt": {"len": 9}}]
        >>> workload = {"requests": requests, "config": {"max_num_seqs": 1}}
        >>> simulate(workload, cost_model=CostModel(fixed=0.01), policy=Deadline())[0].running
        ('short',)
    """

    def __init__(self, base: float = 0.5, per_prompt_token: float = 0.001) -> None:
        self.base = number("base", base, 0.0)
        self.per_prompt_token = number("per_prompt_token", per_prompt_token, 0.0)

    def due(self, request: Request) -> float:
        """When the first token is due, in seconds since the start of the trace."""
        return request.arrival_time + self.base + self.per_prompt_token * request.num_prompt_tokens

    def victim(self, view: PolicyView) -> Request:
        """The request whose deadline is farthest away."""
        return max(view.victims, key=self.due)

    def _place(self, request: Request, view: PolicyView) -> tuple[bool, float]:
        due = self.due(request)
        return due < view.time, due
