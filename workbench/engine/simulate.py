"""Run a workload through the engine's own scheduler without a model."""

from __future__ import annotations

import os
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tqdm.auto import tqdm

from workbench.engine.config import EngineConfig
from workbench.engine.request import Request
from workbench.engine.scheduler import Scheduler
from workbench.engine.workload import Arrival, made_up_token, read_workload
from workbench.trace import Trace, TraceMeta

MAX_STEPS = 100_000
"""Steps of a simulation at most, unless asked otherwise."""

STUCK_AFTER = 3
"""Steps without a single token, with requests left and nothing to come, after which a simulation gives up."""


def simulate(
    workload: Mapping[str, Any] | str | os.PathLike[str],
    *,
    config: EngineConfig | Mapping[str, Any] | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> Trace:
    """Run a workload through the scheduler; the same one that an Engine uses.

    There is no model: the token at position p of request r is ``3 + crc32("r:p") % 31997``, and nothing but
    ``max_tokens`` and ``max_model_len`` ends a request. The result is the same on every machine.

    Args:
        workload: A workload, or the path of its JSON file; the format is that of ``workbench.engine.workload``.
        config: Replaces the workload's configuration; a mapping changes only the fields it names.
        max_steps: Steps at most.
        progress: Show a progress bar of requests that ended.

    Returns:
        The trace. Its ``end`` is "done", "stuck" (requests are left that can never be scheduled) or "max_steps".

    Raises:
        ValueError: The workload or the configuration is malformed.

    Example:
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]})
        >>> [(chunk.request_id, chunk.num_tokens) for step in trace for chunk in step.chunks]
        [('a', 20), ('a', 1)]
    """
    base, arrivals = read_workload(workload)
    if isinstance(config, EngineConfig):
        base = config
    elif config is not None:
        base = base.replace(**config)

    def sample_token(request: Request) -> int:
        return made_up_token(f"{request.request_id}:{request.num_tokens}")

    return simulate_requests(base, arrivals, sample_token, max_steps=max_steps, progress=progress)


def simulate_requests(
    config: EngineConfig,
    arrivals: Iterable[Arrival],
    sample_token: Callable[[Request], int],
    *,
    config_at: Mapping[int, EngineConfig] = MappingProxyType({}),
    meta: TraceMeta | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> Trace:
    """Run requests through the scheduler with tokens of the caller's choice.

    Args:
        config: Configuration of the first step.
        arrivals: The requests, in any order; those of one step arrive in the order given.
        sample_token: The next token of a request, whose ``token_ids`` holds all tokens before it.
        config_at: Configurations that come into force before a step is scheduled, by step.
        meta: First line of the trace; by default one that says "simulation" and holds ``config``.
        max_steps: Steps at most.
        progress: Show a progress bar of requests that ended.

    Returns:
        The trace, with ``end`` set.

    Raises:
        ValueError: ``max_steps`` is below 1, or a configuration changes the KV cache's shape.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be >= 1, got {max_steps}")
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.arrival_step))
    aborts: list[tuple[int, int, str]] = []  # of requests that have arrived: (step, order of arrival, id)
    trace = Trace(meta or TraceMeta(source="simulation", config=config.to_dict(), versions=_versions()))
    # Simulated steps take no time: a record of 0 seconds says so, and equal runs give equal traces.
    scheduler = Scheduler(config, clock=lambda: 0.0)
    num_idle_steps = 0
    with tqdm(total=len(pending), desc="simulation", unit="request", disable=not progress) as bar:
        while pending or scheduler.has_unfinished_requests():
            step = scheduler.step
            if step == max_steps:
                trace.end = "max_steps"
                return trace
            if step in config_at:
                scheduler.reconfigure(config_at[step])
            while pending and pending[0].arrival_step <= step:
                arrival = pending.popleft()
                request = arrival.to_request()
                scheduler.add_request(request)
                trace.add_request(request.info())
                if arrival.abort_step is not None:
                    insort(aborts, (arrival.abort_step, len(trace.requests), arrival.request_id))
            while aborts and aborts[0][0] <= step:
                scheduler.abort_request(aborts.pop(0)[2])
            batch = scheduler.schedule()
            record = scheduler.update(
                batch, [sample_token(chunk.request) if chunk.samples else None for chunk in batch.chunks]
            )
            trace.append(record)
            bar.update(len(record.finished) + len(record.aborted))
            something_to_come = pending or any(request_id in scheduler.requests for _, _, request_id in aborts)
            num_idle_steps = 0 if record.chunks or record.arrived or something_to_come else num_idle_steps + 1
            if num_idle_steps == STUCK_AFTER and scheduler.has_unfinished_requests():
                trace.end = "stuck"
                return trace
    trace.end = "done"
    return trace


def _versions() -> dict[str, str]:
    import workbench

    return {"workbench": workbench.__version__}
