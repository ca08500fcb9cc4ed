"""Vidur's replica schedulers behind the protocol of `workbench certify`; they need nothing of what Vidur installs.

    VIDUR=CHECKOUT workbench certify vidur_simulator:sarathi
    VIDUR=CHECKOUT workbench certify vidur_simulator:vllm

Vidur estimates times from profiles and learned models. They are left out: every step is as long as the next.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, os.environ.get("VIDUR", "vidur"))
for name in ("config", "execution_time_predictor", "scheduler.utils.memory_planner", "entities.replica"):
    sys.modules[f"vidur.{name}"] = MagicMock()  # what reads profiles and needs scikit-learn
sys.modules["vidur.logger"] = SimpleNamespace(init_logger=lambda name: MagicMock())  # type: ignore[assignment]
from importlib import import_module  # noqa: E402

KNOWN = {"block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "watermark"}
"""The settings that it has. Any other one is refused: it would be the schedule of another workload."""

SAME = {"enable_prefix_caching": False, "policy": "fcfs", "async_scheduling": False}
"""The settings of which it has one value; each scheduler adds what it does with prompts."""

FIELDS = {"id", "prompt_token_ids", "output_token_ids", "max_tokens", "arrival_step", "arrival_time"}
"""The fields of a request that it has."""

MOST_STEPS = 2000


def sarathi(workload: dict[str, Any]) -> dict[str, Any]:
    """The schedule of Vidur's scheduler with chunked prefill."""
    return schedule(workload, "sarathi", "SarathiReplicaScheduler")


def vllm(workload: dict[str, Any]) -> dict[str, Any]:
    """The schedule of Vidur's scheduler after the first vLLM: whole prompts, apart from decodes."""
    return schedule(workload, "vllm", "VLLMReplicaScheduler")


def schedule(workload: dict[str, Any], module: str, name: str) -> dict[str, Any]:
    """The schedule of a workload through one of Vidur's replica schedulers."""
    config = workload["config"]
    same = SAME | {"enable_chunked_prefill": module == "sarathi"}
    lacks = [key for key, value in config.items() if key not in KNOWN and (key not in same or value != same[key])]
    lacks += [f"{key} of a request" for request in workload["requests"] for key in request if key not in FIELDS]
    if lacks:
        return {"unsupported": f"no {lacks[0]}"}
    parts = import_module(f"vidur.scheduler.replica_scheduler.{module}_replica_scheduler")
    entities = import_module("vidur.entities.request")
    parts.BaseReplicaScheduler.__init__.__globals__["MemoryPlanner"] = lambda *_: MagicMock(
        get_max_batch_size=lambda: 1 << 20
    )
    limits = SimpleNamespace(
        block_size=config.get("block_size", 16),
        num_blocks=config.get("num_blocks", 512) - 1,
        batch_size_cap=config.get("max_num_seqs", 16),
        chunk_size=config.get("max_num_batched_tokens", 512),
        max_tokens_in_batch=config.get("max_num_batched_tokens", 512),
        watermark_blocks_fraction=config.get("watermark", 0.0),
    )
    lengths = SimpleNamespace(max_tokens=config.get("max_model_len", 4096))
    scheduler = getattr(parts, name)(None, limits, lengths, SimpleNamespace(id=0), 1, MagicMock())
    names, pending = {}, []
    for given in sorted(
        workload["requests"], key=lambda each: (each.get("arrival_step", 0), each.get("arrival_time", 0))
    ):
        arrival = given.get("arrival_step", 0)
        made = entities.Request(arrival, len(given["prompt_token_ids"]), len(given["output_token_ids"]))
        names[made.id] = given["id"]
        pending.append(made)
    steps: list[dict[str, Any]] = []
    live: dict[int, Any] = {}
    while (pending or live) and len(steps) < MOST_STEPS:
        while pending and pending[0].arrived_at <= len(steps):
            live[pending[0].id] = pending[0]
            scheduler.add_request(pending.pop(0))
        restarts = {key: request.num_restarts for key, request in live.items()}
        held = set(scheduler._allocation_map)
        batches = scheduler.on_schedule()
        step: dict[str, Any] = {"chunks": [], "hits": {}, "finished": []}
        step["preempted"] = [names[key] for key, request in live.items() if request.num_restarts > restarts[key]]
        for batch in batches:
            for request, count in zip(batch.requests, batch.num_tokens):
                start = request.num_processed_tokens - request.is_prefill_complete
                step["chunks"].append({"id": names[request.id], "start": start, "num_tokens": count})
                if request.id not in held or names[request.id] in step["preempted"]:
                    step["hits"][names[request.id]] = 0
            batch.on_schedule(len(steps))
            batch.on_batch_end(len(steps))
            scheduler.on_batch_end(batch)
            step["finished"] += [names[request.id] for request in batch.completed_requests]
            for request in batch.completed_requests:
                del live[request.id]
        steps.append(step)
    return {"steps": steps}
