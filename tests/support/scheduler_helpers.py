"""Helpers of the scheduler's tests: a scheduler that runs without a model, and a KV cache that is checked."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.checked import CheckedScheduler
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.arrivals import Arrival
from workbench.simulation.workload import made_up_token
from workbench.trace import StepRecord


def make_scheduler(*, as_vllm: bool = False, **fields: Any) -> Scheduler:
    """A small scheduler that checks the laws, with round numbers; prefix caching is off by default."""
    defaults = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "block_size": 4,
        "num_blocks": 65,
        "enable_prefix_caching": False,
    }
    return CheckedScheduler(EngineConfig(**{**defaults, **fields}), clock=lambda: 0.0, as_vllm=as_vllm)


def tokens(count: int, seed: str = "x") -> list[int]:
    """``count`` token ids that depend on the seed."""
    return [made_up_token(f"{seed}:{index}") for index in range(count)]


def add(
    scheduler: Scheduler, request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, **fields: Any
) -> Request:
    """Queue a request; a prompt given as a number stands for that many tokens unique to the request."""
    prompt = tokens(prompt, request_id) if isinstance(prompt, int) else prompt
    fields.setdefault("arrival_time", scheduler.step + 1e-6 * len(scheduler.requests))
    request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), **fields)
    scheduler.add_request(request)
    return request


def next_token(request: Request) -> int:
    """The token of an imaginary model, which depends only on the request and the position."""
    return made_up_token(f"{request.request_id}:{request.num_tokens}")


def sample(batch: ScheduledBatch) -> list[int | None]:
    """One token for each chunk that samples."""
    return [next_token(chunk.request) if chunk.samples else None for chunk in batch.chunks]


def step(scheduler: Scheduler) -> StepRecord:
    """Take one whole step."""
    batch = scheduler.schedule()
    return scheduler.update(batch, sample(batch)).to_record()


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
    """A KV cache that holds the tokens from which keys and values would have been computed.

    The KV of a position follows from all tokens up to it, so a slot keeps these tokens. A chunk that finds anything
    else in a slot would read another prompt's KV, or KV that was never computed.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}

    def forward(self, batch: ScheduledBatch) -> None:
        """Write the KV of all rows, then read it for all rows, as a layer does."""
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
        """For each position, a number that identifies all tokens up to it."""
        contexts, context = [], 0
        for token in request.token_ids:
            context = hash((context, token))
            contexts.append(context)
        return contexts


def random_workload(rng: random.Random) -> tuple[EngineConfig, list[Arrival]]:
    """Requests that together exceed the blocks, the token budget and max_num_seqs; each of them fits alone."""
    block_size = rng.choice([1, 2, 4, 5])
    num_blocks = rng.randint(10, 24)
    config = EngineConfig(
        max_num_batched_tokens=rng.choice([2, 4, 9, 16, 40]),
        max_num_scheduled_tokens=rng.choice([None, None, 2]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_active_seqs=rng.choice([None, None, 2]),
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=rng.random() < 0.6,
        policy=rng.choice(["fcfs", "priority", "priority"]),
        watermark=rng.choice([0.0, 0.0, 0.1, 0.25]),
        scheduler_reserve_full_isl=rng.random() < 0.6,
        long_prefill_token_threshold=rng.choice([0, 0, 2, 6]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.3,
        max_model_len=rng.choice([None, None, 20]),
    )
    longest = min(config.max_model_len or 10**9, (num_blocks - 1) * block_size)
    arrivals = []
    for index in range(rng.randint(4, 12)):
        length = rng.randint(1, longest - 1)
        step = rng.randint(0, 12)
        shared = min(rng.choice([0, 4, 8, 12]), length)
        arrivals.append(
            Arrival(
                f"r{index}",
                tokens(shared, f"s{rng.randint(0, 1)}") + tokens(length - shared, rng.choice(["own", f"r{index}"])),
                SamplingParams(max_tokens=rng.randint(1, longest - length)),
                priority=rng.randint(0, 3),
                arrival_step=step,
                arrival_time=step + 1e-6 * index,
                abort_step=step + rng.randint(1, 10) if rng.random() < 0.1 else None,
            )
        )
    return config, sorted(arrivals, key=lambda arrival: arrival.arrival_step)
