"""Concurrent partial prefills: short prompts get through while long ones are being computed, and nobody pays for it.

Three fields of EngineConfig say how; with both limits at None nothing here runs and the scheduler is vLLM V1's.

- ``max_num_partial_prefills``: prompts that are guaranteed to progress in every step. What the decodes leave of the
  token budget is shared out evenly among the prompts in progress and those that may join them. A prompt beyond that
  number is admitted only where it fits whole into what is left.
- ``max_long_partial_prefills``: how many of the prompts in progress may be long. The limit acts at admission and
  nowhere else: a prompt that holds KV blocks progresses in every step until it is done.
- ``long_prefill_token_threshold``: a prompt is long while more than this many tokens are neither in the prefix cache
  nor computed; 0 stands for the token budget. With a limit on, the threshold classifies and caps nothing.

Nothing is left lying: tokens that a prompt does not need of its share go to the others in the same step, so a long
prompt that is alone gets the whole budget.

A long prompt that finds the long slots taken is passed over: it keeps its place and later prompts may overtake it. It
cannot be overtaken for ever, and the bound is one of work, not of time. When a prompt is first passed over, the
prefill tokens in front of it and its own say when its turn would have ended in first-come-first-served order. Later
prompts may put that off by ``OVERTAKING_SHARE`` of those tokens, or by a quarter of a step's budget where that is more.
A prompt that would put it off further waits behind it. So no long prompt waits for its turn much longer than it would
have in first-come-first-served order, whatever arrives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from workbench.engine.config import EngineConfig
from workbench.engine.request import Request

OVERTAKING_SHARE = 0.07
"""How far a long prompt's prefill may be put off by later prompts, as a fraction of the work up to its own end.

A time to first token that is at most a tenth worse than without limits leaves three hundredths for what short prompts
take of the budget while it is being computed.
"""

MAX_SCANNED = 1024
"""Waiting requests looked at in a step at most, so that a step's cost has a bound however long the queue is."""


class Refusal(NamedTuple):
    """Why a waiting request is not admitted now.

    Attributes:
        reason: In words, for the record.
        may_be_overtaken: Whether the requests behind it are looked at all the same.
    """

    reason: str
    may_be_overtaken: bool


class PartialPrefills:
    """Shares and slots of the prompts in progress, for one scheduler.

    Args:
        config: A configuration with at least one of the two limits on.

    Attributes:
        share: Tokens of one prompt in the first round of this step.
        num_computed: Prefill tokens scheduled so far in all: the clock by which overtaking is measured.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.share = sys.maxsize
        self.num_computed = 0
        self._in_progress: list[Request] = []
        self._long: list[Request] = []
        self._projected = 0
        self._slack = sys.maxsize
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        """Take over limits that change between steps."""
        self._budget = config.token_budget
        self._max_num = config.max_num_partial_prefills
        self._max_long = config.max_long_partial_prefills
        self._long_threshold = config.long_prefill_token_threshold or config.token_budget

    def begin_step(self, running: Sequence[Request], num_waiting: int) -> list[Request]:
        """Count the prompts in progress and fix their share.

        Args:
            running: Running requests in the order in which they would be served.
            num_waiting: Waiting requests that there is a seat for.

        Returns:
            The running requests, prompts in progress first: a budget full of decodes leaves them their share.
        """
        self._in_progress = [request for request in running if request.is_prefill]
        self._long = [request for request in self._in_progress if self._is_long(_num_left(request))]
        if self._max_num is None:
            return list(running)
        num_prompts = len(self._in_progress)
        num_shares = max(num_prompts, min(self._max_num, num_prompts + num_waiting), 1)
        for_prompts = max(num_prompts, self._budget - (len(running) - num_prompts))
        self.share = max(1, for_prompts // num_shares)
        return [*self._in_progress, *(request for request in running if not request.is_prefill)]

    def begin_scan(self) -> None:
        """Prepare for a walk along the waiting queue, from its head."""
        self._in_progress = [request for request in self._in_progress if request.is_prefill]
        self._long = [request for request in self._long if request.is_prefill]
        self._projected = self.num_computed + sum(map(_num_left, self._in_progress))
        self._slack = sys.maxsize

    def refuse(self, request: Request, num_uncached: int, budget: int) -> Refusal | None:
        """Whether the next waiting request has to wait on; None when it may be admitted.

        Args:
            request: The next of the queue.
            num_uncached: Its tokens that are not in the prefix cache.
            budget: What is left of the token budget.
        """
        if self._max_long is not None and self._is_long(num_uncached) and self._num(self._long) >= self._max_long:
            self._pass_over(request, num_uncached)
            names = ", ".join(other.request_id for other in self._long if other.is_prefill)
            return Refusal(f"long prompt: max_long_partial_prefills ({self._max_long}) in progress, {names}", True)
        stays_partial = num_uncached > min(budget, self.share)
        if self._max_num is not None and stays_partial and self._num(self._in_progress) >= self._max_num:
            return Refusal(f"max_num_partial_prefills ({self._max_num}) in progress", False)
        if num_uncached > self._slack:
            return Refusal("a long prompt in front has been overtaken as often as it may be", False)
        return None

    def admit(self, request: Request, num_uncached: int) -> None:
        """Take note of a request that is admitted, before its first chunk is."""
        request.overtaking_limit = None
        self._projected += num_uncached
        self._slack -= num_uncached
        self._in_progress.append(request)
        if self._is_long(num_uncached):
            self._long.append(request)

    def _pass_over(self, request: Request, num_uncached: int) -> None:
        """Let later requests overtake this one as far as its limit allows."""
        self._projected += num_uncached
        if request.overtaking_limit is None:
            work = self._projected - self.num_computed
            request.overtaking_limit = self._projected + max(int(OVERTAKING_SHARE * work), self._budget // 4)
        self._slack = min(self._slack, request.overtaking_limit - self._projected)

    def _is_long(self, num_left: int) -> bool:
        return num_left > self._long_threshold

    @staticmethod
    def _num(requests: Sequence[Request]) -> int:
        """How many of them are not through with their prompt."""
        return sum(request.is_prefill for request in requests)


def _num_left(request: Request) -> int:
    return request.num_tokens - request.num_kv_computed
