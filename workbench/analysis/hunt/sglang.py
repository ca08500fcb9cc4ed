"""SGLang's Scheduler, prefill adder, radix cache and page allocator behind the hunt's protocol; they need no GPU.

workbench hunt --scheduler workbench.analysis.hunt.sglang:SGLangScheduler --out found, in an environment with SGLang
0.5.23 and torch. Its own constructor starts processes, a model and sockets, so its state is made here; what it decides
by, and what it decides about, is SGLang's.
"""

from __future__ import annotations

import json
import logging
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from workbench.analysis.hunt.drive import LiveRequest, Plan, PlannedChunk
from workbench.analysis.hunt.workloads import PAGES

OFF = (
    "enable_hisparse",
    "enable_lora",
    "enable_hicache_storage",
    "enable_lmcache",
    "enable_hierarchical_cache",
    "enable_overlap",
    "enable_unified_cache_external_linker",
    "enable_priority_scheduling",
    "enable_overlap_mlx",
    "is_hybrid_swa",
    "require_mlp_sync",
    "enable_fpm",
    "enable_decode_hicache",
    "enable_priority_preemption",
    "schedule_low_priority_values_first",
)
"""Features of SGLang that are off."""

NONE = (
    "dllm_config",
    "hisparse_coordinator",
    "decode_offload_manager",
    "dynamic_chunk_sizer",
    "min_free_slots_delayer",
    "lora_drainer",
    "metrics_collector",
    "max_queued_requests",
    "scheduler_stage_metrics",
    "draft_worker",
    "mm_receiver",
    "truncation_align_size",
)
"""Parts of SGLang that a plain engine does not have."""

DOUBLES = (
    "grammar_manager",
    "beam_coordinator",
    "metrics_reporter",
    "load_inquirer",
    "load_publisher",
    "ngram_embedding_manager",
    "dp_attn_adapter",
    "output_streamer",
    "session_controller",
    "pool_stats_observer",
    "tp_worker",
    "rust_server",
)
"""Parts that talk to a model, a client or other ranks; nothing is decided there."""


@lru_cache(maxsize=1)
def _sglang() -> SimpleNamespace:
    """The modules of SGLang, and a folder with the configuration of a made-up model."""
    logging.getLogger("sglang").setLevel(logging.ERROR)
    names = {
        "scheduler": "managers.scheduler",
        "batch": "managers.schedule_batch",
        "results": "managers.scheduler_components.batch_result_processor",
        "utils": "managers.utils",
        "messages": "managers.io_struct",
        "sampling": "sampling.sampling_params",
        "args": "server_args",
        "context": "runtime_context",
        "cache": "mem_cache.radix_cache",
        "params": "mem_cache.cache_init_params",
        "pool": "mem_cache.memory_pool",
        "allocators": "mem_cache.allocator",
    }
    folder = tempfile.TemporaryDirectory(prefix="workbench-")
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1}
    model |= {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 32000}
    Path(folder.name, "config.json").write_text(json.dumps(model))
    parts = {name: import_module(f"sglang.srt.{path}") for name, path in names.items()}
    return SimpleNamespace(torch=import_module("torch"), folder=folder, **parts)


RESERVED = 0.1
"""Share of SGLang's usual reserve for the outputs of running requests. With all of it none is ever retracted here."""


class SGLangScheduler:
    """SGLang's Scheduler with a made-up worker; its pages are blocks."""

    features = ("caching", PAGES)
    # Prompts come first, a part of each output is reserved, and prompts are cut into whole pages. The request with the
    # fewest output tokens is retracted, and queues behind the others. After a step, pages of a running request are
    # replaced by those of the cache with the same content: its block table does not only grow.
    allows = (
        "a running request is skipped",
        "a step is wasted",
        "a request waits without need",
        "a chunk is cut without need",
        "a block holds something else than it is used for",
        "the wrong request is preempted",
        "a request is overtaken",
        "the queue is out of order",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        parts = self._parts = _sglang()
        self._size = size = config["block_size"]
        self._longest = min(config.get("max_model_len") or 4096, (config["num_blocks"] - 1) * size)
        budget, seats = config["max_num_batched_tokens"], config["max_num_seqs"]
        if budget % size:
            raise ValueError(f"SGLang cuts prompts into whole pages, and {budget} tokens are not pages of {size}")
        args = parts.args.ServerArgs(
            model_path=parts.folder.name,
            load_format="dummy",
            device="cpu",
            attention_backend="torch_native",
            page_size=size,
            disable_overlap_schedule=True,
            disable_radix_cache=not config.get("enable_prefix_caching", True),
            chunked_prefill_size=budget,
            max_prefill_tokens=budget,
            max_running_requests=seats,
            pp_max_micro_batch_size=seats,
            schedule_conservativeness=RESERVED,
        )
        ranks = parts.context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        parts.context.publish(args, role="scheduler", ranks=ranks)
        self.scheduler = self._made(args, config["num_blocks"] - 1)
        self._requests: dict[str, Any] = {}
        self._leaving: list[Any] = []
        self._tables: dict[str, list[int]] = {}
        self._last: Any = None

    def _made(self, args: Any, num_pages: int) -> Any:
        """A Scheduler whose constructor did not run."""
        parts, size, longest = self._parts, self._size, self._longest
        made = object.__new__(parts.scheduler.Scheduler)
        made.server_args, made.device, made.page_size = args, "cpu", size
        for names, value in ((OFF, False), (NONE, None)):
            vars(made).update(dict.fromkeys(names, value))
        vars(made).update({name: MagicMock() for name in DOUBLES})
        made.grammar_manager.has_waiting_grammars.return_value = False
        made.beam_coordinator.pending_member_rows.return_value = (
            made.load_inquirer._get_num_pending_tokens.return_value
        ) = 0
        made.dp_attn_adapter.maybe_prepare_mlp_sync_batch = lambda batch, need_sync=False: batch
        made.dp_attn_adapter.maybe_convert_decode_to_extend = lambda batch: batch
        made.ngram_embedding_manager.prepare_for_forward = lambda batch, chunked_req=None: batch
        made.metrics_reporter.enable_metrics = made.tp_worker.model_runner.prefill_aware_swa = False
        made.publish_load_snapshot = lambda force=False: None
        made.maybe_send_health_check_signal = made._record_step_counters = lambda *_: None
        made.req_to_token_pool = parts.pool.ReqToTokenPool(args.max_running_requests, longest + size, "cpu", False)
        kind = parts.allocators.PagedTokenToKVPoolAllocator if size > 1 else parts.allocators.TokenToKVPoolAllocator
        shape = (num_pages * size, *((size,) if size > 1 else ()), parts.torch.float32, "cpu", MagicMock(), False)
        made.token_to_kv_pool_allocator = kind(*shape)
        made.tree_cache = parts.cache.RadixCache(
            parts.params.CacheInitParams(
                args.disable_radix_cache, made.req_to_token_pool, made.token_to_kv_pool_allocator, size
            )
        )
        made.model_config = SimpleNamespace(
            is_multimodal=False,
            is_encoder_decoder=False,
            context_len=longest,
            vocab_size=2**31,
            hf_eos_token_id=None,
            self_opened_think_start_ids=None,
            think_end_ids=None,
            is_generation=True,
            model_impl="auto",
        )
        made.spec_algorithm = parts.scheduler.SpeculativeAlgorithm.from_string(None)
        made.disaggregation_mode = parts.scheduler.DisaggregationMode.NULL
        made.max_prefill_tokens, made.max_running_requests = args.max_prefill_tokens, args.max_running_requests
        made.max_req_len, made.schedule_policy, made.processed_tokens_counter = longest - 1, "fcfs", 0
        made.max_total_num_tokens, made.kv_shard_widening = num_pages * size, 1
        made.max_new_tokens_limit = made.sliding_window_size = None
        made.priority_scheduling_preemption_threshold, made.is_generation = 0, True
        made.init_running_status()
        made.chunked_prefill_size, made.prefill_decode_interval = args.chunked_prefill_size, 0
        made._prefill_decode_interval_remaining = made.prefill_decode_interval_min_bs = 0
        made.chunked_req, made._pending_chunked_abort_req, made.is_mixed_chunk = None, None, False
        made.init_schedule_policy()
        names = parts.results.SchedulerBatchResultProcessor.__dataclass_fields__
        given = {name: getattr(made, name, None) for name in names}
        given |= {"model_worker": made.tp_worker, "logprob_result_processor": MagicMock()}
        made.batch_result_processor = parts.results.SchedulerBatchResultProcessor(**given)
        return made

    def add(self, request: LiveRequest) -> None:  # noqa: D102
        options = self._parts.sampling.SamplingParams(
            max_new_tokens=request.max_tokens, stop_token_ids=list(request.stop_token_ids) or None
        )
        options.normalize(None)
        made = self._parts.batch.Req(
            request.request_id,
            "",
            array("q", request.token_ids),
            options,
            eos_token_ids=set(),
            vocab_size=2**31,
            disagg_mode=self.scheduler.disaggregation_mode,
            cache_salt=request.cache_salt or None,
        )
        made.tokenizer = None
        self.scheduler.init_req_max_new_tokens(made)
        # SGLang refuses longer prompts (`max_req_input_len`), and shortens answers that the pool cannot hold.
        if len(request.token_ids) > self.scheduler.max_req_len - 5 or options.max_new_tokens < request.max_tokens:
            raise ValueError("a request has more tokens than SGLang takes with this pool")
        self._requests[request.request_id] = made
        self.scheduler._add_request_to_queue(made)

    def abort(self, request_id: str) -> None:  # noqa: D102
        self.scheduler.abort_request(self._parts.messages.AbortReq(rid=request_id))
        self._leaving.append(self._requests.pop(request_id))
        self._tables.pop(request_id, None)

    def schedule(self) -> Plan:  # noqa: D102
        scheduler, before = self.scheduler, {each.rid for each in self.scheduler.waiting_queue}
        found = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
        scheduler.running_batch, batch = found.running_batch, found.batch_to_run
        scheduler.last_batch = batch
        back = [each.rid for each in scheduler.waiting_queue if each.rid not in before]
        preempted = [name for name in back if name in self._requests]  # an aborted one may be retracted, too
        chunks = []
        for each in batch.reqs if batch else ():
            if each.rid not in self._requests:  # aborted; its last step is nobody's
                continue
            if batch.forward_mode.is_extend():
                start, count = each.prefix_len, each.extend_len
                samples = start + count == len(each.origin_input_ids) + len(each.output_ids)
            else:
                start, count, samples = len(each.origin_input_ids) + len(each.output_ids) - 1, 1, True
            chunks.append(PlannedChunk(each.rid, start, count, samples=samples))
        self._tables = {name: self._pages(each) for name, each in self._requests.items()}
        return Plan(chunks, preempted, handle=batch)

    def update(self, plan: Plan, tokens: Mapping[str, Sequence[int]]) -> dict[str, str]:  # noqa: D102
        batch, ended = plan.handle, dict[str, str]()
        if batch is None:
            return ended
        ids = [tokens.get(each.rid, (3,))[0] for each in batch.reqs]
        result = self._parts.utils.GenerationBatchResult(
            logits_output=MagicMock(), next_token_ids=self._parts.torch.tensor(ids), can_run_cuda_graph=False
        )
        requests = list(batch.reqs)
        self.scheduler.process_batch_result(batch, result)
        for each in requests:
            if each.finished() and self._requests.pop(each.rid, None) is not None:
                ended[each.rid] = each.finished_reason.to_json()["type"]
        return ended

    def _pages(self, request: Any) -> list[int]:
        if not request.kv.holds_kv:
            return []
        row = self.scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, : request.kv.kv_allocated_len]
        return (row[:: self._size] // self._size).tolist()

    def block_tables(self, request_id: str) -> list[list[int]]:  # noqa: D102
        return [self._tables.get(request_id, [])]

    def free_blocks(self) -> set[int]:
        """Pages that no request holds, by the tables of the last step.

        They are free, of the cache, of an aborted request, whose last step has not ended, or have replaced equal ones
        in a table since then. A page that is lost is in none of these; a free one still in use is in the answer.
        """
        free = set(self.scheduler.token_to_kv_pool_allocator.get_all_free_pages().tolist())
        cache, others, used = self.scheduler.tree_cache, set[int](), set[int]()
        nodes = [] if cache.disable else list(cache.root_node.children.values())
        for node in nodes:
            nodes += node.children.values()
            others.update(place // self._size for place in node.value.tolist())
        others.update(page for request in self._leaving for page in self._pages(request))
        for request in self._requests.values():
            used.update(self._pages(request))
        named = {page for name in self._requests for page in self._tables.get(name, ())}
        return ((free | others | used) - named) | (free & used)
