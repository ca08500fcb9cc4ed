"""A scheduler that checks the laws after every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from workbench.config import EngineConfig
from workbench.scheduler.batch import Sampled, ScheduledBatch
from workbench.scheduler.block_pool import extend_block_hashes
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.policy import described
from workbench.scheduler.request import FinishReason, Request
from workbench.scheduler.scheduler import Scheduler
from workbench.trace.laws import Broken, Checker, LawError, Limits, SchedulerState
from workbench.trace.laws.known import Known


def raise_broken(broken: Sequence[Broken]) -> None:
    """Raise LawError."""
    raise LawError(broken)


def state_of(scheduler: Scheduler) -> SchedulerState:
    """A scheduler's state as it is now, as the laws see it."""
    queues, kv_cache = scheduler.queues, scheduler.kv_cache
    pool = kv_cache.block_pool
    return SchedulerState(
        pool.num_blocks,
        pool._free.keys(),
        {name: request.block_tables for name, request in queues.requests.items()},
        queues.requests,
        queues.running,
        queues.waiting,
        pool._ref_counts,
        pool._hash_of,
        pool._blocks_of,
        partial(_block_keys, kv_cache),
    )


def _block_keys(kv_cache: KVCacheManager, known: Known, group: int, place: int) -> tuple[list[bytes], int]:
    """The hashes under which a block of a request may be cached, and how many a full block has."""
    unit, lookahead, manager = kv_cache._hash_block_size, kv_cache.num_hash_lookahead_tokens, kv_cache.groups[group]
    assert known.tokens is not None
    num_hashes = manager.hashes_per_block
    last = min(max(0, len(known.tokens) - lookahead) // unit, (place + 1) * num_hashes)
    extend_block_hashes(known.hashes, known.tokens, last, unit, lookahead, *known.sharing)
    return [digest + manager._suffix for digest in known.hashes[place * num_hashes : last]], num_hashes


class CheckedScheduler(Scheduler):
    """A scheduler whose every step is checked against the laws (`workbench.trace.laws`).

    Args:
        on_broken: Called with the laws that a step broke.
        laws: Names of the laws to check; None for all.
        arguments: As for a Scheduler.

    Attributes:
        checker: Checks the laws; None in a rehearsal.
    """

    checker: Checker | None = None

    def __init__(
        self,
        *arguments: Any,
        on_broken: Callable[[Sequence[Broken]], None] = raise_broken,
        laws: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_broken = on_broken
        self.checker = Checker(self._limits(), laws=laws)

    def _limits(self) -> Limits:
        return Limits.of(described(self.config, self.policy))

    def add_request(self, request: Request) -> None:
        """Queue a request for the next step, and let the laws know it."""
        super().add_request(request)
        if self.checker is not None:
            self.checker.add(request, request.token_ids)

    def abort_request(self, request_id: str) -> bool:
        """End a request, and let the laws know it: its blocks are given back before the step in flight is complete."""
        if not super().abort_request(request_id):
            return False
        if self.checker is not None:
            self.checker.abort(request_id)
        return True

    def reconfigure(self, config: EngineConfig) -> None:
        """Apply another configuration from the next step, and its limits."""
        super().reconfigure(config)
        if self.checker is not None:
            self.checker.relimit(self._limits(), self.queues.waiting_ids())

    def schedule(self) -> ScheduledBatch:
        """Schedule a step, and check the laws."""
        if self.checker is None:
            return super().schedule()
        if len(self._in_flight) == self._max_in_flight:
            self._check_nothing_in_flight("schedule()")
        try:
            batch = super().schedule()
        except Exception as problem:
            self._report(self.checker.crashed(self.step, problem), problem)
            raise
        self._report(self.checker.scheduled(batch, state_of(self)))
        return batch

    def update(
        self, batch: ScheduledBatch, sampled: Sampled, *, finish: Mapping[str, FinishReason] = MappingProxyType({})
    ) -> ScheduledBatch:
        """Take in a step's output, and check the laws."""
        if self.checker is None:
            return super().update(batch, sampled, finish=finish)
        self._check_in_flight(batch)
        batch.check_outputs(sampled, finish)
        latest = self._in_flight[-1]
        ended = set(latest.finish_reasons)
        try:
            super().update(batch, sampled, finish=finish)
        except Exception as problem:
            self._report(self.checker.crashed(batch.step, problem), problem)
            raise
        finished = {name: reason for name, reason in latest.finish_reasons.items() if name not in ended}
        failed = "error" in finish.values()
        self._report(self.checker.updated(batch, latest, finished, state_of(self), failed=failed))
        return batch

    def set_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Give requests the drafts that their next chunk verifies, and let the laws know them."""
        super().set_drafts(drafts)
        if self.checker is not None:
            self.checker.proposed(drafts)

    def _report(self, broken: Sequence[Broken], cause: BaseException | None = None) -> None:
        if broken:
            self._on_broken(broken)

    def _rehearsal(self) -> Scheduler:
        clone = super()._rehearsal()
        assert isinstance(clone, CheckedScheduler)
        clone.checker = None
        return clone
