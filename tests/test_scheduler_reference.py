"""The scheduler against a second, plain implementation of the same rules, on random workloads under pressure."""

import random

import pytest
from scheduler_helpers import tokens
from scheduler_reference import ReferenceScheduler
from test_vllm_traces import DATA, NAMES, as_vllm, read_trace

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.engine.simulate import simulate_requests
from workbench.engine.workload import Arrival, made_up_token, read_workload


def random_workload(rng: random.Random) -> tuple[EngineConfig, list[Arrival]]:
    """Requests that want more blocks, tokens and seats than there are; any one of them would fit alone."""
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


def check_against_reference(config: EngineConfig, arrivals: list[Arrival]) -> dict[str, int]:
    reference = ReferenceScheduler(config, arrivals)
    trace = simulate_requests(
        config, arrivals, lambda r: made_up_token(f"{r.request_id}:{r.num_tokens}"), max_steps=600
    )
    seen = {"preempted": 0, "hits": 0}
    for record in trace:
        assert as_vllm(record) == reference.step(), f"step {record.step} of {config}"
        seen["preempted"] += len(record.preempted)
        seen["hits"] += sum(chunk.num_cached_tokens for chunk in record.chunks)
    assert trace.end == "done" and not reference.has_unfinished()
    return seen


@pytest.mark.parametrize("block", range(4))
def test_random_workloads_equal_the_reference(block):
    rng = random.Random(block)
    totals = {"preempted": 0, "hits": 0}
    for _ in range(75):
        seen = check_against_reference(*random_workload(rng))
        totals = {name: totals[name] + seen[name] for name in totals}
    assert totals["preempted"] > 100 and totals["hits"] > 100, "the workloads do not reach what they are for"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("c")])
def test_the_reference_equals_vllm(name):
    config, arrivals = read_workload(DATA / "workloads" / f"{name}.json")
    expected, _ = read_trace(name)
    reference = ReferenceScheduler(config, arrivals)
    assert [reference.step() for _ in expected] == expected
