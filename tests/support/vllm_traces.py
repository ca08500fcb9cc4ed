"""Recordings of vLLM's scheduler, and records in their format."""

import json
from pathlib import Path
from typing import Any

from workbench.trace import StepRecord

DATA = Path(__file__).parents[1] / "data" / "vllm"
NAMES = sorted(path.stem for path in (DATA / "workloads").glob("*.json"))


def read_trace(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    _, *steps, end = map(json.loads, (DATA / "traces" / f"{name}.jsonl").read_text().splitlines())
    return steps, end


def as_vllm(record: StepRecord) -> dict[str, Any]:
    """A record in the format of the recordings; dictionaries in scheduling order."""
    chunks = record.chunks
    return {
        "step": record.step,
        "arrived": list(record.arrived),
        "aborted": list(record.aborted),
        "scheduled": {chunk.request_id: chunk.num_tokens for chunk in chunks},
        "num_computed_before": {chunk.request_id: chunk.start for chunk in chunks},
        "block_ids": record.block_tables,
        "new": list(record.admitted),
        "resumed": list(record.resumed),
        "preempted": list(record.preempted),
        "finished": list(record.finished),
        "num_running": len(record.running),
        "num_waiting": len(record.waiting),
        "free_blocks": record.free_blocks,
        "total": record.num_tokens,
        "running": list(record.running),
        "waiting": list(record.waiting),
        "sampled": {chunk.request_id: chunk.sampled for chunk in chunks if chunk.sampled is not None},
        "free_blocks_end": record.free_blocks_end,
    }
