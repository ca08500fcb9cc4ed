"""Run a workload through the engine's own scheduler without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from tqdm.auto import tqdm

from workbench.engine.arrivals import read_generated
from workbench.engine.config import EngineConfig
from workbench.engine.cost_model import CostModel
from workbench.engine.policy import SchedulingPolicy, described
from workbench.engine.request import Request
from workbench.engine.simulated_run import SimulatedRun
from workbench.engine.workload import (
    MAX_WORKLOAD_TOKENS,
    Arrival,
    arrival_order,
    made_up_token,
    read_json_workload,
    read_workload,
)
from workbench.trace import Trace, TraceMeta

MAX_STEPS = 100_000
"""Steps of a simulation at most, unless asked otherwise."""

MAX_REQUESTS = 1_000_000
"""Requests of a simulation that keeps every step."""


def simulate(
    workload: Mapping[str, Any] | str | os.PathLike[str],
    *,
    config: EngineConfig | Mapping[str, Any] | None = None,
    cost_model: CostModel | None = None,
    policy: SchedulingPolicy | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> Trace:
    """Run a workload through the scheduler; the same one that an Engine uses.

    There is no model: the token at position p of request r is ``3 + crc32("r:p") % 31997``, and nothing but
    ``max_tokens`` and ``max_model_len`` ends a request. The result is the same on every machine.

    Args:
        workload: A workload, or the path of its JSON file; the format is that of ``workbench.engine.workload``.
        config: Replaces the workload's configuration; a mapping changes only the fields it names.
        cost_model: How long a step takes; the workload's own, and without one steps take no time and only
            ``arrival_step`` says when requests arrive.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
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
    base, arrivals, cost_model = read_simulation(workload, cost_model)
    if isinstance(config, EngineConfig):
        base = config
    elif config is not None:
        base = base.replace(**config)

    def sample_token(request: Request) -> int:
        return made_up_token(f"{request.request_id}:{request.num_tokens}")

    return simulate_requests(
        base, arrivals, sample_token, cost_model=cost_model, policy=policy, max_steps=max_steps, progress=progress
    )


def read_simulation(
    workload: Mapping[str, Any] | str | os.PathLike[str], cost_model: CostModel | None = None
) -> tuple[EngineConfig, Iterable[Arrival], CostModel | None]:
    """Check a workload that may also describe requests to generate, and how long steps take.

    Beside ``config`` it holds ``requests`` (see ``workbench.engine.workload``) or ``generate`` (see
    ``workbench.engine.arrivals.read_generated``), and may hold ``cost_model``, coefficients of CostModel by name.

    Args:
        workload: The workload, or the path of its JSON file.
        cost_model: Replaces the workload's.

    Returns:
        Configuration, requests (made one by one where they are generated), and the cost model.

    Raises:
        ValueError: The workload is malformed, or its requests have times and there is no cost model.
    """
    content = dict(read_json_workload(workload))
    if (coefficients := content.pop("cost_model", None)) is not None and cost_model is None:
        cost_model = CostModel.from_dict(coefficients)
    if "generate" not in content:
        config, arrivals = read_workload(content)
        return config, sorted(arrivals, key=arrival_order), cost_model
    if "requests" in content:
        raise ValueError("a workload has either requests or generate, not both")
    generated = read_generated(content.pop("generate"))
    if cost_model is None:
        raise ValueError('generated requests arrive at times: give a cost_model, such as {"fixed": 0.01}')
    config, _ = read_workload({**content, "requests": []})
    return config, generated, cost_model


def simulate_requests(
    config: EngineConfig,
    arrivals: Iterable[Arrival],
    sample_token: Callable[[Request], int],
    *,
    config_at: Mapping[int, EngineConfig] = MappingProxyType({}),
    cost_model: CostModel | None = None,
    policy: SchedulingPolicy | None = None,
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
        cost_model: How long a step takes; None for a run without a clock.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
        meta: First line of the trace; by default one that says "simulation" and holds ``config``.
        max_steps: Steps at most.
        progress: Show a progress bar of requests that ended.

    Returns:
        The trace, with ``end`` set.

    Raises:
        ValueError: ``max_steps`` is below 1, there are too many requests to keep in memory, or a configuration
            changes the KV cache's shape.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be >= 1, got {max_steps}")
    pending = sorted(_in_memory(arrivals), key=arrival_order)
    trace = Trace(meta or TraceMeta(source="simulation", config=described(config, policy), versions=_versions()))
    run = SimulatedRun(config, iter(pending), cost_model, policy)
    with tqdm(total=len(pending), desc="simulation", unit="request", disable=not progress) as bar:
        while not run.over:
            step = run.scheduler.step
            if step == max_steps:
                trace.end = "max_steps"
                return trace
            if step in config_at:
                run.scheduler.reconfigure(config_at[step])
            for request in run.arrive():
                trace.add_request(request.info())
            record = run.step(sample_token)
            trace.append(record)
            bar.update(len(record.finished) + len(record.aborted))
            if run.stuck:
                trace.end = "stuck"
                return trace
    trace.end = "done"
    return trace


def _in_memory(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """The arrivals, as long as there are not too many to be kept together with a trace of all steps."""
    num_tokens = 0
    for index, arrival in enumerate(arrivals):
        num_tokens += len(arrival.prompt_token_ids)
        if index == MAX_REQUESTS or num_tokens > MAX_WORKLOAD_TOKENS:
            raise ValueError(
                f"a simulation that keeps every step takes {MAX_REQUESTS} requests and {MAX_WORKLOAD_TOKENS} prompt "
                "tokens at most: use simulate_at_scale, or leave --trace out"
            )
        yield arrival


def _versions() -> dict[str, str]:
    import workbench

    return {"workbench": workbench.__version__}
