"""Run a workload through the engine's scheduler without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Unpack

from workbench.base.keyword_fields import ConfigFields
from workbench.base.named_fields import show_fields
from workbench.base.progress import progress_bar
from workbench.config import EngineConfig
from workbench.scheduler.policy import SchedulingPolicy, described
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival, arrival_order
from workbench.simulation.costs.cost_model import CostModel, StepCost
from workbench.simulation.follow_ups import FollowUps
from workbench.simulation.limits import MAX_REQUESTS, MAX_STEPS, MAX_WORKLOAD_TOKENS
from workbench.simulation.run import SimulatedRun
from workbench.simulation.workload import made_up_token, read_simulation
from workbench.trace import StepRecord, Trace, TraceMeta


def simulate(
    workload: Mapping[str, Any] | str | os.PathLike[str],
    *,
    config: EngineConfig | Mapping[str, Any] | None = None,
    cost_model: CostModel | None = None,
    policy: SchedulingPolicy | None = None,
    as_vllm: bool = False,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
    **config_fields: Unpack[ConfigFields],
) -> Trace:
    """Run a workload through the scheduler, the one that an Engine uses.

    There is no model: the token at position p of request r is ``3 + crc32("r:p") % 31997``, and nothing but
    ``max_tokens`` and ``max_model_len`` ends a request. The result is the same on every machine.

    Args:
        workload: A workload, or the path of its JSON file, in the format of ``workbench.simulation.workload``.
        config: Replaces the workload's configuration; a mapping changes only the fields it names.
        cost_model: Gives the duration of a step; None for the workload's cost model. Without either, steps take no
            time and only ``arrival_step`` says when requests arrive.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
        as_vllm: Let requests wait forever, and the scheduler die, where vLLM 0.33.0 does (docs/limits.md).
        max_steps: Maximum number of steps.
        progress: Show a progress bar of finished and aborted requests.
        **config_fields: Fields of EngineConfig by name, on top of the configuration.

    Returns:
        The trace. Its ``end`` is "done", "stuck" (requests are left that are never scheduled) or "max_steps".

    Raises:
        ValueError: The workload or the configuration is malformed, or no schedule can serve a request.
        RuntimeError: An assertion of vLLM ends its engine here; with ``as_vllm`` only.

    Example:
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]})
        >>> [(chunk.request_id, chunk.num_tokens) for step in trace for chunk in step.chunks]
        [('a', 20), ('a', 1)]
    """
    workload_config, arrivals, cost_model = read_simulation(workload, cost_model)
    if not isinstance(config, EngineConfig):
        config = workload_config.replace(**(config or {}))
    if config_fields:
        config = config.replace(**config_fields)

    return simulate_requests(
        config,
        arrivals,
        next_token,
        cost_model=cost_model,
        policy=policy,
        as_vllm=as_vllm,
        max_steps=max_steps,
        progress=progress,
    )


show_fields(EngineConfig, simulate)


def next_token(request: Request) -> int:
    """The token that follows a request's known tokens: there is no model, and its id and position decide."""
    return made_up_token(f"{request.request_id}:{request.num_tokens}")


def simulate_requests(
    config: EngineConfig,
    arrivals: Iterable[Arrival],
    sample_token: Callable[[Request], int],
    *,
    config_at: Mapping[int, EngineConfig] = MappingProxyType({}),
    cost_model: StepCost | None = None,
    policy: SchedulingPolicy | None = None,
    as_vllm: bool = False,
    meta: TraceMeta | None = None,
    max_steps: int = MAX_STEPS,
    progress: bool = False,
) -> Trace:
    """Run requests through the scheduler with tokens of the caller's choice.

    Args:
        config: Configuration of the first step.
        arrivals: The requests, in any order; those of one step arrive in the given order, and those that follow others
            when these have ended.
        sample_token: Gives the next token of a request, whose ``token_ids`` holds all tokens before it.
        config_at: Configurations by the step from which they apply.
        cost_model: Gives the duration of a step; None for a run without a clock.
        policy: Decides order, chunk sizes and victims; None for vLLM's rules.
        as_vllm: Let requests wait forever, and the scheduler die, where vLLM 0.33.0 does.
        meta: First line of the trace; by default its source is "simulation" and its configuration ``config``.
        max_steps: Maximum number of steps.
        progress: Show a progress bar of finished and aborted requests.

    Returns:
        The trace, with ``end`` set.

    Raises:
        ValueError: ``max_steps`` is below 1, there are too many requests to keep in memory, or a configuration
            changes the shape of the KV cache.
        RuntimeError: An assertion of vLLM ends its engine here; with ``as_vllm`` only.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be >= 1, got {max_steps}")
    pending = sorted(_in_memory(arrivals), key=arrival_order)
    loops = FollowUps(pending)
    trace = Trace(meta or TraceMeta(source="simulation", config=described(config, policy), versions=versions()))
    if not as_vllm:
        for arrival in pending:
            arrival.check_servable(config, sample_token)
    follow = loops.ended if loops.depends else None
    run = SimulatedRun(config, iter(loops.first()), cost_model, policy, as_vllm=as_vllm, follow=follow)
    run.scheduler.kv_cache.foresee(arrival.to_request() for arrival in pending)
    traced = TracedRun(run, trace, sample_token)
    with progress_bar(len(pending), "simulation", "request", shown=progress) as bar:
        while not run.over:
            step = run.scheduler.step
            if step == max_steps:
                trace.end = "max_steps"
                break
            if step in config_at:
                run.scheduler.reconfigure(config_at[step])
            if (record := traced.step()) is not None:
                bar.update(len(record.finished) + len(record.aborted))
            if run.stuck:
                trace.end = "stuck"
                break
        traced.rest()
    trace.end = trace.end or "done"
    return trace


class TracedRun:
    """Take the steps of a run and put them into a trace."""

    def __init__(self, run: SimulatedRun, trace: Trace, sample_token: Callable[[Request], int]) -> None:
        self._run = run
        self._trace = trace
        self._sample_token = sample_token

    def step(self) -> StepRecord | None:
        """Take one step; its record, if it is complete."""
        for request in self._run.arrive():
            self._trace.add_request(request.info())
        record = self._run.step(self._sample_token)
        if record is not None:
            self._trace.append(record)
        return record

    def rest(self) -> None:
        """Take the steps whose output is still in flight when the run ends."""
        for record in self._run.rest(self._sample_token):
            self._trace.append(record)


def _in_memory(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """The arrivals, unless they are too many to keep together with a trace of all steps."""
    num_tokens = 0
    for index, arrival in enumerate(arrivals):
        num_tokens += len(arrival.prompt_token_ids)
        if index == MAX_REQUESTS or num_tokens > MAX_WORKLOAD_TOKENS:
            raise ValueError(
                f"a simulation that keeps every step takes at most {MAX_REQUESTS} requests and {MAX_WORKLOAD_TOKENS} "
                "prompt tokens: use simulate_at_scale, or leave --out out"
            )
        yield arrival


def versions() -> dict[str, str]:
    """The version that simulates, for the head of a trace."""
    import workbench

    return {"workbench": workbench.__version__}
