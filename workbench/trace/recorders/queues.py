"""The running list and the waiting queue of the recorded engine, derived from its messages.

An engine's queues can hold thousands of requests and hardly change; sending them in every step would cost more than
everything else. Their changes follow from the messages by the rules of vLLM's V1 scheduler: an admitted request moves
to the end of the running list, a preempted one to the head of the waiting queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from workbench.trace.recorders.messages import Admission, Arrival


class LiveRequest:
    """A request that has arrived and not ended.

    Attributes:
        request_id: The request.
        queue_key: Sort key in a waiting queue by priority.
        block_table: Its KV blocks.
        other_tables: Its block tables in the KV cache groups after the first; empty if only one group is recorded.
        num_kv_computed: Its progress.
        num_kv_lost: Positions ``[0, num_kv_lost)`` had KV that a preemption threw away.
        prefill_end: Number of tokens known at its last admission; it decodes from there.
        was_preempted: Whether it was ever preempted.
    """

    __slots__ = (
        "block_table",
        "num_kv_computed",
        "num_kv_lost",
        "other_tables",
        "prefill_end",
        "queue_key",
        "request_id",
        "was_preempted",
    )

    def __init__(self, message: Arrival) -> None:
        self.request_id = message.request_id
        self.queue_key = (message.priority, message.queue_time, message.request_id)
        self.block_table: list[int] = []
        self.other_tables: list[list[int]] = []
        self.num_kv_computed = 0
        self.num_kv_lost = 0
        self.prefill_end = message.num_prompt_tokens
        self.was_preempted = False

    def begin_prefill(self, admission: Admission) -> int:
        """Set the block table and the end of the prefill from an admission.

        Returns:
            Number of tokens whose KV was found.
        """
        self.block_table = list(admission.block_ids)
        self.other_tables = [list(table) for table in admission.other_tables]
        self.prefill_end = admission.num_tokens
        return admission.num_computed_tokens

    def lose_blocks(self) -> None:
        """Reset the progress after a preemption."""
        self.was_preempted = True
        self.num_kv_lost = max(self.num_kv_lost, self.num_kv_computed)
        self.num_kv_computed = 0
        self.block_table, self.other_tables = [], []


class Queues:
    """The running list and the waiting queue.

    Args:
        by_priority: Whether the waiting queue is in order of (priority, arrival time, id) instead of arrival.
        max_waiting: Maximum number of requests in ``waiting_ids``.

    Attributes:
        live: Requests by id.
    """

    def __init__(self, *, by_priority: bool, max_waiting: int) -> None:
        self.live: dict[str, LiveRequest] = {}
        self._by_priority = by_priority
        self._max_waiting = max_waiting
        self._running: dict[str, None] = {}
        self._waiting: OrderedDict[str, None] = OrderedDict()
        # The tuples that records hold; None if out of date.
        self._running_ids: tuple[str, ...] | None = None
        self._waiting_ids: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def arrive(self, message: Arrival) -> None:
        """Put a new request into the waiting queue."""
        self.live[message.request_id] = LiveRequest(message)
        self._waiting[message.request_id] = None
        self._waiting_ids = None

    def admit(self, request_id: str) -> LiveRequest:
        """Move a request from the waiting queue to the end of the running list."""
        request = self.live[request_id]
        self._waiting.pop(request_id, None)
        self._running[request_id] = None
        self._running_ids = self._waiting_ids = None
        return request

    def preempt(self, request_id: str) -> LiveRequest:
        """Move a request from the running list to the head of the waiting queue."""
        request = self.live[request_id]
        self._running.pop(request_id, None)
        self._waiting[request_id] = None
        self._waiting.move_to_end(request_id, last=False)
        self._running_ids = self._waiting_ids = None
        return request

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended."""
        del self.live[request_id]
        if request_id in self._running:
            del self._running[request_id]
            self._running_ids = None
        elif self._waiting.pop(request_id, self) is None:
            self._waiting_ids = None

    def replace(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Replace both queues by the engine's, which may differ from those derived."""
        self._running = dict.fromkeys(running)
        self._waiting = OrderedDict.fromkeys(waiting)
        self._running_ids = self._waiting_ids = None

    def running_ids(self) -> tuple[str, ...]:
        """Running requests in order of admission."""
        if self._running_ids is None:
            self._running_ids = tuple(self._running)
        return self._running_ids

    def waiting_ids(self) -> tuple[str, ...]:
        """The first waiting requests in queue order."""
        if self._waiting_ids is None:
            self._waiting_ids = tuple(self._queue_order())[: self._max_waiting]
        return self._waiting_ids

    def _queue_order(self) -> Iterable[str]:
        if not self._by_priority:
            return self._waiting
        return sorted(self._waiting, key=lambda request_id: self.live[request_id].queue_key)
