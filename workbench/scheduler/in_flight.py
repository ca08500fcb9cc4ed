"""Drafts, and the output of asynchronous steps that is to come: tokens behind the known ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from workbench.scheduler import outputs
from workbench.scheduler.batch import Sampled, ScheduledBatch, ScheduledChunk
from workbench.scheduler.chain import OrderOver, Owner
from workbench.scheduler.outputs import expect_drafts, flight_of
from workbench.scheduler.queues import Plan, ServiceOrder
from workbench.scheduler.request import FinishReason, Request
from workbench.trace.reasons import Reason


class InFlight(OrderOver):
    """Schedules tokens that are not known yet, and takes back those that were rejected."""

    decodes_plainly = False

    def __init__(self, scheduler: Owner, order: ServiceOrder) -> None:
        super().__init__(scheduler, order)
        self._is_async = self.config.async_scheduling
        self._max_model_len = scheduler.max_model_len
        self._unknown_drafts = (-1,) * self.config.num_speculative_tokens

    def max_in_flight(self) -> int:
        """While a step is computed, another one may be scheduled."""
        return 2 if self._is_async else 1

    def running_order(self, batch: ScheduledBatch) -> Iterable[Request]:
        """Without those whose last token is on its way, whatever becomes of their drafts."""
        for request in self._order.running_order(batch):
            num_expected = (request.flight or flight_of(request)).placeholders
            if not num_expected or request.num_kv_computed + 2 - num_expected < request.max_num_tokens:
                yield request

    def consider(self, plan: Plan, batch: ScheduledBatch) -> Reason | None:
        """A preempted request waits for the output that it had been promised."""
        if flight_of(plan.request).stale:
            plan.may_be_overtaken = True
            return Reason("output_in_flight", "async_scheduling", True)
        return self._order.consider(plan, batch)

    def continued(self, plan: Plan, chunk: ScheduledChunk) -> None:
        """Give the chunk as many drafts as the limits left."""
        if drafts := flight_of(chunk.request).drafts:
            chunk.drafts = tuple(drafts[: max(0, len(drafts) - plan.num_wanted + chunk.num_tokens)])
            expect_drafts(chunk.request, ())
        self._order.continued(plan, chunk)

    def computed(self, chunk: ScheduledChunk, num_tokens: int) -> None:
        """In asynchronous steps, expect what the chunk will give."""
        if self._is_async:
            request, flight = chunk.request, flight_of(chunk.request)
            flight.num_tokens += num_tokens
            if chunk.samples and num_tokens > 0:
                flight.placeholders += 1 + len(chunk.drafts)
                expect_drafts(request, () if request.frugal else self._unknown_drafts)
        self._order.computed(chunk, num_tokens)

    def preempted(self, request: Request) -> None:
        """Nothing is expected any more, and what comes all the same is stale."""
        flight = flight_of(request)
        flight.placeholders = 0
        flight.stale = flight.num_tokens
        expect_drafts(request, ())
        self._order.preempted(request)

    def take_output(
        self, batch: ScheduledBatch, sampled: Sampled, finish: Mapping[str, FinishReason], last: ScheduledBatch
    ) -> Iterator[tuple[Request, FinishReason]]:
        """Append the tokens of a step, several of a chunk with drafts, and take back the drafts it rejected."""
        for chunk, tokens in zip(batch.chunks, sampled):
            request = chunk.request
            if request.status == "finished":  # ended since schedule()
                chunk.discarded = True
                continue
            given = finish.get(request.request_id)
            stops = outputs.take_output(
                chunk,
                None if given == "error" else tokens,
                last,
                self.kv_cache,
                self._max_model_len,
                is_async=self._is_async,
            )
            if (reason := given or stops) is not None:
                yield request, reason

    def set_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Keep the drafts of the requests that decode."""
        if drafts and self._is_async:
            raise ValueError("drafts cannot be set with async_scheduling: its drafts are placeholders until they run")
        super().set_drafts(drafts)
        for request_id, tokens in drafts.items():
            request = self.queues.requests.get(request_id)
            if request is not None and request.status == "running" and not (request.is_prefill or request.frugal):
                expect_drafts(request, tokens)
