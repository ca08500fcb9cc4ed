"""vLLM's own scheduler with asynchronous steps, speculation and KV cache groups, as an oracle for random workloads.

``run_vllm`` gives the steps of a workload in the format of tests/data/vllm-features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_config import vllm_config

from workbench.simulation.workload import made_up_token, read_workload

STUCK_AFTER = 3


def _speculative(config: Mapping[str, Any]) -> SpeculativeConfig | None:
    """A SpeculativeConfig without a draft model: only what the scheduler reads."""
    if not config.get("num_speculative_tokens"):
        return None
    method = config.get("spec_method") or ("eagle" if config.get("async_scheduling") else "ngram")
    made = object.__new__(SpeculativeConfig)
    for name, field in SpeculativeConfig.__dataclass_fields__.items():
        if not isinstance(getattr(field.default, "default", field.default), type(...)):
            object.__setattr__(made, name, getattr(field.default, "default", field.default))
    for name, value in {
        "method": method,
        "num_speculative_tokens": config["num_speculative_tokens"],
        "parallel_drafting": False,
        "disable_lookahead_block_hashes": bool(config.get("disable_lookahead_block_hashes")),
        "disable_eagle_block_drop": False,
        "num_speculative_tokens_per_batch_size": None,
        "draft_model_config": None,
    }.items():
        object.__setattr__(made, name, value)
    return made


def _groups(config: Mapping[str, Any], max_model_len: int) -> list[KVCacheGroupSpec]:
    common = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    caching = config.get("enable_prefix_caching", True)
    groups = []
    for index, given in enumerate(config.get("kv_cache_groups") or [{"kind": "full_attention"}]):
        block_size = given.get("block_size") or config.get("block_size", 16)
        if given["kind"] == "full_attention":
            spec: Any = FullAttentionSpec(block_size=block_size, **common)
        elif given["kind"] == "sliding_window":
            spec = SlidingWindowSpec(block_size=block_size, sliding_window=given["sliding_window"], **common)
        else:
            spec = MambaSpec(
                block_size=config.get("block_size", 16) if caching else max_model_len,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align" if caching else "none",
                num_speculative_blocks=config.get("num_speculative_tokens") or 0,
            )
        groups.append(KVCacheGroupSpec([f"layer {index}"], spec, is_eagle_group=bool(given.get("eagle"))))
    return groups


def make_scheduler(config: Mapping[str, Any], scheduler_class: type | None = None) -> tuple[Any, Any]:
    """A scheduler of vLLM for a workload's configuration, and its hash of blocks.

    Args:
        config: The configuration.
        scheduler_class: The class to use; None for vLLM's own.
    """
    asynchronous = bool(config.get("async_scheduling"))
    caching = config.get("enable_prefix_caching", True)
    whole = vllm_config(config)
    groups = _groups(config, whole.model_config.max_model_len)
    has_mamba = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    if has_mamba:
        whole.cache_config.mamba_cache_mode = "align" if caching else "none"
    object.__setattr__(whole, "speculative_config", _speculative(config))
    interval = config.get("prefix_cache_retention_interval") or 0
    kv_cache = KVCacheConfig(
        num_blocks=config.get("num_blocks", 512),
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=None if interval == "dense" else interval,
    )
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, whole)
    init_none_hash(sha256)
    scheduler = (scheduler_class or (AsyncScheduler if asynchronous else Scheduler))(
        vllm_config=whole,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(whole),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    hasher = get_request_block_hasher(hash_block_size, sha256, whole.num_hash_lookahead_tokens) if caching else None
    return scheduler, hasher


class _Tokens:
    """Drafts and outputs of requests, which are functions of the position and of ``accepts``."""

    def __init__(self, workload: Mapping[str, Any]) -> None:
        self._accepts = {request["id"]: request.get("accepts") or [0] for request in workload["requests"]}
        self._num_verified = dict.fromkeys(self._accepts, 0)

    def next_accepted(self, request_id: str) -> int:
        accepts = self._accepts[request_id]
        return accepts[self._num_verified[request_id] % len(accepts)]

    def drafts(self, request: Any, count: int) -> list[int]:
        right = [made_up_token(f"{request.request_id}:{request.num_tokens + i}") for i in range(count)]
        accepted = self.next_accepted(request.request_id)
        return right[:accepted] + [3 + (token - 3 + 1) % 31997 for token in right[accepted:]]

    def output(self, request: Any, num_drafts: int, padded: bool) -> tuple[list[int], int]:
        accepted = 0
        if num_drafts and not padded:
            accepted = min(self.next_accepted(request.request_id), num_drafts)
            self._num_verified[request.request_id] += 1
        first = request.num_tokens
        return [made_up_token(f"{request.request_id}:{first + i}") for i in range(accepted + 1)], accepted


def run_vllm(
    workload: Mapping[str, Any], max_steps: int = 3000, scheduler_class: type | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Run a workload as EngineCore does: ``step`` with synchronous scheduling, else ``step_with_batch_queue``.

    Args:
        workload: The workload.
        max_steps: Maximum number of steps.
        scheduler_class: The scheduler's class; None for vLLM's own.

    Returns:
        The steps, and "done", "stuck", "max_steps" or "assertion".
    """
    scheduler, hasher = make_scheduler(workload["config"], scheduler_class)
    try:
        return _run(scheduler, hasher, workload, max_steps)
    finally:
        scheduler.shutdown()


def _run(scheduler: Any, hasher: Any, workload: Mapping[str, Any], max_steps: int) -> tuple[list[dict[str, Any]], str]:
    config = workload["config"]
    asynchronous, num_drafts = bool(config.get("async_scheduling")), config.get("num_speculative_tokens") or 0
    _, arrivals = read_workload({"config": {}, "requests": workload["requests"]})
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.arrival_step))
    aborts = [(arrival.abort_step, arrival.request_id) for arrival in arrivals if arrival.abort_step is not None]
    tokens = _Tokens(workload)
    steps: list[dict[str, Any]] = []
    queue: deque[tuple[Any, dict[str, Any]]] = deque()
    num_idle = 0
    while (
        pending or scheduler.has_unfinished_requests() or any(output.num_scheduled_tokens for output, _ in queue)
    ) and len(steps) < max_steps:
        step: dict[str, Any] = {"step": len(steps), "arrived": [], "aborted": []}
        while pending and pending[0].arrival_step <= len(steps):
            arrival = pending.popleft()
            step["arrived"].append(arrival.request_id)
            scheduler.add_request(
                Request(
                    request_id=arrival.request_id,
                    prompt_token_ids=list(arrival.prompt_token_ids),
                    sampling_params=SamplingParams(
                        max_tokens=arrival.sampling.max_tokens,
                        ignore_eos=True,
                        stop_token_ids=list(arrival.sampling.stop_token_ids),
                    ),
                    pooling_params=None,
                    arrival_time=arrival.arrival_time,
                    priority=arrival.priority,
                    cache_salt=arrival.cache_salt or None,
                    block_hasher=hasher,
                )
            )
        for abort_step, request_id in aborts:
            if abort_step == len(steps) and request_id in scheduler.requests:
                scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                step["aborted"].append(request_id)
        order = _PreemptionOrder(scheduler)
        try:
            output = scheduler.schedule()
        except AssertionError:
            return steps, "assertion"
        finally:
            order.stop()
        _describe(scheduler, output, order, step)
        step["sampling"] = {rid for rid in output.num_scheduled_tokens if not scheduler.requests[rid].is_prefill_chunk}
        queue.append((output, step))
        steps.append(step)
        step |= {"processed": None, "finished": [], "appended": {}, "num_accepted": {}}
        if len(queue) == (2 if asynchronous else 1):
            done, its_step = queue.popleft()
            if done.num_scheduled_tokens:
                step["processed"] = its_step["step"]
                _process(scheduler, done, its_step, step, tokens, num_drafts, asynchronous)
            elif hasattr(
                scheduler, "recorder"
            ):  # EngineCore gives back empty outputs too, and a recorder waits for them
                scheduler.update_from_output(done, EMPTY_MODEL_RUNNER_OUTPUT)
        step["free_blocks_end"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        num_idle = 0 if output.num_scheduled_tokens or step["arrived"] or pending else num_idle + 1
        coming = any(abort_step > len(steps) and rid in scheduler.requests for abort_step, rid in aborts)
        if num_idle >= STUCK_AFTER and not coming and scheduler.has_unfinished_requests():
            return steps, "stuck"
    if hasattr(scheduler, "recorder"):
        for output, _ in queue:
            if not output.num_scheduled_tokens:
                scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    return steps, "done" if len(steps) < max_steps else "max_steps"


class _PreemptionOrder:
    """Notes the requests that a call of ``schedule()`` preempts, in order."""

    def __init__(self, scheduler: Any) -> None:
        self.ids: list[str] = []
        self._scheduler, self._method = scheduler, scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> None:
            self.ids.append(request.request_id)
            self._method(request, *args, **kwargs)

        scheduler._preempt_request = noted

    def stop(self) -> None:
        del self._scheduler._preempt_request


def _describe(scheduler: Any, output: Any, order: _PreemptionOrder, step: dict[str, Any]) -> None:
    """Add what ``schedule()`` decided."""
    scheduled = output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    admitted = [request.req_id for request in output.scheduled_new_reqs]
    admitted += [request_id for request_id in cached.req_ids if request_id in cached.resumed_req_ids]
    admitted.sort(key=list(scheduled).index)
    # Model runner V2 is told of a resumed request as if it were new.
    new = [request_id for request_id in admitted if not scheduler.requests[request_id].num_preemptions]
    resumed = [request_id for request_id in admitted if request_id not in new]
    starts = {request_id: scheduler.requests[request_id].num_computed_tokens - n for request_id, n in scheduled.items()}
    step |= {
        "scheduled": [[request_id, count] for request_id, count in scheduled.items()],
        "num_computed_before": starts,
        "drafts": {rid: list(ids) for rid, ids in output.scheduled_spec_decode_tokens.items() if rid in scheduled},
        "block_ids": {rid: list(map(list, scheduler.kv_cache_manager.get_block_ids(rid))) for rid in scheduled},
        "new": new,
        "resumed": resumed,
        "preempted": order.ids,
        "hits": {request_id: starts[request_id] for request_id in scheduled if request_id in new + resumed},
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def _process(
    scheduler: Any,
    output: Any,
    its_step: dict[str, Any],
    step: dict[str, Any],
    tokens: _Tokens,
    num_drafts: int,
    asynchronous: bool,
) -> None:
    """Give the scheduler the output of a batch, and the drafts that follow."""
    request_ids = list(output.num_scheduled_tokens)
    sampled: list[list[int]] = []
    requests = {request_id: scheduler.requests.get(request_id) for request_id in request_ids}
    lengths = {}
    for request_id in request_ids:
        request = requests[request_id]
        if request is None:
            sampled.append([made_up_token("thrown away")])
            continue
        lengths[request_id] = request.num_tokens
        if request_id not in its_step["sampling"]:
            sampled.append([])
            continue
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        padded = request_id in its_step["new"] + its_step["resumed"]
        made, accepted = tokens.output(request, len(drafts), padded)
        if drafts:
            its_step["num_accepted"][request_id] = accepted
        sampled.append(made)
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
    for request_id, request in requests.items():
        if request is None:
            continue
        if appended := list(request.all_token_ids)[lengths[request_id] :]:
            its_step["appended"][request_id] = appended
        if request.is_finished():
            step["finished"].append(request_id)
    if num_drafts and not asynchronous:
        alive = [rid for rid in request_ids if rid in scheduler.requests]
        made = [tokens.drafts(scheduler.requests[rid], num_drafts) for rid in alive]
        scheduler.update_draft_token_ids(DraftTokenIds(alive, made))
