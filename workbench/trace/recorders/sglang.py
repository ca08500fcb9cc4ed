"""Record a running SGLang: a plug-in of SGLang's, which is found when this package is installed beside it.

    WORKBENCH_TRACE_DIR=traces python -m sglang.launch_server --model-path MODEL

Without WORKBENCH_TRACE_DIR nothing is hooked. `SGLANG_PLUGINS` can name the plug-ins to load; this one is "workbench".
The hooks go around methods of SGLang's Scheduler and leave its decisions unchanged; every step is written to a trace
file, as with vLLM (`RecordingSettings` has the environment variables). No fault of the recording reaches the server.

A record means this of SGLang:

- Blocks are pages, or slots of tokens if ``page_size`` is 1. Free blocks are those of the allocator and those that only
  the cache holds, which are evicted when they are needed.
- ``num_cached_tokens`` of a request's first chunk is what the cache had of it (``prefix_len``).
- Retracted requests are preempted ones. A lack of pages is the reason only where SGLang says so; a pause of the server
  and a request of higher priority retract, too, and their reason is unknown.
- A block table is that of the moment of scheduling, and only grows until the request ends or is retracted. Pages that
  SGLang replaces after a step, by equal ones of the cache, are not replaced in the record: a table cannot change
  in the middle. Such a page may appear in another table later.
- Blocks are named as cached when a chunk fills them; SGLang puts those of a reply in the cache when the request ends.

Made for SGLang 0.5.23. One full-attention cache, one pipeline stage, no drafts: other servers are not recorded, and the
log says so. The first tensor-parallel rank of each data-parallel one records.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from time import perf_counter
from typing import Any

from workbench.trace.recorders.messages import Admission, Arrival, End, Preemption, Schedule, Setup, Update
from workbench.trace.recorders.recorder import StepSender, never_raises
from workbench.trace.recorders.settings import RecordingSettings

log = logging.getLogger("sglang.workbench")

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_serial = itertools.count()  # tells recordings of one process apart


class SGLangRecorder(StepSender):
    """Records the steps of SGLang's Scheduler.

    Args:
        scheduler: The Scheduler; it is read, never changed.
        make_setup: Makes the first message; None from it, or an exception, and nothing is recorded.
    """

    def __init__(self, scheduler: Any, make_setup: Callable[[], Setup | None]) -> None:
        super().__init__(log)
        self._scheduler = scheduler
        self._live: dict[str, Any] = {}
        """Requests that have arrived and not ended."""
        self._num_blocks: dict[str, int] = {}
        """Recorded lengths of the block tables of running requests, in order of admission."""
        self._waiting: list[str] = []
        self._pending: deque[tuple[int, list[str]]] = deque()
        """Steps without output: number, and names of the requests; none if nothing is computed."""
        self._num_steps = 0
        self._has_news = False
        try:
            if (setup := make_setup()) is None:
                return
            self._created, self._size = setup.created, int(setup.config["block_size"])
            self._token_ids = setup.settings.token_ids
            self._hashes = setup.settings.hashes
            self._begin(setup)
        except Exception as problem:
            self.stop(problem)

    # -- what happens to requests ----------------------------------------------------------------------------

    @never_raises
    def queued(self, request: Any, is_retracted: bool) -> None:
        """A request was offered to the waiting queue, for the first time or after it lost its pages."""
        name, queue = request.rid, self._scheduler.waiting_queue
        if not queue or queue[-1] is not request:  # it was refused
            return
        if name not in self._live:
            self._live[name] = request
            self.messages.append(
                Arrival(
                    name,
                    len(request.origin_input_ids),
                    request.sampling_params.max_new_tokens or 0,
                    request.priority or 0,
                    (now := time.time()) - self._created,
                    now,
                    list(request.origin_input_ids) if self._token_ids or self._hashes else [],
                    request.extra_key or "",  # with the adapter's id
                )
            )
        elif self._num_blocks.pop(name, None) is not None:
            self.messages.append(Preemption(name, [], False, is_unexplained=not is_retracted))
        self._has_news = True

    @never_raises
    def aborted(self, request: Any) -> None:
        """A request ended outside the results of a step."""
        self._end(request, "abort", in_update=False)

    def _end(self, request: Any, reason: str, *, in_update: bool) -> None:
        if self._live.pop(request.rid, None) is None:
            return
        self._num_blocks.pop(request.rid, None)
        output = list(request.output_ids) if self._hashes else []
        self.messages.append(End(request.rid, reason, in_update, output))
        self._has_news |= not in_update

    # -- steps -----------------------------------------------------------------------------------------------

    @never_raises
    def scheduled(self, plan: Any, started: float, ended: float) -> None:
        """A batch was made, or none.

        Args:
            plan: The NextBatchPlan; its batch is None if nothing can be computed now.
            started: Time of the call, by ``time.perf_counter``.
            ended: Time of its return.
        """
        batch = plan.batch_to_run
        requests = list(batch.reqs) if batch is not None else []
        if not requests and not self._has_news:
            return
        self._has_news = False
        decodes = {id(each) for each in (batch.decoding_reqs or ())} if batch is not None else set()
        is_extend = batch is not None and batch.forward_mode.is_extend()
        starts, counts = [], []
        for each in requests:
            if self._live.get(each.rid) is not each and not each.finished():
                raise ValueError(f"a batch has {each.rid!r}, which never was in the waiting queue")
            prefills = is_extend and id(each) not in decodes
            starts.append(each.prefix_len if prefills else each.kv.kv_committed_len - 1)
            counts.append(each.extend_len if prefills else 1)
        # Overlapped, or after an abort, a batch may compute a token too many for a request that has ended.
        taken = [index for index, each in enumerate(requests) if each.rid in self._live]
        tables = self._new_blocks([requests[index] for index in taken])
        message = Schedule(self._num_steps, started, ended, self._num_free(), [], [], [])
        self._num_steps += 1
        names: list[str] = []
        for index, blocks in zip(taken, tables):
            each = requests[index]
            names.append(each.rid)
            message.num_scheduled_tokens.append(counts[index])
            if each.rid in self._num_blocks:
                message.num_computed_tokens.append(starts[index])
                message.new_block_ids.append([blocks] if blocks else None)
            else:
                num_tokens = len(each.origin_input_ids) + len(each.output_ids)
                message.admissions.append(Admission(each.rid, starts[index], num_tokens, blocks))
            self._num_blocks[each.rid] = self._num_blocks.get(each.rid, 0) + len(blocks)
        message.request_ids = names
        waiting = [each.rid for each in self._scheduler.waiting_queue]
        if waiting != self._waiting or message.admissions:  # its policy may sort the queue
            message.running, message.waiting, self._waiting = list(self._num_blocks), waiting, waiting
        self.messages.append(message)
        self._encode()
        self._pending.append((message.output_id, [each.rid for each in requests]))
        self._finish_empty(ended)

    def before_update(self, batch: Any) -> list[tuple[Any, int]]:
        """The requests of a batch, each with its number of output tokens so far, for ``updated``."""
        try:
            return [(each, len(each.output_ids)) for each in batch.reqs] if self.writer is not None else []
        except Exception as problem:
            self.stop(problem)
            return []

    @never_raises
    def updated(self, requests: Sequence[tuple[Any, int]], started: float, ended: float) -> None:
        """The result of a batch was processed.

        Args:
            requests: The requests of the batch, each with the number of its output tokens before.
            started: Time of the call of ``process_batch_result``, by ``time.perf_counter``.
            ended: Time of its return.
        """
        if not requests:
            return
        number, names = self._pending.popleft()
        if names != [each.rid for each, _ in requests]:
            raise ValueError(f"the result of another batch arrived before that of step {number}")
        for each, _ in requests:
            if each.finished():
                self._end(each, each.finished_reason.to_json()["type"], in_update=True)
        self._take_pauses()
        message = Update(number, started, ended, self._num_free())
        for each, num_before in requests:
            tokens = list(each.output_ids[num_before:])
            message.request_ids.append(each.rid)
            message.token_ids.append(tokens if self._token_ids else [0] * len(tokens))
        self.messages.append(message)
        self._encode()
        self._finish_empty(ended)
        self._send_in_time(ended, is_idle=not self._num_blocks)

    def _finish_empty(self, now: float) -> None:
        """Complete the steps that compute nothing, after the ones before them."""
        while self._pending and not self._pending[0][1]:
            self.messages.append(Update(self._pending.popleft()[0], now, now, self._num_free()))
            self._send_in_time(now, is_idle=not self._num_blocks)

    def _new_blocks(self, requests: Sequence[Any]) -> list[list[int]]:
        """The blocks of each request behind those that are recorded: one transfer from the device, if there are any."""
        rows, places, counts = list[int](), list[int](), []
        for each in requests:
            first, last = self._num_blocks.get(each.rid, 0), -(-each.kv.kv_allocated_len // self._size)
            new = range(first * self._size, last * self._size, self._size)
            rows += [each.kv.req_pool_idx] * len(new)
            places += new
            counts.append(len(new))
        slots = self._scheduler.req_to_token_pool.req_to_token[rows, places].tolist() if rows else []
        blocks = iter([slot // self._size for slot in slots])
        return [list(itertools.islice(blocks, count)) for count in counts]

    def _num_free(self) -> int:
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return int(free) // self._size


# -- the plug-in -----------------------------------------------------------------------------------------------


def register() -> None:
    """The plug-in: hooks the Scheduler if WORKBENCH_TRACE_DIR is set. SGLang applies the hooks."""
    if not os.environ.get("WORKBENCH_TRACE_DIR"):
        return
    registry = import_module("sglang.srt.plugins.hook_registry")
    for name, hook in HOOKS.items():
        registry.HookRegistry.register(f"{SCHEDULER}.{name}", hook, registry.HookType.AROUND)


def recorder_of(scheduler: Any) -> SGLangRecorder:
    """The recorder of a Scheduler; made when it is first asked for."""
    recorder: SGLangRecorder | None = vars(scheduler).get("_workbench_recorder")
    if recorder is None:
        recorder = scheduler._workbench_recorder = SGLangRecorder(scheduler, lambda: describe_sglang(scheduler))
    return recorder


def _run_event_loop(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = recorder_of(scheduler)
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        recorder.close()


def _add_request_to_queue(
    original: Callable[..., Any], scheduler: Any, req: Any, is_retracted: bool = False, **kwargs: Any
) -> Any:
    returned = original(scheduler, req, is_retracted=is_retracted, **kwargs)
    recorder_of(scheduler).queued(req, is_retracted)
    return returned


def _send_abort_output(original: Callable[..., Any], scheduler: Any, abort_req: Any, req: Any) -> Any:
    recorder_of(scheduler).aborted(req)
    return original(scheduler, abort_req, req)


def _get_next_batch_to_run(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = recorder_of(scheduler)
    started = perf_counter()
    plan = original(scheduler, *args, **kwargs)
    recorder.scheduled(plan, started, perf_counter())
    return plan


def _process_batch_result(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = recorder_of(scheduler)
    requests = recorder.before_update(batch)
    started = perf_counter()
    returned = original(scheduler, batch, *args, **kwargs)
    recorder.updated(requests, started, perf_counter())
    return returned


HOOKS: dict[str, Callable[..., Any]] = {
    "run_event_loop": _run_event_loop,
    "_add_request_to_queue": _add_request_to_queue,
    "send_abort_output": _send_abort_output,
    "get_next_batch_to_run": _get_next_batch_to_run,
    "process_batch_result": _process_batch_result,
}
"""The hooks around methods of the Scheduler, by name."""


# -- the first line of the trace -----------------------------------------------------------------------------


def describe_sglang(scheduler: Any) -> Setup | None:
    """The facts about an SGLang for the beginning of a trace; None if another rank records the same.

    Args:
        scheduler: A Scheduler that is ready to run.

    Raises:
        ValueError: An environment variable is wrong, or the server uses what is not recorded.
    """
    settings = RecordingSettings.from_environment()
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    if parallel.tp_rank != 0:
        return None
    args = scheduler.server_args
    if unknown := [name for name, is_used in _not_recorded(scheduler, parallel).items() if is_used]:
        raise ValueError(f"{', '.join(unknown)} of SGLang cannot be recorded yet")
    version = importlib.metadata.version("sglang")
    created, start = time.time(), perf_counter()
    rank, num_ranks = parallel.dp_rank or 0, args.dp_size
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(created))
    chunk = scheduler.chunked_prefill_size or 0
    config = {
        "max_num_batched_tokens": chunk if chunk > 0 else scheduler.max_prefill_tokens,
        "max_num_seqs": min(
            scheduler.max_running_requests, parallel.pp_max_micro_batch_size or scheduler.max_running_requests
        ),
        "enable_chunked_prefill": chunk > 0,
        "async_scheduling": bool(scheduler.enable_overlap),
        "block_size": scheduler.page_size,
        "num_blocks": scheduler.max_total_num_tokens // scheduler.page_size + 1,  # the first one is padding
        "max_model_len": scheduler.model_config.context_len,
        "enable_prefix_caching": not args.disable_radix_cache,
        "tensor_parallel_size": args.tp_size,
        "token_ids_recorded": settings.token_ids,
        "schedule_policy": scheduler.schedule_policy,
        **({"data_parallel_size": num_ranks} if num_ranks > 1 else {}),
    }
    return Setup(
        settings=settings,
        file_prefix=f"sglang-{stamp}-{socket.gethostname()}-rank{rank}-{os.getpid()}-{next(_serial)}",
        source=f"sglang {version}",
        config=config,
        model={"name": str(args.served_model_name or args.model_path), "dtype": str(args.dtype)},
        versions={"sglang": version},
        created=created,
        start=start,
        run=str(os.getppid()) if num_ranks > 1 else "",
        pid=os.getpid(),
        thread=threading.get_native_id(),
    )


def _not_recorded(scheduler: Any, parallel: Any) -> dict[str, bool]:
    """Whether the server uses what a record would get wrong."""
    return {
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "disaggregation": scheduler.disaggregation_mode.value != "null",
        "pipeline parallelism": parallel.pp_size > 1,
        "models without text output": not scheduler.is_generation,
        "diffusion models": scheduler.dllm_config is not None,
        "sliding windows": bool(scheduler.is_hybrid_swa),
        "recurrent layers": bool(getattr(scheduler, "is_hybrid_ssm", False)),
        "sparse attention in several pools": bool(scheduler.enable_hisparse),
    }
