"""An emulated accelerator: vLLM's CPU worker with a tiny model, whose steps last as long as a formula says.

The scheduler, the engine, the HTTP server and the client are real. A step sleeps to its end, so several servers share a
machine without disturbing each other, and times repeat. None of the formulas has the form of Workbench's cost model.

    vllm serve FOLDER --load-format dummy --worker-cls emulated_worker.EmulatedWorker

The environment variable WORKBENCH_EMULATED chooses the formula: "smooth", "noise" or "drift".
"""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

SCALE = float(os.environ.get("WORKBENCH_EMULATED_SCALE", "10"))
"""Times as slow as the accelerator that the formulas describe, so that Python's own time hardly counts."""

DRIFT_SECONDS = 120.0
"""Time in which the steps of "drift" become 10% slower."""


def step_seconds(
    kind: str, num_tokens: int, num_seqs: int, kv: int, cells: int, now: float, rng: random.Random
) -> float:
    """Duration of a step.

    Args:
        kind: "smooth": arithmetic saturates softly and short batches use it badly. "noise": the larger of memory and
            arithmetic, 10% noise. "drift": the same without noise, and slower every minute.
        num_tokens: Rows of the step.
        num_seqs: Sequences of the step.
        kv: KV positions read.
        cells: (prompt row, KV position) pairs.
        now: Seconds since the first step.
        rng: Source of the noise.
    """
    memory = 0.016 + 1.0e-6 * kv
    arithmetic = 0.000130 * num_tokens + 2.0e-8 * cells
    host = 0.003 + 0.00006 * num_seqs
    if kind == "smooth":
        width = 0.004
        excess = (arithmetic - memory) / width
        return host + memory + width * (excess if excess > 50 else math.log1p(math.exp(excess)))
    if kind == "noise":
        return (host + max(memory, arithmetic)) * max(0.5, rng.gauss(1.0, 0.1))
    if kind == "drift":
        return (host + max(memory, arithmetic)) * (1 + 0.1 * now / DRIFT_SECONDS)
    raise ValueError(f"WORKBENCH_EMULATED={kind!r} must be smooth, noise or drift")


class EmulatedWorker(CPUWorker):
    """vLLM's CPU worker; each step ends when the formula says so, or later if the model takes longer."""

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the tiny model, and sleep to the end of the step."""
        started = time.perf_counter()
        output = super().execute_model(scheduler_output, *args, **kwargs)
        counts = scheduler_output.num_scheduled_tokens
        if counts:
            state = self.__dict__.setdefault("_emulated", {"start": started, "rng": random.Random(os.getpid())})
            computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
            cached = scheduler_output.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens))
            starts = [(computed.get(request_id, 0), count) for request_id, count in counts.items()]
            seconds = SCALE * step_seconds(
                os.environ.get("WORKBENCH_EMULATED", "smooth"),
                sum(counts.values()),
                len(counts),
                sum(start + count for start, count in starts),
                sum(count * start + count * (count + 1) // 2 for start, count in starts if count > 1),
                started - state["start"],
                state["rng"],
            )
            time.sleep(max(0.0, started + seconds - time.perf_counter()))
        return output
