"""vLLM's own V1 scheduler behind the hunt's protocol, without a model: any released vLLM from 0.10.1 on.

Constructors change between versions, so each is asked for its fields, and what a version does not know is left out and
named in ``dropped``. Every generated test of a finding in vLLM contains this file: it imports vLLM and torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from zlib import crc32

from workbench.analysis.hunt.drive import LiveRequest, Plan, PlannedChunk
from workbench.analysis.hunt.vllm_parts import Model, call, made_part, parameters
from workbench.analysis.hunt.vllm_waits import Waits, structured_output

_LIMITS = ["max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs", "max_num_active_seqs", "policy"]
_LIMITS += ["watermark", "scheduler_reserve_full_isl", "enable_chunked_prefill"]
_LIMITS += ["long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"]
"""Fields of SchedulerConfig that a workload may set."""


class VllmScheduler:
    """vLLM's Scheduler or AsyncScheduler, or a class that derives from one.

    Args:
        config: The workload's configuration.
        scheduler_class: The class; None for vLLM's own.
        arguments: More arguments of the class.

    Attributes:
        scheduler: vLLM's scheduler.
        depth: Maximum number of steps in flight.
        dropped: Settings of the workload that this version of vLLM does not have.
    """

    def __init__(self, config: Mapping[str, Any], scheduler_class: type | None = None, **arguments: Any) -> None:
        from vllm.v1.core import kv_cache_utils as utils
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.structured_output import StructuredOutputManager

        sha256 = getattr(import_module("vllm.utils"), "sha256", None) or import_module("vllm.utils.hashing").sha256
        self.dropped: list[str] = []
        self.depth = 2 if config.get("async_scheduling") else 1
        has_drafts = "spec_token_ids" in AsyncScheduler._update_after_schedule.__code__.co_names
        if self.depth > 1 and config.get("num_speculative_tokens") and not has_drafts:
            raise ValueError("this vLLM has no drafts in asynchronous steps")
        config = {"block_size": 16, "num_blocks": 512, "enable_prefix_caching": True, **config}
        whole = self._whole(config)
        interval = config.get("prefix_cache_retention_interval") or 0
        made = {"num_blocks": config["num_blocks"], "kv_cache_tensors": [], "kv_cache_groups": self._groups(config)}
        made["prefix_cache_retention_interval"] = None if interval == "dense" else interval
        kv_cache = call(KVCacheConfig, made, self.dropped if interval else None)
        resolve = getattr(utils, "resolve_kv_cache_block_sizes", lambda *_: (config["block_size"],) * 2)
        block_size, self._hash_block_size = resolve(kv_cache, whole)
        given = {"vllm_config": whole, "kv_cache_config": kv_cache, "block_size": block_size, **arguments}
        given |= {"hash_block_size": self._hash_block_size, "structured_output_manager": StructuredOutputManager(whole)}
        kind = scheduler_class or (AsyncScheduler if self.depth > 1 else Scheduler)
        self.scheduler: Any = call(kind, given, like=Scheduler)
        self.close = self.scheduler.shutdown
        utils.init_none_hash(sha256)
        hashing: tuple[Any, ...] = (self._hash_block_size, sha256, getattr(whole, "num_hash_lookahead_tokens", 0))
        hashing = hashing[: len(parameters(utils.get_request_block_hasher))]
        self._hasher = utils.get_request_block_hasher(*hashing) if config["enable_prefix_caching"] else None
        self._keyed = getattr(utils, "make_block_hash_with_group_id", None) or utils.BlockHashWithGroupId
        self._requests: dict[str, Any] = {}
        self._waits = Waits(self.scheduler, is_async=self.depth > 1)
        self._preempted: Any = None  # without _preempt_request the driver finds out
        if preempt := getattr(self.scheduler, "_preempt_request", None):
            self._preempted, append = [], lambda request: self._preempted.append(request.request_id)
            self.scheduler._preempt_request = lambda one, *args, **more: append(one) or preempt(one, *args, **more)

    def _whole(self, config: Mapping[str, Any]) -> Any:
        """A VllmConfig with the parts that a workload sets."""
        from vllm.config import CacheConfig, SchedulerConfig, SpeculativeConfig, VllmConfig

        model = Model()
        model.max_model_len = config.get("max_model_len") or 1_000_000
        given: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "enable_chunked_prefill": True}
        given |= {name: config[name] for name in _LIMITS if config.get(name) is not None}
        given |= {"max_model_len": model.max_model_len, "is_encoder_decoder": False}
        limits = call(SchedulerConfig, given, self.dropped)
        self.dropped = [name for name in self.dropped if name in config]
        vars(limits)["async_scheduling"] = self.depth > 1
        caching, groups = config["enable_prefix_caching"], config.get("kv_cache_groups") or ()
        mode = "align" if caching and any(group["kind"] == "mamba" for group in groups) else "none"
        cache = {"block_size": config["block_size"], "enable_prefix_caching": caching, "mamba_cache_mode": mode}
        parts = {"cache_config": made_part(CacheConfig, num_gpu_blocks=config["num_blocks"], **cache)}
        if config.get("num_speculative_tokens"):
            options = {**(config.get("speculative") or {}), **config}
            method = config.get("spec_method") or options.get("method") or ("eagle" if self.depth > 1 else "ngram")
            drafts = {"method": method, "num_speculative_tokens": config["num_speculative_tokens"]}
            drafts["disable_lookahead_block_hashes"] = bool(options.get("disable_lookahead_block_hashes"))
            parts["speculative_config"] = made_part(SpeculativeConfig, **drafts, disable_eagle_block_drop=False)
        if config.get("max_loras"):
            parts["lora_config"] = made_part(import_module("vllm.config").LoRAConfig, max_loras=config["max_loras"])
        return made_part(VllmConfig, model_config=model, scheduler_config=limits, **parts)

    def _groups(self, config: Mapping[str, Any]) -> list[Any]:
        import torch
        from vllm.v1 import kv_cache_interface as kinds

        names = {"full_attention": "FullAttentionSpec", "sliding_window": "SlidingWindowSpec", "mamba": "MambaSpec"}
        caching, number = config["enable_prefix_caching"], torch.float32
        common = {"num_kv_heads": 1, "head_size": 1, "dtype": number, "use_mla": False, "shapes": ((1,),)}
        common |= {"dtypes": (number,), "mamba_cache_mode": "align" if caching else "none"}
        common["num_speculative_blocks"] = config.get("num_speculative_tokens") or 0
        groups = []
        for index, given in enumerate(config.get("kv_cache_groups") or [{"kind": "full_attention"}]):
            kind, block_size = getattr(kinds, names[given["kind"]]), given.get("block_size") or config["block_size"]
            if given["kind"] == "mamba" and not caching:
                block_size = config.get("max_model_len") or 1_000_000
            elif given["kind"] == "mamba" and "mamba_cache_mode" not in kind.__dataclass_fields__:
                raise ValueError("this vLLM has no prefix cache for recurrent layers")
            spec = call(kind, {**common, "block_size": block_size, "sliding_window": given.get("sliding_window")})
            eagle = {"is_eagle_group": True} if given.get("eagle") else {}
            group = {"layer_names": [f"layer {index}"], "kv_cache_spec": spec, **eagle}
            groups.append(call(kinds.KVCacheGroupSpec, group, self.dropped))
        return groups

    def add(self, request: LiveRequest) -> None:
        """Take a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        required = [name for name, each in parameters(Request).items() if each.default is each.empty]
        values: dict[str, Any] = dict.fromkeys(required)
        values |= {name: getattr(request, name) for name in ("request_id", "arrival_time", "priority")}
        stop = list(request.stop_token_ids)
        options: dict[str, Any] = {"structured_outputs": structured_output()} if request.ready_step is not None else {}
        options |= {"max_tokens": request.max_tokens, "ignore_eos": True, "stop_token_ids": stop}
        values["sampling_params"] = SamplingParams(**options)
        values |= {"prompt_token_ids": list(request.token_ids), "cache_salt": request.cache_salt or None}
        if request.adapter:
            kind = import_module("vllm.lora.request").LoRARequest
            values["lora_request"] = kind(request.adapter, 1 + crc32(request.adapter.encode()), "/" + request.adapter)
        made = self._requests[request.request_id] = Request(**values, block_hasher=self._hasher)
        self._waits.add(request)
        self.scheduler.add_request(made)

    def foresee(self, requests: Sequence[LiveRequest]) -> None:
        """Connect what some of their KV will come from."""
        if any(request.remote for request in requests):
            self._waits.connect()

    def abort(self, request_id: str) -> None:
        """End a request."""
        self.scheduler.finish_requests(request_id, type(self._requests[request_id].status).FINISHED_ABORTED)

    def schedule(self) -> Plan:
        """Decide a step."""
        self._preempted = None if self._preempted is None else []
        self._waits.begin()
        output = self.scheduler.schedule()
        admitted = {new.req_id for new in output.scheduled_new_reqs}
        admitted.update(getattr(output.scheduled_cached_reqs, "resumed_req_ids", ()))
        chunks = []
        for name, count in output.num_scheduled_tokens.items():
            request, drafts = self.scheduler.requests[name], tuple(output.scheduled_spec_decode_tokens.get(name, ()))
            partial = getattr(request, "is_prefill_chunk", None)  # before 0.19 the driver finds out
            samples, start = None if partial is None else not partial, request.num_computed_tokens - count
            chunks.append(PlannedChunk(name, start, count, drafts, samples, bool(drafts) and name in admitted))
        return Plan(chunks, self._preempted, output, passed_over=self._waits.blocked())

    def update(self, plan: Plan, tokens: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Take in the output of the oldest step in flight."""
        names = [chunk.request_id for chunk in plan.chunks]
        requests = {name: request for name in names if (request := self.scheduler.requests.get(name)) is not None}
        sampled = [list(tokens.get(name, () if name in requests else (3,))) for name in names]
        values: dict[str, Any] = {"req_ids": names, "sampled_token_ids": sampled, "spec_token_ids": None}
        values |= {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": [], **self._waits.output()}
        values["req_id_to_index"] = {name: index for index, name in enumerate(names)}
        output = call(import_module("vllm.v1.outputs").ModelRunnerOutput, values)
        self.scheduler.update_from_output(plan.handle, output)
        ended = {name: request.status.name for name, request in requests.items() if request.is_finished()}
        return {name: "stop" if status == "FINISHED_STOPPED" else "length" for name, status in ended.items()}

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Take the draft tokens of the next step."""
        if kind := getattr(import_module("vllm.v1.outputs"), "DraftTokenIds", None):
            self.scheduler.update_draft_token_ids(kind(list(drafts), [list(ids) for ids in drafts.values()]))
        else:  # 0.10.1 takes them with the output
            for name, ids in drafts.items():
                self.scheduler.requests[name].spec_token_ids = list(ids)

    def block_tables(self, request_id: str) -> list[list[int]]:
        """The block tables of a request."""
        return [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(request_id)]

    def free_blocks(self) -> set[int]:
        """The ids of the free blocks."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return {block.block_id for block in queue.get_all_free_blocks()}

    def queues(self) -> tuple[list[str], list[str]]:
        """Running requests in order of admission, waiting ones in queue order."""
        queues = ("kv_holding_waiting", "waiting", "skipped_waiting")
        waiting = [request for name in queues for request in getattr(self.scheduler, name, ())]
        return [request.request_id for request in self.scheduler.running], [each.request_id for each in waiting]

    def counters(self, request_id: str) -> tuple[Any, ...]:
        """VLLM's own counters of a request, in the order of `workbench.analysis.hunt.protocol.Counters`."""
        request = self.scheduler.requests[request_id]
        status = "running" if request.status.name == "RUNNING" else "waiting"
        names = ("num_output_placeholders", "num_in_flight_tokens", "num_stale_output_tokens")
        counts = [getattr(request, name, None) for name in names]
        return (request._all_token_ids, status, request.num_computed_tokens, *counts)

    def pool(self) -> dict[str, Any]:
        """References to blocks, and the prefix cache."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        cached = {block.block_id: block.block_hash for block in blocks if block.block_hash is not None}
        counts = [0, *(block.ref_cnt for block in blocks[1:])]
        return {"ref_counts": counts, "cached_blocks": cached, "block_keys": self._block_keys}

    def _block_keys(self, request: Any, group: int, place: int) -> tuple[list[Any], int]:
        """The hashes under which a block of a request may be cached, and how many a full block has."""
        spec = self.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        size = max(1, spec.block_size // self._hash_block_size)
        hashes = self._requests[request.request_id].block_hashes
        return [self._keyed(key, group) for key in hashes[place * size : (place + 1) * size]], size
