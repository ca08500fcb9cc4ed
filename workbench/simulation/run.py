"""A scheduler under a workload, without a model: requests arrive and are aborted when due, and time passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from workbench.config import EngineConfig
from workbench.scheduler.admission import check_servable
from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.arrivals import Arrival, GrammarArrival, arrival_order
from workbench.simulation.costs.cost_model import StepCost
from workbench.simulation.proposals import Proposal
from workbench.trace import StepRecord

if TYPE_CHECKING:
    from workbench.scheduler.second_tier import SecondTier

Follow = Callable[[Request, float, int], Iterable[Arrival]]
"""Gives the requests that follow from the end of one, its time and the step after it."""

STUCK_AFTER = 3
"""Consecutive steps without a token after which the requests that are left cannot proceed by themselves."""

POLL = 0.005
"""Seconds after which an engine that waits for a transfer looks for new requests, if those are not known before."""


class SimulatedRun:
    """The body of every simulation's loop: ``arrive()``, then ``step()``, until the run is ``over`` or ``stuck``.

    With asynchronous scheduling a record is complete an iteration after its step was scheduled, so the first ``step()``
    gives none, and ``rest()`` gives the last.

    Args:
        config: Configuration of the first step.
        arrivals: The requests in order of ``arrival_step`` and ``arrives_at``; each is read when the run reaches it.
        cost_model: Gives the duration of a step; None for a run without a clock, in which no time passes.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
        as_vllm: Let requests wait forever where vLLM does.
        follow: Gives the requests that follow from the end of one, at a time and in a step; None if none does.

    Attributes:
        scheduler: The scheduler.
        now: Seconds since the start, at the end of the latest step.
        num_arrived: Requests that have arrived.
        arrived: Those of them that arrived before the latest step.
        expects_more: Further requests may be given with ``add``, so the run is neither over nor stuck.
    """

    def __init__(
        self,
        config: EngineConfig,
        arrivals: Iterator[Arrival],
        cost_model: StepCost | None,
        policy: SchedulingPolicy | None,
        *,
        as_vllm: bool = False,
        follow: Follow | None = None,
    ) -> None:
        # Without a cost model the clock stays at 0, so that equal runs give equal traces.
        self.scheduler = Scheduler(config, clock=lambda: self.now, policy=policy, as_vllm=as_vllm)
        self.now = 0.0
        self.num_arrived = 0
        self.arrived: list[Request] = []
        self.expects_more = False
        self._cost_model = cost_model
        self._arrivals = arrivals
        self._follow = follow
        self._added: list[tuple[tuple[int, float], int, Arrival]] = []
        self._order = count()  # of requests that were added for the same moment
        self._head = self._upcoming = next(arrivals, None)
        # Of arrived requests: (step, time, index, order of arrival, id).
        self._aborts: list[tuple[int, float, int, int, str]] = []
        self._num_empty = 0
        self._num_idle = 0
        self._in_flight: deque[ScheduledBatch] = deque()
        self._busy_until = 0.0
        self._num_in_flight = 2 if config.async_scheduling else 1
        self._num_drafts = config.num_speculative_tokens
        if config.second_tier is not None and cost_model is None:
            raise ValueError("second_tier needs a clock: give a cost_model")
        self._drafts_are_known = not config.async_scheduling
        self._acceptance: dict[str, _Acceptance] = {}

    @property
    def over(self) -> bool:
        """Every request has arrived and ended, and no output is to come."""
        if self.expects_more or self._upcoming is not None or self.scheduler.has_unfinished_requests():
            return False
        return not any(batch.chunks for batch in self._in_flight)

    @property
    def stuck(self) -> bool:
        """The requests that are left can never be scheduled: no arrival and no abort is to come."""
        return self._num_idle >= STUCK_AFTER and not self.expects_more and self.scheduler.has_unfinished_requests()

    @property
    def rests(self) -> bool:
        """Nothing happens before the next request arrives, if one arrives at all."""
        return self._upcoming is None and self._waits

    @property
    def _waits(self) -> bool:
        """No step has anything to do before a request arrives or is aborted."""
        return self._num_empty >= STUCK_AFTER or not self.scheduler.has_unfinished_requests()

    @property
    def _next_event(self) -> float | None:
        """The time of the next arrival or abort; None if none is to come before a step that decides about it."""
        aborts, arrives = self._aborts, None if self._upcoming is None else self._upcoming.arrives_at or 0.0
        while aborts and aborts[0][-1] not in self.scheduler.requests:
            heappop(aborts)
        if self._cost_model is None or not aborts or aborts[0][0] > self.scheduler.step:
            return arrives
        return aborts[0][1] if arrives is None else min(arrives, aborts[0][1])

    def _begin(self) -> float:
        """The time at which the next step is scheduled, in a run with a clock."""
        event = self._next_event if self._waits else None
        return self.now if event is None else max(self.now, event)

    def add(self, arrival: Arrival) -> None:
        """Add a request to those that will arrive; of several for one moment, the first that was added comes first."""
        self._num_idle = 0
        heappush(self._added, (arrival_order(arrival), next(self._order), arrival))
        self._look()

    def _look(self) -> None:
        """Find the request that arrives next."""
        self._upcoming = self._head
        if self._added and (self._head is None or self._added[0][0] < arrival_order(self._head)):
            self._upcoming = self._added[0][-1]

    def _take_upcoming(self) -> None:
        if self._upcoming is self._head:
            self._head = next(self._arrivals, None)
        else:
            heappop(self._added)
        self._look()

    def arrive(self) -> list[Request]:
        """Queue the requests that are due before the next step, and abort those whose step and time for it have come.

        Returns:
            The requests that arrived.
        """
        scheduler = self.scheduler
        if self._cost_model is not None:
            self.now = self._begin()
        new = []
        while (arrival := self._upcoming) is not None and self.is_due(arrival):
            request = arrival.to_request()
            request.arrival_step = scheduler.step
            if arrival.grammar is not None:
                request.grammar = ArrivingGrammar(arrival.grammar, scheduler)
            if self._cost_model is not None and arrival.arrives_at is None:
                request.arrival_time = self.now
            if arrival.abort_step is None and not scheduler.as_vllm:
                check_servable(scheduler.config, request.num_prompt_tokens, 1, f"request {request.request_id!r}")
            scheduler.add_request(request)
            new.append(request)
            self.num_arrived += 1
            if self._num_drafts:
                self._acceptance[arrival.request_id] = _Acceptance(arrival, self._num_drafts)
            if arrival.abort_step is not None:
                time = 0.0 if arrival.timeout is None else request.arrival_time + arrival.timeout
                entry = (arrival.abort_step, time, arrival.index, self.num_arrived, arrival.request_id)
                heappush(self._aborts, entry)
            self._take_upcoming()
        self._abort()
        self.arrived = new
        return new

    def _abort(self) -> None:
        """Abort the requests that are due; of several between two steps, the workload decides which is the first."""
        scheduler, due = self.scheduler, []
        while self._aborts and self._aborts[0][0] <= scheduler.step and self._aborts[0][1] <= self.now:
            due.append(heappop(self._aborts))
        for *_, request_id in sorted(due, key=lambda abort: (abort[0], *abort[2:])):
            aborted = scheduler.requests.get(request_id)
            if aborted is not None:
                scheduler.abort_request(request_id)
                self._let_follow([aborted], max(self.now, self._busy_until))

    def abandon(self) -> None:
        """Abort every request, and forget those that have not arrived."""
        self._head = self._upcoming = None
        self._added.clear()
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort_request(request_id)

    def will_see(self, arrival: Arrival) -> bool:
        """Whether the next step sees a request that is yet to be added.

        A run that waits for an arrival begins its next step with it, and sees those of the same moment too.
        """
        if self._cost_model is None:
            return self.is_due(arrival)
        return arrival.arrival_step <= self.scheduler.step and (arrival.arrives_at or 0.0) <= self._begin()

    def is_due(self, arrival: Arrival) -> bool:
        """Whether a request has arrived by now."""
        if arrival.arrival_step > self.scheduler.step:
            return False
        return self._cost_model is None or (arrival.arrives_at or 0.0) <= self.now

    def step(self, sample_token: Callable[[Request], int]) -> StepRecord | None:
        """Take an iteration: schedule a step, and take in the output of the oldest step in flight.

        Args:
            sample_token: Gives the next token of a request, whose ``token_ids`` holds all tokens before it.

        Returns:
            The record of the step whose output was taken in; None when none was in flight yet.
        """
        batch = self.advance(sample_token)
        return None if batch is None else batch.to_record(timings=batch.timings)

    def advance(self, sample_token: Callable[[Request], int]) -> ScheduledBatch | None:
        """The same as ``step`` without a record: its time is a fifth of the run's, and sums do not need it."""
        batch = self.scheduler.schedule()
        seconds = self._cost_model.step_seconds(batch.chunks) if self._cost_model is not None and batch.chunks else 0.0
        # An asynchronous step is scheduled while the one before it is computed, and begins when that one ends.
        batch.time = max(self.now, self._busy_until)
        batch.end = batch.time + seconds
        if not batch.chunks and (tier := self.scheduler.second_tier) is not None and tier.transfers:
            self._num_empty, batch.end = -1, self._end_of_wait(tier, batch.time)
            batch.timings = {"wait": batch.end - batch.time}
        self._busy_until = batch.end
        if seconds:
            batch.timings = {"forward": seconds}
        self._in_flight.append(batch)
        done = self._complete(sample_token) if len(self._in_flight) == self._num_in_flight else None
        if batch.chunks:
            self._num_empty = self._num_idle = 0
        else:
            self._num_empty += 1
            waits = self._num_empty == 0
            self._num_idle = 0 if waits or batch.arrived or self._something_to_come() else self._num_idle + 1
        return done

    def _end_of_wait(self, tier: SecondTier, now: float) -> float:
        """The end of a step without tokens: a transfer ends, or a request may have arrived."""
        arrives = None if self._upcoming is None else self._upcoming.arrives_at
        ends = [tier.next_end, arrives, now + POLL if self.expects_more else None]
        return max(now, min(end for end in ends if end is not None))

    def rest(self, sample_token: Callable[[Request], int]) -> Iterator[StepRecord]:
        """Take in the output that is still in flight when the run ends."""
        for batch in self.remaining(sample_token):
            yield batch.to_record(timings=batch.timings)

    def remaining(self, sample_token: Callable[[Request], int]) -> Iterator[ScheduledBatch]:
        """The same as ``rest`` without records."""
        while self._in_flight:
            yield self._complete(sample_token)

    def _complete(self, sample_token: Callable[[Request], int]) -> ScheduledBatch:
        """Take in the output of the oldest step in flight."""
        batch = self._in_flight.popleft()
        self.now = max(self.now, batch.end)
        if self._num_drafts:
            self.scheduler.update(batch, [self._verified(chunk, sample_token) for chunk in batch.chunks])
            if self._drafts_are_known:
                self._propose(batch, sample_token)
            for chunk in batch.chunks:
                if chunk.request.status == "finished":
                    self._acceptance.pop(chunk.request.request_id, None)
        else:
            tokens = [sample_token(chunk.request) if chunk.samples else None for chunk in batch.chunks]
            self.scheduler.update(batch, tokens)
        if self._follow is not None:
            ended = [chunk.request for chunk in batch.chunks if chunk.request.status == "finished"]
            self._let_follow(ended, batch.end)
        return batch

    def _let_follow(self, ended: Iterable[Request], time: float) -> None:
        """Add the requests that follow from the ends of others."""
        if self._follow is not None:
            for request in ended:
                for arrival in self._follow(request, time, self.scheduler.step):
                    self.add(arrival)

    def _verified(self, chunk: ScheduledChunk, sample_token: Callable[[Request], int]) -> Sequence[int] | None:
        """The accepted drafts of a chunk and the token after them."""
        request = chunk.request
        if not chunk.samples:
            return None
        if request.status == "finished":
            return (0,)  # thrown away
        num_accepted = 0
        if chunk.drafts and not chunk.is_padded:
            acceptance = self._acceptance[request.request_id]
            num_accepted = min(acceptance.at(request.num_output_tokens).num_accepted, len(chunk.drafts))
            if not self._drafts_are_known:  # what the grammar does not allow has become padding meanwhile
                num_accepted = min(num_accepted, acceptance.next_valid(len(chunk.drafts)))
            acceptance.num_verifications += 1
        return _next_tokens(request, num_accepted + 1, sample_token)

    def _propose(self, batch: ScheduledBatch, sample_token: Callable[[Request], int]) -> None:
        """Make the drafts of the next step: right as far as they will be accepted, and wrong from there on."""
        drafts = {}
        for chunk in batch.chunks:
            request = chunk.request
            if (acceptance := self._acceptance.get(request.request_id)) is None or not chunk.samples:
                continue
            num_drafts, num_right = acceptance.at(request.num_output_tokens)
            tokens = _next_tokens(request, min(num_drafts, self._num_drafts), sample_token)
            made = tokens[:num_right] + [3 + (token - 3 + 1) % 31997 for token in tokens[num_right:]]
            drafts[request.request_id] = made[: acceptance.next_valid(len(made))]
        self.scheduler.set_drafts(drafts)

    def _something_to_come(self) -> bool:
        aborts = any(request_id in self.scheduler.requests for *_, request_id in self._aborts)
        compiles = any(request.grammar is not None for request in self.scheduler.waiting)
        return self._upcoming is not None or aborts or compiles


class ArrivingGrammar:
    """A grammar that is compiled when the scheduler reaches a step."""

    def __init__(self, arrival: GrammarArrival, scheduler: Scheduler) -> None:
        self._arrival, self._scheduler = arrival, scheduler

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled."""
        return not self._arrival.fails and self._scheduler.step >= self._arrival.ready_step

    @property
    def error(self) -> str:
        """Why it cannot be compiled; "" if it can."""
        failed = self._arrival.fails and self._scheduler.step >= self._arrival.ready_step
        return "the workload says that it fails" if failed else ""

    def release(self) -> None:
        """It holds nothing."""


class _Acceptance:
    """The next drafts of a request: how many it has, and how many are accepted.

    Args:
        arrival: The request, with its proposals.
        most: Number of drafts that are allowed.
    """

    def __init__(self, arrival: Arrival, most: int) -> None:
        self._recorded, self._accepts = arrival.proposals, arrival.accepts or (0,)
        self._valid = arrival.grammar.valid_drafts if arrival.grammar is not None else ()
        self._most = most
        self._num_proposals = 0
        self.num_verifications = 0

    def next_valid(self, num_drafts: int) -> int:
        """Leading drafts of the next proposal that the grammar allows."""
        if not self._valid:
            return num_drafts
        self._num_proposals += 1
        return min(num_drafts, self._valid[(self._num_proposals - 1) % len(self._valid)])

    def at(self, place: int) -> Proposal:
        """The next proposal, with this number of output tokens before it."""
        if self._recorded is not None:
            return self._recorded.at(place, self._most)
        return Proposal(self._most, self._accepts[self.num_verifications % len(self._accepts)])


def _next_tokens(request: Request, count: int, sample_token: Callable[[Request], int]) -> list[int]:
    """The next tokens of a request."""
    tokens: list[int] = []
    known = request.token_ids
    for _ in range(count):
        tokens.append(sample_token(request))
        known.append(tokens[-1])
    del known[len(known) - count :]
    return tokens
