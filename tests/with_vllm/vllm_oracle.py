"""vLLM's own scheduler with asynchronous steps, speculation and KV cache groups, as an oracle for random workloads.

``run_vllm`` gives the steps of a workload in the format of tests/data/vllm-features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from workbench.analysis.hunt.vllm_scheduler import VllmScheduler
from workbench.simulation.workload import made_up_token, read_workload

STUCK_AFTER = 3


class _Grammar(StructuredOutputGrammar):
    """A grammar that allows every output, and as many drafts of each proposal as ``valid_drafts`` says."""

    def __init__(self, valid_drafts: list[int]) -> None:
        self._valid, self._num_proposals = valid_drafts, 0
        self.num_valid = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self.num_valid = len(tokens)
        if self._valid:
            self.num_valid = min(len(tokens), self._valid[self._num_proposals % len(self._valid)])
            self._num_proposals += 1
        return tokens[: self.num_valid]

    def rollback(self, num_tokens: int) -> None: ...
    def fill_bitmask(self, bitmask: Any, idx: int) -> None: ...
    def reset(self) -> None: ...

    def is_terminated(self) -> bool:
        return False


def _lora(name: str) -> LoRARequest:
    return LoRARequest(name, 1 + sum(map(ord, name)), f"/adapters/{name}")


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

    def output(self, request: Any, num_drafts: int, padded: bool, num_valid: int) -> tuple[list[int], int]:
        accepted = 0
        if num_drafts and not padded:
            accepted = min(self.next_accepted(request.request_id), num_drafts, num_valid)
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
    driven = VllmScheduler(workload["config"], scheduler_class)
    try:
        return _run(driven.scheduler, driven._hasher, workload, max_steps)
    finally:
        driven.close()


def _run(scheduler: Any, hasher: Any, workload: Mapping[str, Any], max_steps: int) -> tuple[list[dict[str, Any]], str]:
    config = workload["config"]
    asynchronous, num_drafts = bool(config.get("async_scheduling")), config.get("num_speculative_tokens") or 0
    _, arrivals = read_workload({"config": {}, "requests": workload["requests"]})
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.arrival_step))
    aborts = [(arrival.abort_step, arrival.request_id) for arrival in arrivals if arrival.abort_step is not None]
    tokens = _Tokens(workload)
    steps: list[dict[str, Any]] = []
    queue: deque[tuple[Any, dict[str, Any]]] = deque()
    num_idle, compiling = 0, []
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
                        structured_outputs=StructuredOutputsParams(regex=".*") if arrival.grammar else None,
                    ),
                    pooling_params=None,
                    arrival_time=arrival.arrival_time,
                    priority=arrival.priority,
                    cache_salt=arrival.cache_salt or None,
                    lora_request=_lora(arrival.adapter) if arrival.adapter else None,
                    block_hasher=hasher,
                )
            )
            if arrival.grammar is not None:
                scheduler.requests[arrival.request_id].structured_output_request.grammar = Future()
                compiling.append(arrival)
        for arrival in compiling.copy():
            if arrival.grammar.ready_step > len(steps):
                continue
            compiling.remove(arrival)
            if (request := scheduler.requests.get(arrival.request_id)) is not None:
                future = request.structured_output_request._grammar
                if arrival.grammar.fails:
                    future.set_exception(ValueError("the workload says that it fails"))
                else:
                    future.set_result(_Grammar(list(arrival.grammar.valid_drafts)))
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
            else:  # EngineCore gives back empty outputs too; a recorder waits for them, and what is refused ends then
                _finish_refused(scheduler, step, done, EMPTY_MODEL_RUNNER_OUTPUT)
        step["free_blocks_end"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        busy = output.num_scheduled_tokens or step["arrived"] or pending or scheduler.deferred_waiting
        num_idle = 0 if busy else num_idle + 1
        coming = any(abort_step > len(steps) and rid in scheduler.requests for abort_step, rid in aborts)
        if num_idle >= STUCK_AFTER and not coming and scheduler.has_unfinished_requests():
            return steps, "stuck"
    if hasattr(scheduler, "recorder"):
        for output, _ in queue:
            if not output.num_scheduled_tokens:
                scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    return steps, "done" if len(steps) < max_steps else "max_steps"


def _finish_refused(scheduler: Any, step: dict[str, Any], output: Any, model_output: Any) -> None:
    """Update a scheduler, and note the requests that it ends because their grammars cannot be compiled."""
    # Requests that were aborted since are not ended again.
    refused = [request_id for request_id in scheduler.grammar_compile_error_reqs if request_id in scheduler.requests]
    scheduler.update_from_output(output, model_output)
    step["finished"] = [request_id for request_id in refused if request_id not in scheduler.requests]


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
        num_valid = len(drafts)
        if request.use_structured_output and asynchronous and drafts and not padded:
            # As ``update_draft_token_ids_in_output``, which EngineCore calls before it samples.
            num_valid = len(scheduler.structured_output_manager.validate_tokens(request, [7] * len(drafts)))
        made, accepted = tokens.output(request, len(drafts), padded, num_valid)
        if drafts:
            its_step["num_accepted"][request_id] = accepted
        sampled.append(made)
    model_output = ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    ended: dict[str, Any] = {}
    _finish_refused(scheduler, ended, output, model_output)
    for request_id, request in requests.items():
        if request is None:
            continue
        if appended := list(request.all_token_ids)[lengths[request_id] :]:
            its_step["appended"][request_id] = appended
        if request.is_finished():
            step["finished"].append(request_id)
    step["finished"] += [request_id for request_id in ended["finished"] if request_id not in step["finished"]]
    if num_drafts and not asynchronous:
        alive = [rid for rid in request_ids if rid in scheduler.requests]
        made = [tokens.drafts(scheduler.requests[rid], num_drafts) for rid in alive]
        scheduler.update_draft_token_ids(DraftTokenIds(alive, made))
