"""A scheduler under a workload, without a model: requests come and go when they are due, and time passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from workbench.engine.config import EngineConfig
from workbench.engine.cost_model import CostModel
from workbench.engine.policy import SchedulingPolicy
from workbench.engine.request import Request
from workbench.engine.scheduler import Scheduler
from workbench.engine.workload import Arrival
from workbench.trace import StepRecord

STUCK_AFTER = 3
"""Steps without a single token, with requests left, after which none of them will go on by itself."""


class SimulatedRun:
    """What simulations share. For each step ``arrive()``, then ``step()``, until it is ``over`` or ``stuck``.

    Args:
        config: Configuration of the first step.
        arrivals: The requests in order of ``arrival_step`` and ``arrives_at``; read one by one as the run gets there.
        cost_model: How long a step takes; None for a run without a clock, where no time passes.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.

    Attributes:
        scheduler: The scheduler.
        now: Seconds since the start, at the end of the latest step.
    """

    def __init__(
        self,
        config: EngineConfig,
        arrivals: Iterator[Arrival],
        cost_model: CostModel | None,
        policy: SchedulingPolicy | None,
    ) -> None:
        # Without a cost model steps take no time: a record of 0 seconds says so, and equal runs give equal traces.
        self.scheduler = Scheduler(config, clock=lambda: self.now, policy=policy)
        self.now = 0.0
        self._cost_model = cost_model
        self._arrivals = arrivals
        self._upcoming = next(arrivals, None)
        self._aborts: list[tuple[int, int, str]] = []  # of requests that have arrived: (step, order of arrival, id)
        self._num_arrived = 0
        self._num_empty = 0
        self._num_idle = 0

    @property
    def over(self) -> bool:
        """Every request has come and ended."""
        return self._upcoming is None and not self.scheduler.has_unfinished_requests()

    @property
    def stuck(self) -> bool:
        """Requests are left that can never be scheduled, and nothing is to come that could change it."""
        return self._num_idle >= STUCK_AFTER and self.scheduler.has_unfinished_requests()

    def arrive(self) -> list[Request]:
        """Queue the requests that are due before the next step, and abort those that are given up.

        Returns:
            The requests that are new.
        """
        scheduler = self.scheduler
        nothing_goes_on = self._num_empty >= STUCK_AFTER or not scheduler.has_unfinished_requests()
        if self._cost_model is not None and self._upcoming is not None and nothing_goes_on:
            self.now = max(self.now, self._upcoming.arrives_at or 0.0)
        new = []
        while (arrival := self._upcoming) is not None and self._is_due(arrival):
            request = arrival.to_request()
            request.arrival_step = scheduler.step
            if self._cost_model is not None and arrival.arrives_at is None:
                request.arrival_time = self.now
            scheduler.add_request(request)
            new.append(request)
            self._num_arrived += 1
            if arrival.abort_step is not None:
                heappush(self._aborts, (arrival.abort_step, self._num_arrived, arrival.request_id))
            self._upcoming = next(self._arrivals, None)
        while self._aborts and self._aborts[0][0] <= scheduler.step:
            scheduler.abort_request(heappop(self._aborts)[2])
        return new

    def _is_due(self, arrival: Arrival) -> bool:
        if arrival.arrival_step > self.scheduler.step:
            return False
        return self._cost_model is None or (arrival.arrives_at or 0.0) <= self.now

    def step(self, sample_token: Callable[[Request], int]) -> StepRecord:
        """Take a step.

        Args:
            sample_token: The next token of a request, whose ``token_ids`` holds all tokens before it.
        """
        batch = self.scheduler.schedule()
        seconds = self._cost_model.step_seconds(batch.chunks) if self._cost_model is not None and batch.chunks else 0.0
        record = self.scheduler.update(
            batch,
            [sample_token(chunk.request) if chunk.samples else None for chunk in batch.chunks],
            timings={"forward": seconds} if seconds else None,
        )
        self.now += seconds
        if record.chunks:
            self._num_empty = self._num_idle = 0
        else:
            self._num_empty += 1
            self._num_idle = 0 if record.arrived or self._something_to_come() else self._num_idle + 1
        return record

    def _something_to_come(self) -> bool:
        aborts = any(request_id in self.scheduler.requests for _, _, request_id in self._aborts)
        return self._upcoming is not None or aborts
