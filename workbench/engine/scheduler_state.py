"""What a scheduler owns: requests, the waiting queue, the running list and the KV blocks, and their books."""

from __future__ import annotations

import copy
import sys

from workbench.engine.config import EngineConfig
from workbench.engine.kv_cache_manager import KVCacheManager
from workbench.engine.partial_prefills import PartialPrefills
from workbench.engine.request import FinishReason, Request
from workbench.engine.request_queue import REQUEST_QUEUES, RequestQueue


class SchedulerState:
    """Requests on their way from the waiting queue to the running list and out.

    Args:
        config: Limits and policies. ``max_model_len=None`` sets no limit.

    Attributes:
        config: The configuration in force.
        requests: Unfinished requests by id.
        running: Admitted requests in the order of their admission.
        waiting: The waiting queue.
        kv_cache: The KV blocks.
        partial_prefills: The limits on concurrent partial prefills; None with both of them off.
        arrived: Ids of requests added since the last step was scheduled.
        aborted: Ids of requests aborted since then.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.partial_prefills: PartialPrefills | None = None
        self._configure(config)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: RequestQueue = REQUEST_QUEUES[config.policy]()
        self.kv_cache = KVCacheManager(config)
        self.arrived: list[str] = []
        self.aborted: list[str] = []
        # The queues as records hold them. They change far less often than steps are taken; None when out of date.
        self._running_ids: tuple[str, ...] | None = None
        self._waiting_ids: tuple[str, ...] | None = None
        self._view_of_queues: tuple[tuple[Request, ...], tuple[Request, ...]] | None = None

    def _configure(self, config: EngineConfig) -> None:
        self.config = config
        self.max_running = config.max_num_active_seqs or config.max_num_seqs
        self.max_model_len = config.max_model_len or sys.maxsize
        if config.max_num_partial_prefills is None and config.max_long_partial_prefills is None:
            self.partial_prefills = None
        elif self.partial_prefills is None:
            self.partial_prefills = PartialPrefills(config)
        else:
            self.partial_prefills.configure(config)

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""
        return len(self.waiting)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds."""
        return self.kv_cache.num_free

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.requests)

    def running_ids(self) -> tuple[str, ...]:
        """Ids of the running requests in the order of their admission."""
        if self._running_ids is None:
            self._running_ids = tuple([request.request_id for request in self.running])
        return self._running_ids

    def waiting_ids(self) -> tuple[str, ...]:
        """Ids of the waiting requests in queue order."""
        if self._waiting_ids is None:
            self._waiting_ids = tuple([request.request_id for request in self.waiting])
        return self._waiting_ids

    # -- the way of a request --------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request; the next step sees it.

        Raises:
            ValueError: Its id is in use, or its prompt is empty.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use: wait until it ends, or choose another")
        if not request.token_ids:
            raise ValueError(f"request {request.request_id!r} has an empty prompt: give at least one token")
        self.requests[request.request_id] = request
        self.waiting.add(request)
        self.arrived.append(request.request_id)
        self._waiting_ids = self._view_of_queues = None

    def abort_request(self, request_id: str) -> bool:
        """End a request and free its blocks at once.

        Aborted while its step is under way, the request's token of that step is dropped.

        Returns:
            False when no unfinished request has this id.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.status == "running":
            self.running.remove(request)
            self._running_ids = self._view_of_queues = None
        else:
            self.waiting.remove(request)
            self._waiting_ids = self._view_of_queues = None
        self._finish(request, "abort")
        self.aborted.append(request_id)
        return True

    def _admit(self, request: Request) -> None:
        """Move a request from the waiting queue to the end of the running list."""
        if request is self.waiting.head:
            self.waiting.pop()
        else:
            self.waiting.remove(request)
        request.status = "running"
        self.running.append(request)
        self._running_ids = self._waiting_ids = self._view_of_queues = None

    def _preempt(self, victim: Request) -> None:
        """Take all blocks from a running request and let it wait; it keeps its output and computes it again."""
        self.running.remove(victim)
        self.kv_cache.free(victim)
        victim.num_kv_lost = max(victim.num_kv_lost, victim.num_kv_computed)
        victim.num_kv_computed = 0
        victim.is_prefill = True
        victim.block_table = []
        victim.status = "preempted"
        victim.num_preemptions += 1
        self.waiting.put_back(victim)
        self._running_ids = self._waiting_ids = self._view_of_queues = None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request; the caller takes it off its queue."""
        request.status = "finished"
        request.finish_reason = reason
        self.kv_cache.free(request, keep_content=reason != "error")
        del self.requests[request.request_id]

    def _drop_finished(self) -> None:
        """Take finished requests off the running list."""
        self.running = [request for request in self.running if request.status == "running"]
        self._running_ids = self._view_of_queues = None

    # -- the state as a whole --------------------------------------------------------------------------------

    def reconfigure(self, config: EngineConfig) -> None:
        """Go on under another configuration from the next step; requests keep their progress and blocks.

        Raises:
            ValueError: ``block_size`` or ``num_blocks`` differ: the KV cache exists already.
        """
        for name in ("block_size", "num_blocks"):
            old, new = getattr(self.config, name), getattr(config, name)
            if old != new:
                raise ValueError(f"{name} cannot change from {old} to {new} while the KV cache is in use")
        if config.policy != self.config.policy:
            self.waiting = REQUEST_QUEUES[config.policy](self.waiting)
            self._waiting_ids = self._view_of_queues = None
        self._configure(config)
        self.kv_cache.configure(config)

    def _rehearsal(self) -> SchedulerState:
        """A scheduler in the same state that can be stepped without changing this one."""
        clone = copy.copy(self)
        copies = {request_id: request.copy() for request_id, request in self.requests.items()}
        clone.requests = copies
        clone.running = [copies[request.request_id] for request in self.running]
        clone.waiting = type(self.waiting)(copies[request.request_id] for request in self.waiting)
        clone.kv_cache = self.kv_cache.copy()
        clone._view_of_queues = None
        clone.partial_prefills = copy.copy(self.partial_prefills)
        clone.arrived, clone.aborted = self.arrived.copy(), self.aborted.copy()
        return clone

    def check_integrity(self) -> None:
        """Assert that requests, queues and KV blocks agree; for tests and for an idle engine.

        Raises:
            AssertionError: They do not; the message says where.
        """
        queued = [*self.running, *self.waiting]
        assert sorted(request.request_id for request in queued) == sorted(self.requests), "a request is lost or twice"
        assert all(request.status == "running" for request in self.running), "the running list holds others"
        assert self.running_ids() == tuple(request.request_id for request in self.running), "stale running ids"
        assert self.waiting_ids() == tuple(request.request_id for request in self.waiting), "stale waiting ids"
        for request in queued:
            held = -(-request.num_kv_computed // self.config.block_size)
            assert len(request.block_table) == held, f"{request} holds {len(request.block_table)} blocks, not {held}"
        self.kv_cache.block_pool.check_integrity(request.block_table for request in queued)
