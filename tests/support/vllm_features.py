"""Recordings of vLLM's scheduler with asynchronous steps, speculation and several KV cache groups."""

import gzip
import json
from pathlib import Path
from typing import Any

from workbench import simulate
from workbench.trace import StepRecord

DATA = Path(__file__).parents[1] / "data" / "vllm-features"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz"))


def read(name: str) -> dict[str, Any]:
    """A recording: its workload, facts about the vLLM that ran it, steps and end."""
    return json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))


def as_vllm(record: StepRecord, previous: StepRecord | None, asynchronous: bool) -> dict[str, Any]:
    """A record in the format of the recordings."""
    chunks = record.chunks
    processed = previous if asynchronous else record
    groups = record.block_tables_by_group
    return {
        "step": record.step,
        "arrived": list(record.arrived),
        "aborted": list(record.aborted),
        "scheduled": [[chunk.request_id, chunk.num_tokens] for chunk in chunks],
        "num_computed_before": {chunk.request_id: chunk.start for chunk in chunks},
        "drafts": {chunk.request_id: list(chunk.drafts) for chunk in chunks if chunk.drafts},
        "block_ids": {request_id: list(map(list, tables)) for request_id, tables in groups.items()},
        "new": list(record.admitted),
        "resumed": list(record.resumed),
        "preempted": list(record.preempted),
        "taken_back": [request_id for request_id in record.preempted if request_id in record.unscheduled_block_ids],
        "hits": {
            chunk.request_id: chunk.num_cached_tokens
            for chunk in chunks
            if chunk.request_id in record.admitted or chunk.request_id in record.resumed
        },
        "running": list(record.running),
        "waiting": list(record.waiting),
        "free_blocks": record.free_blocks,
        "processed": processed.step if processed is not None and processed.chunks else None,
        "finished": list(record.finished),
        "appended": {chunk.request_id: list(chunk.accepted) for chunk in chunks if chunk.accepted},
        "num_accepted": {
            chunk.request_id: chunk.num_accepted for chunk in chunks if chunk.drafts and not chunk.discarded
        },
        "free_blocks_end": record.free_blocks_end,
    }


def read_runs(folder):
    """The recorded random workloads of a folder of tests/data."""
    path = Path(__file__).parents[1] / "data" / folder / "runs.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))


def differences(run):
    """The steps at which a simulation differs from the recording, and the simulation."""
    trace = simulate(run["workload"], as_vllm=True, max_steps=400)
    asynchronous = run["workload"]["config"]["async_scheduling"]
    steps = [as_vllm(record, before, asynchronous) for record, before in zip(trace, [None, *trace])]
    found = [
        expected["step"]
        for step, expected in zip(steps, run["steps"])
        if {key: step[key] for key in expected} != expected or [*step["block_ids"]] != [*expected["block_ids"]]
    ]
    return found or ([] if len(steps) == len(run["steps"]) and trace.end == run["end"] else ["the end"]), trace


def count_waits(record, kind, seen):
    """The requests that wait in a step for a reason of a kind; what the step shows is added to a Counter."""
    waits = {request_id for request_id, reason in record.not_scheduled.items() if reason.kind == kind}
    seen["waits"] += len(waits)
    seen["overtaken"] += bool(waits) and record.waiting[0] in waits and bool(record.admitted)
    seen["preempted"] += len(record.preempted)
    seen["hits"] += sum(chunk.num_cached_tokens > 0 for chunk in record.chunks)
    seen["drafts"] += sum(len(chunk.drafts) for chunk in record.chunks)
    return waits
