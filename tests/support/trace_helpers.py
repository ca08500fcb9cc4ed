"""Traces for tests: runs of the real scheduler, with the fields that a real engine adds to its records."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import msgspec
import pytest
from hypothesis import strategies as st

from workbench import EngineConfig, SamplingParams
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.trace import KernelLaunch, RequestInfo, StepRecord, Supplement, Trace, TraceMeta, WorkItem


@dataclass
class PoolTruth:
    """The state of the block pool at one moment."""

    free_queue: list[int]
    cached: set[int]
    tables: dict[str, list[int]]
    others: dict[str, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, scheduler: Scheduler) -> PoolTruth:
        pool = scheduler.kv_cache.block_pool
        running = [request for request in scheduler.running if request.status == "running"]
        tables = {request.request_id: list(request.block_table) for request in running}
        others = {request.request_id: tuple(map(tuple, request.block_tables[1:])) for request in running}
        return cls(pool.free_queue, set(pool.cached_blocks), tables, others)


def watch_pools(patch: pytest.MonkeyPatch) -> dict[tuple[int, str], PoolTruth]:
    """The true state of the pool at both moments of each step of the schedulers that run from now on."""
    truths: dict[tuple[int, str], PoolTruth] = {}
    schedule, update = Scheduler.schedule, Scheduler.update

    def watched_schedule(self):
        batch = schedule(self)
        truths[batch.step, "scheduled"] = truths[batch.step, "end"] = PoolTruth.of(self)
        return batch

    def watched_update(self, batch, *arguments, **options):
        iteration = self._in_flight[-1].step
        update(self, batch, *arguments, **options)
        truths[iteration, "end"] = PoolTruth.of(self)
        return batch

    patch.setattr(Scheduler, "schedule", watched_schedule)
    patch.setattr(Scheduler, "update", watched_update)
    return truths


def run_scheduler(config: EngineConfig, requests, aborts, failures=frozenset(), num_steps=60):
    """A trace, and the true state of the pool at both moments of each step.

    As vLLM, so that requests larger than the pool are not refused.

    requests: (arrival_step, priority, prompt, max_tokens) of "r0", "r1", ...
    """
    scheduler = Scheduler(config, clock=lambda: 0.0, as_vllm=True)
    trace = Trace(TraceMeta(source="simulation", config=config.to_dict()))
    truths = {}
    for step in range(num_steps):
        for number, (arrival_step, priority, prompt, max_tokens) in enumerate(requests):
            request_id = f"r{number}"
            if arrival_step == step:
                sampling = SamplingParams(max_tokens=max_tokens)
                arrival_time = step + number / 100
                scheduler.add_request(
                    Request(request_id, prompt, sampling, priority=priority, arrival_time=arrival_time)
                )
                trace.add_request(
                    RequestInfo(request_id, len(prompt), tuple(prompt), max_tokens=max_tokens, arrival_step=step)
                )
            if aborts.get(number) == step:
                scheduler.abort_request(request_id)
        batch = scheduler.schedule()
        truths[step, "scheduled"] = PoolTruth.of(scheduler)
        if step in failures:
            record = scheduler.fail(batch).to_record()
        else:
            tokens = [chunk.request.num_tokens % 7 if chunk.samples else None for chunk in batch.chunks]
            record = scheduler.update(batch, tokens).to_record()
        trace.append(record)
        truths[step, "end"] = PoolTruth.of(scheduler)
    return trace, truths


# Few different tokens and shared beginnings, so that the prefix cache has hits.
prompts = st.builds(
    lambda prefix, tail: [1] * prefix + tail, st.integers(0, 24), st.lists(st.integers(1, 2), min_size=1, max_size=20)
)
workloads = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 2), prompts, st.integers(1, 12)), min_size=1, max_size=8
)
aborts = st.dictionaries(st.integers(0, 7), st.integers(0, 30), max_size=2)
failures = st.sets(st.integers(0, 59), max_size=2)
configs = st.builds(
    EngineConfig,
    max_num_batched_tokens=st.sampled_from([4, 11, 32, 64]),
    max_num_seqs=st.integers(1, 6),
    block_size=st.sampled_from([1, 4]),
    num_blocks=st.integers(5, 40),
    policy=st.sampled_from(["fcfs", "priority"]),
    enable_prefix_caching=st.booleans(),
    scheduler_reserve_full_isl=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 3]),
    max_model_len=st.just(64),
)


def work_items(record: StepRecord) -> tuple[WorkItem, ...]:
    """One item per chunk; long chunks are split over KV in two."""
    bounds = record.cu_seqlens_q
    items = []
    for seq, chunk in enumerate(record.chunks):
        middle, num_splits = (chunk.end // 2, 2) if chunk.end > 8 else (chunk.end, 1)
        for split, (start, end) in enumerate([(0, middle), (middle, chunk.end)][:num_splits]):
            items.append(WorkItem(seq, bounds[seq], chunk.num_tokens, start, end, split, num_splits))
    return tuple(items)


def as_from_an_engine(trace: Trace, texts: list[str], random: Random) -> Trace:
    """The same run with times, phases, texts, kernel launches and supplements."""
    result = Trace(msgspec.structs.replace(trace.meta, source="engine", model={"name": "tiny", "layers": 2}))
    result.end = "done"
    arriving = list(trace.requests.values())
    for record in trace:
        while arriving and arriving[0].arrival_step <= record.step:
            info = arriving.pop(0)
            time = max(0.0, record.step * 0.25 - 0.1)
            result.add_request(msgspec.structs.replace(info, prompt=random.choice(texts), arrival_time=time))
        chunks = tuple(
            msgspec.structs.replace(chunk, text=random.choice(texts) if chunk.sampled is not None else "")
            for chunk in record.chunks
        )
        phases = ("schedule", "prepare", "forward", "sample", "update")
        kernel = KernelLaunch("cpu", (len(chunks), 1, 1), dtype="float32", work_items=work_items(record))
        result.append(
            msgspec.structs.replace(
                record,
                chunks=chunks,
                time=record.step * 0.25,
                timings={phase: random.random() / 25 for phase in phases} if chunks else {},
                kernel=kernel if chunks else None,
            )
        )
        if record.step % 5 == 2 and chunks:
            facts = {"layer": 1, "faults": [random.choice(texts)], "max_difference": 2e-7, "launches": [{"nested": 1}]}
            result.add_supplement(Supplement(record.step, "shadow", facts))
    for info in arriving:
        result.add_request(info)
    return result


texts = st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), min_size=1, max_size=5)


@st.composite
def traces(draw) -> Trace:
    """A random run, as an engine records it."""
    num_steps = draw(st.integers(0, 40))
    trace, _ = run_scheduler(draw(configs), draw(workloads), draw(aborts), draw(failures), num_steps)
    return as_from_an_engine(trace, draw(texts), draw(st.randoms(use_true_random=False)))


def one_trace(num_steps: int = 25) -> Trace:
    """A fixed run with chunked prefill, prefix hits, a preemption and several ends, as an engine records it."""
    config = EngineConfig(max_num_batched_tokens=8, max_num_seqs=4, block_size=4, num_blocks=10, max_model_len=40)
    requests = [(n // 2, 0, [1] * 8 + [2] * (1 + 3 * n), 5 + n) for n in range(5)]
    trace, _ = run_scheduler(config, requests, {}, num_steps=num_steps)
    return as_from_an_engine(trace, ["a", "é ", "<b>", "\u202e"], Random(1))
