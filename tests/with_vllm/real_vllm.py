"""vLLM's own scheduler without a model: real Scheduler, KVCacheManager and BlockPool, and made-up tokens.

Imports vLLM, and so runs only in the environment of ``make test-vllm``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from workbench.analysis.hunt.vllm_scheduler import VllmScheduler
from workbench.config import EngineConfig
from workbench.simulation.arrivals import Arrival
from workbench.simulation.workload import made_up_token

STUCK_AFTER = 3


def make_scheduler(
    scheduler_class: type,
    config: EngineConfig,
    *,
    asynchronous: bool | None = None,
    log_stats: bool = False,
) -> Any:
    """A vLLM scheduler with the limits of ``config``; by default asynchronous if the class is."""
    if asynchronous is None:
        asynchronous = "Async" in scheduler_class.__name__
    given = dataclasses.asdict(config)
    given |= {"async_scheduling": asynchronous, "prefix_cache_retention_interval": "dense"}
    return VllmScheduler(given, scheduler_class, log_stats=log_stats).scheduler


def make_request(arrival: Arrival, config: EngineConfig) -> Request:
    """A request of a workload as vLLM's Request."""
    hasher = get_request_block_hasher(config.block_size, sha256) if config.enable_prefix_caching else None
    return Request(
        request_id=arrival.request_id,
        prompt_token_ids=list(arrival.prompt_token_ids),
        sampling_params=SamplingParams(max_tokens=arrival.sampling.max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival.arrival_time,
        priority=arrival.priority,
        block_hasher=hasher,
    )


class FakeModel:
    """Answers a SchedulerOutput with made-up tokens, as a model runner would."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._prefill_end: dict[str, int] = {}

    def run(self, scheduler: Any, output: Any) -> ModelRunnerOutput:
        """The output of a step, made after the step is scheduled and before the next one is."""
        request_ids, tokens = [], []
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            request_ids.append(request_id)
            if request.is_prefill_chunk:
                tokens.append([])
                continue
            position = request.num_computed_tokens
            tokens.append([made_up_token(f"{request_id}:{position}")])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def drive(
    scheduler: Any, config: EngineConfig, arrivals: list[Arrival], *, depth: int = 1, max_steps: int = 10_000
) -> int:
    """Run a workload to its end, as EngineCore does.

    Args:
        scheduler: From ``make_scheduler``.
        config: Its configuration.
        arrivals: The requests.
        depth: Number of steps in flight: 1, or 2 with asynchronous scheduling.
        max_steps: Maximum number of steps.

    Returns:
        Number of steps.
    """
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.arrival_step))
    aborts = [(arrival.abort_step, arrival.request_id) for arrival in arrivals if arrival.abort_step is not None]
    model, in_flight = FakeModel(), deque()
    step = num_idle = 0
    while (pending or scheduler.has_unfinished_requests() or in_flight) and step < max_steps:
        while pending and pending[0].arrival_step <= step:
            scheduler.add_request(make_request(pending.popleft(), config))
        for abort_step, request_id in aborts:
            if abort_step == step:
                scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        step += 1
        in_flight.append((output, model.run(scheduler, output)))
        num_idle = 0 if output.total_num_scheduled_tokens else num_idle + 1
        while len(in_flight) >= depth or (in_flight and not output.total_num_scheduled_tokens):
            scheduler.update_from_output(*in_flight.popleft())
        if num_idle >= STUCK_AFTER and not pending:
            break
    while in_flight:
        scheduler.update_from_output(*in_flight.popleft())
    return step
