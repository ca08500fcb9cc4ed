"""vLLM's own V1 scheduler behind the hunt's protocol, without a model: any released vLLM from 0.10.1 on.

Constructors change between versions, so each is asked for its fields, and what a version does not know is left out and
named in ``dropped``. Every generated test of a finding in vLLM contains this file: it imports vLLM and torch alone.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.hunt.drive import Chunk, LiveRequest, Plan

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 1_000_000,
    "torch_dtype": "float32",
}
"""The smallest configuration that vLLM accepts as a model; no weights are loaded."""

_LIMITS = {
    "max_num_batched_tokens": 512,
    "max_num_scheduled_tokens": None,
    "max_num_seqs": 16,
    "max_num_active_seqs": None,
    "policy": "fcfs",
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "enable_chunked_prefill": True,
    "async_scheduling": False,
}
"""Fields of SchedulerConfig that a workload sets, with the values of a workload that leaves them out."""


def _find(*places: str) -> Any:
    """The first of some ``module:name`` that this version has; None if it has none."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


@functools.cache
def _whole_config() -> Any:
    """A VllmConfig of the made-up model; each workload gets a copy with its own parts."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=1_000_000, dtype="float32")
    limits = SchedulerConfig(**_known(SchedulerConfig, {"max_model_len": 1_000_000, "is_encoder_decoder": False}, []))
    device = DeviceConfig("cpu")
    parts = {"scheduler_config": limits, "cache_config": CacheConfig(block_size=16)}
    return VllmConfig(model_config=model, parallel_config=ParallelConfig(), device_config=device, **parts)


@functools.cache
def _structured_output_manager() -> Any:
    return _find("vllm.v1.structured_output:StructuredOutputManager")(_whole_config())


def _known(made: type, values: Mapping[str, Any], dropped: list[str]) -> dict[str, Any]:
    """The values whose fields a dataclass of vLLM has; the names of the others go to ``dropped``."""
    fields = made.__dataclass_fields__  # type: ignore[attr-defined]
    dropped += [name for name in values if name not in fields]
    return {name: value for name, value in values.items() if name in fields}


def _replaced(part: Any, **values: Any) -> Any:
    """A copy of a part of the configuration with other values, which vLLM does not check again."""
    made = copy.copy(part)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


class VllmScheduler:
    """vLLM's Scheduler or AsyncScheduler, or a class that derives from one.

    Args:
        config: The workload's configuration.
        scheduler_class: The class; None for vLLM's own.

    Attributes:
        depth: Maximum number of steps in flight.
        dropped: Settings of the workload that this version of vLLM does not have.

    Raises:
        ValueError: vLLM refuses the configuration.
    """

    def __init__(self, config: Mapping[str, Any], scheduler_class: type | None = None) -> None:
        from vllm.config import SchedulerConfig
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import KVCacheConfig

        self.dropped: list[str] = []
        asynchronous = bool(config.get("async_scheduling"))
        self.depth = 2 if asynchronous else 1
        caching = config.get("enable_prefix_caching", True)
        max_model_len = config.get("max_model_len") or 1_000_000
        given = {name: config.get(name, default) for name, default in _LIMITS.items()}
        given = {name: value for name, value in given.items() if value is not None or name in config}
        limits = {"max_model_len": max_model_len, "is_encoder_decoder": False, **given}
        without_effect = [name for name, value in _LIMITS.items() if given.get(name) == value]
        whole = copy.copy(_whole_config())
        groups = self._groups(config, max_model_len, caching)
        has_states = any(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in groups)
        cache = {
            "block_size": config.get("block_size", 16),
            "enable_prefix_caching": caching,
            "num_gpu_blocks": config.get("num_blocks", 512),
            "mamba_cache_mode": "align" if has_states and caching else "none",
        }
        scheduler_config = SchedulerConfig(**_known(SchedulerConfig, limits, self.dropped))
        self.dropped = [name for name in self.dropped if name not in without_effect]
        for name, part in {
            "model_config": _replaced(whole.model_config, max_model_len=max_model_len),
            "scheduler_config": _replaced(scheduler_config, async_scheduling=asynchronous),
            "cache_config": _replaced(whole.cache_config, **cache),
            "speculative_config": self._speculative(config),
        }.items():
            object.__setattr__(whole, name, part)
        interval = config.get("prefix_cache_retention_interval") or 0
        made = {"num_blocks": cache["num_gpu_blocks"], "kv_cache_tensors": [], "kv_cache_groups": groups}
        made["prefix_cache_retention_interval"] = None if interval == "dense" else interval
        kv_cache = KVCacheConfig(**_known(KVCacheConfig, made, [] if not interval else self.dropped))
        resolve = _find("vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes")
        block_size, hash_block_size = resolve(kv_cache, whole) if resolve else (cache["block_size"],) * 2
        base = _find("vllm.v1.core.sched.scheduler:Scheduler")
        own = _find("vllm.v1.core.sched.async_scheduler:AsyncScheduler") if asynchronous else base
        arguments = {
            "vllm_config": whole,
            "kv_cache_config": kv_cache,
            "structured_output_manager": _structured_output_manager(),
            "block_size": block_size,
            "hash_block_size": hash_block_size,
        }
        names = inspect.signature(base.__init__).parameters
        self.scheduler = (scheduler_class or own)(**{name: value for name, value in arguments.items() if name in names})
        sha256 = _find("vllm.utils.hashing:sha256", "vllm.utils:sha256")
        if len(inspect.signature(init_none_hash).parameters):
            init_none_hash(sha256)
        lookahead = (getattr(whole, "num_hash_lookahead_tokens", 0),)
        takes = len(inspect.signature(get_request_block_hasher).parameters)
        hasher = get_request_block_hasher(hash_block_size, sha256, *lookahead[: takes - 2])
        self._hasher = hasher if caching else None
        self._hash_block_size = hash_block_size
        self._requests: dict[str, Any] = {}
        self._preempted: list[str] = []
        preempt = self.scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = noted

    def _speculative(self, config: Mapping[str, Any]) -> Any:
        """A SpeculativeConfig without a draft model: only what the scheduler reads."""
        if not config.get("num_speculative_tokens"):
            return None
        from vllm.config import SpeculativeConfig

        options = config.get("speculative") or {}
        method = config.get("spec_method") or options.get("method")
        lookahead = config.get("disable_lookahead_block_hashes") or options.get("disable_lookahead_block_hashes")
        made = object.__new__(SpeculativeConfig)
        for name, field in SpeculativeConfig.__dataclass_fields__.items():
            default = getattr(field.default, "default", field.default)
            if not isinstance(default, type(...)):
                object.__setattr__(made, name, default)
        return _replaced(
            made,
            method=method or ("eagle" if config.get("async_scheduling") else "ngram"),
            num_speculative_tokens=config["num_speculative_tokens"],
            parallel_drafting=False,
            disable_lookahead_block_hashes=bool(lookahead),
            disable_eagle_block_drop=False,
            num_speculative_tokens_per_batch_size=None,
            draft_model_config=None,
        )

    def _groups(self, config: Mapping[str, Any], max_model_len: int, caching: bool) -> list[Any]:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

        common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        if "use_mla" in FullAttentionSpec.__dataclass_fields__:
            common["use_mla"] = False
        groups = []
        for index, given in enumerate(config.get("kv_cache_groups") or [{"kind": "full_attention"}]):
            block_size = given.get("block_size") or config.get("block_size", 16)
            spec: Any
            if given["kind"] == "full_attention":
                spec = FullAttentionSpec(block_size=block_size, **common)
            elif given["kind"] == "sliding_window":
                spec = SlidingWindowSpec(block_size=block_size, sliding_window=given["sliding_window"], **common)
            else:
                values = {
                    "block_size": config.get("block_size", 16) if caching else max_model_len,
                    "shapes": ((1,),),
                    "dtypes": (torch.float32,),
                    "mamba_cache_mode": "align" if caching else "none",
                    "num_speculative_blocks": config.get("num_speculative_tokens") or 0,
                }
                spec = MambaSpec(**_known(MambaSpec, values, self.dropped))
            eagle = {"is_eagle_group": True} if given.get("eagle") else {}
            groups.append(KVCacheGroupSpec([f"layer {index}"], spec, **_known(KVCacheGroupSpec, eagle, self.dropped)))
        return groups

    # -- the protocol ------------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Take a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        stop = list(request.stop_token_ids)
        values = {
            "request_id": request.request_id,
            "prompt_token_ids": list(request.token_ids),
            "sampling_params": SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, stop_token_ids=stop),
            "pooling_params": None,
            "eos_token_id": None,
            "arrival_time": request.arrival_time,
            "priority": request.priority,
            "cache_salt": request.cache_salt or None,
            "block_hasher": self._hasher,
        }
        names = inspect.signature(Request.__init__).parameters
        made = Request(**{name: value for name, value in values.items() if name in names})
        self._requests[request.request_id] = made
        self.scheduler.add_request(made)

    def abort(self, request_id: str) -> None:
        """End a request."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Plan:
        """Decide a step."""
        self._preempted = []
        output = self.scheduler.schedule()
        requests, cached = self.scheduler.requests, output.scheduled_cached_reqs
        admitted = {request.req_id for request in output.scheduled_new_reqs}
        admitted.update(name for name in cached.req_ids if name in getattr(cached, "resumed_req_ids", ()))
        chunks = []
        for name, count in output.num_scheduled_tokens.items():
            request = requests[name]
            drafts = tuple(output.scheduled_spec_decode_tokens.get(name, ()))
            start, known = request.num_computed_tokens - count, request.num_tokens + _placeholders(request)
            partial = getattr(request, "is_prefill_chunk", request.num_computed_tokens < known)
            chunks.append(Chunk(name, start, count, drafts, not partial, bool(drafts) and name in admitted))
        return Plan(chunks, self._preempted, output)

    def update(self, plan: Plan, tokens: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Take in the output of the oldest step in flight."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        names = [chunk.request_id for chunk in plan.chunks]
        requests = {name: request for name in names if (request := self.scheduler.requests.get(name)) is not None}
        values = {
            "req_ids": names,
            "req_id_to_index": {name: index for index, name in enumerate(names)},
            "sampled_token_ids": [list(tokens.get(name, () if name in requests else (3,))) for name in names],
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
        }
        made = ModelRunnerOutput(**values) if names else EMPTY_MODEL_RUNNER_OUTPUT
        self.scheduler.update_from_output(plan.handle, made)
        return {name: _reason(request) for name, request in requests.items() if request.is_finished()}

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Take the draft tokens of the next step."""
        from vllm.v1.outputs import DraftTokenIds

        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), [list(ids) for ids in drafts.values()]))

    def block_tables(self, request_id: str) -> list[list[int]]:
        """The block tables of a request."""
        return [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def free_blocks(self) -> set[int]:
        """The ids of the free blocks."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return {block.block_id for block in queue.get_all_free_blocks()}

    # -- more ----------------------------------------------------------------------------------------------------

    def queues(self) -> tuple[list[str], list[str]]:
        """Running requests in order of admission, waiting ones in queue order."""
        waiting = [request.request_id for request in self.scheduler.waiting]
        waiting += [request.request_id for request in getattr(self.scheduler, "skipped_waiting", ())]
        return [request.request_id for request in self.scheduler.running], waiting

    def counters(self, request_id: str) -> tuple[Any, ...]:
        """VLLM's own counters of a request, in the order of `workbench.hunt.protocol.Counters`."""
        request = self.scheduler.requests[request_id]
        status = "running" if request.status.name == "RUNNING" else "waiting"
        names = ("num_output_placeholders", "num_in_flight_tokens", "num_stale_output_tokens")
        return (
            request._all_token_ids,
            status,
            request.num_computed_tokens,
            *(getattr(request, name, None) for name in names),
        )

    def pool(self) -> dict[str, Any]:
        """References to blocks, and the prefix cache."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        counts = [0, *(block.ref_cnt for block in blocks[1:])]
        cached = {block.block_id: block.block_hash for block in blocks if block.block_hash is not None}
        return {"ref_counts": counts, "cached_blocks": cached, "block_keys": self._block_keys}

    def _block_keys(self, request: Any, group: int, place: int) -> tuple[list[Any], int]:
        """The hashes under which a block of a request may be cached, and how many a full block has."""
        manager = self.scheduler.kv_cache_manager
        spec = manager.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        per_block = max(1, spec.block_size // self._hash_block_size)
        with_group = _find("vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id")
        hashes = self._requests[request.request_id].block_hashes
        own = hashes[place * per_block : (place + 1) * per_block]
        return [with_group(digest, group) for digest in own], per_block

    def close(self) -> None:
        """End vLLM's threads."""
        self.scheduler.shutdown()


def _placeholders(request: Any) -> int:
    return getattr(request, "num_output_placeholders", 0)


def _reason(request: Any) -> str:
    return "stop" if request.status.name == "FINISHED_STOPPED" else "length"
