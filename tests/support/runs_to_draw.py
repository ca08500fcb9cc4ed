"""Runs that have everything a picture can show: chunks, decodes, preemptions, prefix hits, drafts, windows, several KV
cache groups, asynchronous steps, times, phases and launches."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

from facts_of_records import Facts
from feature_workloads import random_workload
from msgspec.structs import replace
from viz_traces import workload

from workbench import simulate
from workbench.trace import Trace
from workbench.trace.records import KernelLaunch, WorkItem

COSTS = {"fixed": 0.01, "per_prefill_token": 0.0004, "per_kv_token": 0.00001}


def launch(record: Any, rng: random.Random) -> KernelLaunch:
    """A launch with a random division of each sequence into work items, which may split its KV."""
    items, row = [], 0
    for seq, chunk in enumerate(record.chunks):
        at = 0
        while at < chunk.num_tokens:
            rows = min(chunk.num_tokens - at, rng.randint(1, 8))
            end = chunk.start - chunk.ahead + at + rows
            cuts = sorted({0, end, *(rng.sample(range(1, end), 1) if end > 3 and rng.random() < 0.3 else [])})
            for split, (first, last) in enumerate(itertools.pairwise(cuts)):
                items.append(WorkItem(seq, row + at, rows, first, last, split, len(cuts) - 1))
            at += rows
        row += chunk.num_tokens
    return KernelLaunch(
        "cpu", block_q=8, block_kv=4, num_heads=4, num_kv_heads=2, head_dim=16, dtype="float16",
        windows=(rng.choice([-1, 7]),), work_items=tuple(items),
    )  # fmt: skip


def dressed(trace: Trace, seed: int) -> Trace:
    """The run as an engine records it: with texts, phases, of which some begin before the step, and launches."""
    rng, drawn = random.Random(seed), Trace(trace.meta)
    for info in trace.requests.values():
        drawn.add_request(replace(info, prompt=f"ask {info.request_id}"))
    for record in trace:
        seconds = record.end - record.time
        timings = {"schedule": 0.1 * seconds, "forward": 0.7 * seconds, "sample": 0.1 * seconds} if seconds else {}
        starts = {"schedule": -0.2 * seconds} if seconds and rng.random() < 0.5 and record.step else {}
        chunks = tuple(
            replace(chunk, text="" if chunk.sampled is None or rng.random() < 0.1 else f"w{chunk.sampled} ")
            for chunk in record.chunks
        )
        chunks = tuple(replace(chunk, sampled=0) if chunk.text.startswith("w9") else chunk for chunk in chunks)
        kernel = launch(record, rng) if record.chunks else None
        changes = {"timings": timings, "phase_starts": starts, "kernel": kernel, "chunks": chunks}
        drawn.append(replace(record, **changes))
    drawn.end = trace.end
    return drawn


def _slow_end(trace: Trace) -> Trace:
    """A run whose last token takes longer than any before."""
    drawn = Trace(trace.meta)
    for info in trace.requests.values():
        drawn.add_request(info)
    last = max(record.step for record in trace if any(c.sampled is not None for c in record.chunks))
    for record in trace:
        if record.step <= last:
            end = record.end if record.step < last else record.time + 40 * record.duration
            drawn.append(replace(record, end=end))
    return drawn


@cache
def run(name: str) -> tuple[Trace, Facts]:
    """A run by its name, and its facts."""
    kind, _, seed = name.partition(" ")
    if kind == "plain":
        trace = simulate(workload(int(seed), num_requests=12), max_steps=400)
    elif kind == "many":
        trace = simulate(workload(int(seed), num_requests=30), max_steps=400)
    elif kind == "crowd":
        prompts = [{"len": 1 + 7 * i % 50, "seed": f"p{i}"} for i in range(40)]
        requests = [
            {"id": f"request-{i}", "prompt": prompt, "max_tokens": 9 + i % 5} for i, prompt in enumerate(prompts)
        ]
        config = {"max_num_batched_tokens": 200, "max_num_seqs": 32, "num_blocks": 300, "block_size": 8}
        trace = dressed(simulate({"config": config, "requests": requests}), 1)
    elif kind == "idle":
        times = [0.0, 0.01, 0.3, 0.45, 3.0, 3.02, 9.0]
        requests = [
            {"id": f"r{i}", "prompt": {"len": 30}, "max_tokens": 4, "arrival_time": at} for i, at in enumerate(times)
        ]
        trace = dressed(simulate({"requests": requests, "cost_model": COSTS, "config": {"num_blocks": 90}}), 1)
    elif kind == "big":
        prompts = {"a": 460, "b": 7, "c": 40}
        requests = [{"id": name, "prompt": {"len": length}, "max_tokens": 4} for name, length in prompts.items()]
        trace = dressed(
            simulate({"config": {"max_num_batched_tokens": 250, "num_blocks": 90}, "requests": requests}), 1
        )
    elif kind == "long":
        requests = [{"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 30, "arrival_step": 12 * i} for i in range(50)]
        trace = simulate({"config": {"block_size": 4, "num_blocks": 60}, "requests": requests})
    elif kind == "cut":  # every second request ends at max_model_len; with drafts, a step gives several tokens
        requests = [
            {
                "id": f"r{i}",
                "prompt": {"len": 9 + 5 * i},
                "max_tokens": 4 + 40 * (i % 2),
                "arrival_step": i,
                "accepts": [i % 3 + 1, 0, 2] if seed != "0" else [],
            }
            for i in range(6)
        ]
        drafts = {"num_speculative_tokens": int(seed), "spec_method": "draft_model"} if seed != "0" else {}
        config = {"block_size": 4, "num_blocks": 60, "max_model_len": 48, **drafts}
        trace = dressed(simulate({"config": config, "requests": requests}), 1)
    elif kind == "pool":
        requests = [{"id": f"r{i}", "prompt": {"len": 9 + i}, "max_tokens": 6} for i in range(4)]
        trace = simulate({"config": {"block_size": 4, "num_blocks": int(seed)}, "requests": requests})
    elif kind == "slow_end":
        trace = _slow_end(run(f"timed {seed}")[0])
    elif kind in ("timed", "aborts"):
        given = workload(int(seed), num_requests=14, num_blocks=70)
        for number, request in enumerate(given["requests"][::3] if kind == "aborts" else ()):
            request["abort_step"] = 5 + 3 * (number // 2)
        trace = dressed(simulate({**given, "cost_model": COSTS}, max_steps=400), int(seed))
    elif kind == "timed_spec":
        trace = simulate({**random_workload("spec", random.Random(f"drawn spec {seed}")), "cost_model": COSTS})
    else:
        trace = simulate(random_workload(kind, random.Random(f"drawn {name}")), max_steps=80)
    return trace, Facts(trace)


RUNS = (
    "plain 1", "timed 3", "async 24", "spec 16", "async_spec 41", "async_spec 16", "window_only 22", "window_only 6",
    "hybrid_window 30",
    "hybrid_window_prefix 36", "hybrid_mamba 27", "spec_hybrid 51",
)  # fmt: skip


def steps_of(facts: Facts, most: int = 9) -> list[int]:
    """Some steps of a run: those in which most happens, and others equally far apart."""
    busiest = sorted(range(len(facts)), key=lambda step: -len(facts.events(step)) - len(facts.records[step].chunks))
    stride = max(1, len(facts) // most)
    return sorted({*busiest[: most // 2], *range(0, len(facts), stride), len(facts) - 1})
