"""Helpers of the scheduler's tests: a scheduler that runs without a model, and a KV cache that is checked."""

from collections.abc import Callable, Sequence
from typing import Any

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.engine.request import Request
from workbench.engine.scheduler import ScheduledBatch, Scheduler
from workbench.engine.workload import made_up_token
from workbench.trace import StepRecord


def make_scheduler(**fields: Any) -> Scheduler:
    """A small scheduler with round numbers; prefix caching off unless asked for."""
    defaults = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "block_size": 4,
        "num_blocks": 65,
        "enable_prefix_caching": False,
    }
    return Scheduler(EngineConfig(**{**defaults, **fields}), clock=lambda: 0.0)


def tokens(count: int, seed: str = "x") -> list[int]:
    """``count`` token ids that depend on the seed."""
    return [made_up_token(f"{seed}:{index}") for index in range(count)]


def add(
    scheduler: Scheduler, request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, **fields: Any
) -> Request:
    """Queue a request; a prompt given as a number is that many tokens of the request's own."""
    prompt = tokens(prompt, request_id) if isinstance(prompt, int) else prompt
    fields.setdefault("arrival_time", scheduler.step + 1e-6 * len(scheduler.requests))
    request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), **fields)
    scheduler.add_request(request)
    return request


def next_token(request: Request) -> int:
    """What the model that is not there says: it depends on the request and the position alone."""
    return made_up_token(f"{request.request_id}:{request.num_tokens}")


def sample(batch: ScheduledBatch) -> list[int | None]:
    """A token for each chunk that samples."""
    return [next_token(chunk.request) if chunk.samples else None for chunk in batch.chunks]


def step(scheduler: Scheduler) -> StepRecord:
    """One whole step, with the books checked in between."""
    batch = scheduler.schedule()
    scheduler.check_integrity()
    record = scheduler.update(batch, sample(batch))
    scheduler.check_integrity()
    return record


def run(scheduler: Scheduler, max_steps: int = 1000, each: Callable[[], Any] = lambda: None) -> list[StepRecord]:
    """Step until every request has ended."""
    records = []
    while scheduler.has_unfinished_requests():
        assert len(records) < max_steps, f"no end in sight: {scheduler.requests}"
        each()
        records.append(step(scheduler))
    return records


def sizes(record: StepRecord) -> dict[str, int]:
    """Tokens of each chunk by request."""
    return {chunk.request_id: chunk.num_tokens for chunk in record.chunks}


class CheckedKVCache:
    """A KV cache that holds, instead of keys and values, what they would have been computed from.

    The KV of a position follows from all tokens up to it, so that is what a slot keeps. A chunk that reads a slot with
    anything else in it reads another prompt's KV, or KV that was never computed.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}

    def forward(self, batch: ScheduledBatch) -> None:
        """Write the KV of all rows, then let all rows read, as a layer does."""
        contexts = {chunk.request.request_id: self._contexts(chunk.request) for chunk in batch.chunks}
        written = set()
        for chunk in batch.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                slot = self._slot(chunk.request, position)
                assert slot not in written, f"slot {slot} is written twice in step {batch.step}"
                written.add(slot)
                self.slots[slot] = contexts[chunk.request.request_id][position]
        for chunk in batch.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                found = self.slots.get(self._slot(chunk.request, position))
                assert found == contexts[chunk.request.request_id][position], (
                    f"step {batch.step}: {chunk.request} reads wrong KV at position {position}"
                )

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_table[position // self.block_size], position % self.block_size

    @staticmethod
    def _contexts(request: Request) -> list[int]:
        """For each position a number that stands for all tokens up to it."""
        contexts, context = [], 0
        for token in request.token_ids:
            context = hash((context, token))
            contexts.append(context)
        return contexts
