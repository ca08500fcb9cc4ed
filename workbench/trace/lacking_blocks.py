"""The lack of KV blocks in a recording of vLLM, whose record says of a waiting request only that it was not admitted.

The engine does not tell its reasons. With tokens and seats left, the head of the queue is admitted unless its blocks
are lacking, and their number follows from its tokens by vLLM's rule. So a record gets the reason as it is read, and
every view, explanation and sentence has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from workbench.trace.lines import HASH_DIGITS, RequestInfo, TraceMeta
from workbench.trace.reasons import UNKNOWN, Reason
from workbench.trace.records import StepRecord


class Recording(Protocol):
    """The parts of a trace that a reason depends on."""

    @property
    def meta(self) -> TraceMeta: ...  # noqa: D102
    @property
    def requests(self) -> Mapping[str, RequestInfo]: ...  # noqa: D102
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> StepRecord: ...


class LackingBlocks:
    """Completes the records of a recording of vLLM as they are read.

    Args:
        trace: The recording, up to the step before the next record.
    """

    def __init__(self, trace: Recording) -> None:
        self._trace = trace
        config = trace.meta.config
        self._block_size, self._num_blocks = config.get("block_size"), config.get("num_blocks")
        numbers = (self._block_size, self._num_blocks)
        self._is_known = (
            trace.meta.is_of_vllm
            and all(isinstance(number, int) and number > 0 for number in numbers)
            and not config.get("kv_cache_groups")
        )
        self._watermark = config.get("watermark") or 0.0
        self._admits_whole = config.get("scheduler_reserve_full_isl", True)
        self._num_tokens: dict[str, int] = {}  # of preempted requests that wait

    def complete(self, record: StepRecord) -> StepRecord:
        """A record with the reason for which the head of the queue waits, if it lacks that and blocks were lacking."""
        if not self._is_known:
            return record
        if self._num_tokens:
            for name in (*record.admitted, *record.resumed):
                self._num_tokens.pop(name, None)
        if not record.waiting:
            return record
        given = record.waiting_reason
        is_open = given == UNKNOWN or (given is not None and given.kind == "kv_blocks" and given == _uncounted(given))
        head = next((name for name in record.waiting if name not in record.passed_over), None)
        if not is_open or head is None or (reason := self._reason(record, head)) is None:
            return record
        if len(record.waiting) == 1:
            return msgspec.structs.replace(record, waiting_reason=reason)
        return msgspec.structs.replace(
            record,
            waiting_reason=reason.for_those_behind(head),
            passed_over={**record.passed_over, head: reason},
        )

    def _reason(self, record: StepRecord, head: str) -> Reason | None:
        """The lack of blocks of the head of the queue; None if it does not lack any."""
        if (info := self._trace.requests.get(head)) is None:
            return None
        size, total = int(self._block_size or 1), int(self._num_blocks or 1)
        num_tokens = self._known_tokens(head, info)
        if not self._admits_whole:
            room = max(1, (record.token_budget or num_tokens) - record.num_tokens)
            num_tokens = min(num_tokens, room)
        needed = -(-num_tokens // size) - self._num_held(record, info, size)
        reserved = min(int(self._watermark * total), record.free_blocks) if record.running else 0
        available = record.free_blocks - reserved
        if needed <= available:
            return None
        limit, value = ("num_blocks", total) if needed > record.free_blocks else ("watermark", self._watermark)
        return Reason("kv_blocks", limit, value, needed, available, num_tokens=num_tokens, reserved=reserved)

    def _known_tokens(self, request_id: str, info: RequestInfo) -> int:
        """Prompt and output of a waiting request: it has output if it was preempted."""
        if request_id not in self._num_tokens:
            self._num_tokens[request_id] = self._tokens_of(request_id, info)
        return self._num_tokens[request_id]

    def _tokens_of(self, request_id: str, info: RequestInfo) -> int:
        for index in range(len(self._trace) - 1, -1, -1):
            record = self._trace[index]
            if record.step < info.arrival_step:
                break
            for chunk in record.chunks:
                if chunk.request_id == request_id:
                    rejected = len(chunk.drafts) - chunk.num_accepted
                    return max(info.num_prompt_tokens, chunk.end - rejected + (not chunk.is_partial_prefill))
        return info.num_prompt_tokens

    def _num_held(self, record: StepRecord, info: RequestInfo, size: int) -> int:
        """Blocks at the beginning of a prompt that running requests hold, which cost no free block."""
        made = self._trace.meta.prefix_hashes
        if not (self._trace.meta.config.get("enable_prefix_caching") and made and made.block_size == size):
            return 0
        others = [self._trace.requests[name].block_hashes for name in record.running if name in self._trace.requests]
        most = (info.num_prompt_tokens - 1) // size
        return min(most, max((_common(info.block_hashes, other) for other in others), default=0))


def _uncounted(reason: Reason) -> Reason:
    """A lack of blocks as a recorder writes it, which does not count them."""
    return Reason("kv_blocks", reason.limit, reason.value, available=0)


def _common(one: str, other: str) -> int:
    """Number of equal hashes at the beginning of two texts."""
    count = 0
    for place in range(0, min(len(one), len(other)), HASH_DIGITS):
        if one[place : place + HASH_DIGITS] != other[place : place + HASH_DIGITS]:
            break
        count += 1
    return count
