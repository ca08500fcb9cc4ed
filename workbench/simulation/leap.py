"""A simulated run that schedules consecutive decodes of the same requests at once.

Most steps of a server decode the requests of the step before. Until one of them ends, or another request arrives, their
order, blocks and hits follow from the first of these steps. The tokens of a simulation are known in advance, so the
scheduler is shown those of several steps: it plans one chunk with all of them for each request, as it would for the
rows of accepted drafts, and takes the blocks that it would have taken step by step. Only the durations are computed for
each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from workbench.config import EngineConfig
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import Features, StepCost
from workbench.simulation.run import Follow, SimulatedRun


class FeatureCost(StepCost, Protocol):
    """Gives the duration of a step, by its chunks or by its features."""

    def seconds(self, features: Features, /) -> float:
        """Duration of the next step."""


@dataclass(frozen=True)
class Leap:
    """The steps that a batch stands for.

    Attributes:
        ends: The end of each step.
        free_blocks: Free KV blocks after each step was scheduled.
    """

    ends: list[float]
    free_blocks: list[int]


class LeapingRun(SimulatedRun):
    """A run on a clock whose batches may stand for several steps; nothing but the number of batches differs.

    Leaps need a single group of full attention, vLLM's order and eviction, and no drafts; other runs go step by step.

    Args:
        config: Configuration of the run.
        arrivals: The requests in order of ``arrives_at``; those that are aborted have a ``timeout``.
        cost_model: Gives the duration of a step.
        next_tokens: Gives the next tokens of a request, as many as are asked for.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
        as_vllm: Let requests wait forever where vLLM does.
        follow: As for `SimulatedRun`.

    Attributes:
        leaps: The steps of each batch that stands for several, by the batch's step.
    """

    def __init__(
        self,
        config: EngineConfig,
        arrivals: Iterator[Arrival],
        cost_model: FeatureCost,
        next_tokens: Callable[[Request, int], list[int]],
        policy: SchedulingPolicy | None = None,
        *,
        as_vllm: bool = False,
        follow: Follow | None = None,
    ) -> None:
        super().__init__(config, arrivals, cost_model, policy, as_vllm=as_vllm, follow=follow)
        self.leaps: dict[int, Leap] = {}
        self._cost, self._next_tokens = cost_model, next_tokens
        self._is_async = int(config.async_scheduling)
        scheduler = self.scheduler
        self._can_leap = (
            [group.kind for group in config.cache_groups] == ["full_attention"]
            and not (config.num_speculative_tokens or scheduler.policy)
            and config.max_num_partial_prefills is None
            and config.max_long_partial_prefills is None
            and config.second_tier is None
            and scheduler.kv_cache.block_pool.eviction is None
        )

    def advance(self, sample_token: Callable[[Request], int]) -> ScheduledBatch | None:
        """Take an iteration, or several; ``leaps`` has the steps of the batch then."""
        most = self._num_steady_steps() if self._can_leap else 0
        return self._leap(most, sample_token) if most > 1 else super().advance(sample_token)

    def _num_steady_steps(self) -> int:
        """A number of steps in which all do nothing but decode, if no event or stop token comes before their end."""
        scheduler, config = self.scheduler, self.scheduler.config
        running, ahead = scheduler.running, self._is_async
        arrives = self._upcoming is not None and self._upcoming.arrival_step > scheduler.step
        if not running or arrives or (scheduler.num_waiting and len(running) < scheduler.max_running):
            return 0
        free_each = scheduler.num_free_blocks // len(running)
        most = min(config.token_budget // len(running), free_each * scheduler.kv_cache.block_size)
        most = min(most, config.long_prefill_token_threshold or most)
        longest = scheduler.max_model_len - 1
        for request in running:
            num_tokens = len(request.token_ids)
            is_decode = not request.is_prefill and request.num_kv_computed == num_tokens - 1 + ahead
            if not is_decode or request.num_ahead != ahead or request.frugal:
                return 0
            left = min(request.max_num_tokens - ahead, longest) - num_tokens
            if left < most:
                most = left
        return most

    def _leap(self, most: int, sample_token: Callable[[Request], int]) -> ScheduledBatch | None:
        """Take iterations until a request arrives, is aborted or ends with a stop token, but at most ``most``."""
        running, ahead = list(self.scheduler.running), self._is_async
        for request in [request for request in running if request.stop_token_ids]:
            if not request.stop_token_ids.isdisjoint(tokens := self._next_tokens(request, most)):
                ends = min(tokens.index(token) for token in request.stop_token_ids if token in tokens)
                most = min(most, ends + 1 - ahead)
        num_read = sum([request.num_kv_computed for request in running])
        times = [max(self.now, self._busy_until)]
        event = self._next_event
        due = sys.float_info.max if event is None else event
        for index in range(most):
            # When the step is scheduled, the output of the step before is known; with asynchronous scheduling that of
            # the one before it.
            if index and due <= times[index - ahead]:
                break
            num_read += len(running)
            times.append(times[-1] + self._cost.seconds((len(running), 0, num_read, 0)))
        num_steps = len(times) - 1
        if not num_steps:
            return super().advance(sample_token)
        if num_steps > 1:
            for request in running:
                request.token_ids += self._next_tokens(request, num_steps - 1)
        free_blocks = self._free_blocks(running, num_steps)
        batch = self.scheduler.schedule()
        assert [chunk.num_tokens for chunk in batch.chunks] == [num_steps] * len(running)
        for chunk in batch.chunks:
            if chunk.new_block_ids:  # a decode of one token fills no block before its last one
                self.scheduler.kv_cache.cache_full_blocks(chunk.request, chunk.request.num_kv_computed)
        batch.time, batch.end = times[0], times[-1]
        batch.timings = {"forward": times[-1] - times[0]}
        self._busy_until = batch.end
        self.leaps[batch.step] = Leap(times[1:], free_blocks)
        self._in_flight.append(batch)
        self._num_empty = self._num_idle = 0
        done = self._complete(sample_token)
        if ahead:
            self.now = times[-2]
        return done

    def _free_blocks(self, running: list[Request], num_steps: int) -> list[int]:
        """Free blocks after each of the next steps was scheduled."""
        taken, block_size = [0] * num_steps, self.scheduler.kv_cache.block_size
        for request in running:
            first = len(request.block_table) * block_size - request.num_kv_computed
            for index in range(first, num_steps, block_size):
                taken[index] += 1
        free, counts = self.scheduler.num_free_blocks, []
        for count in taken:
            free -= count
            counts.append(free)
        return counts
