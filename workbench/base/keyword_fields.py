"""The fields of both configurations as keywords, for type checkers and editors.

A function that takes fields by name has ``**fields: Unpack[ConfigFields]``, so that a checker refuses a misspelt one
and an editor offers them all. `workbench.base.named_fields` does the same for consoles. A test compares names and
types with `workbench.config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

PolicyName = Literal["fcfs", "priority"]
EvictionName = Literal["lru", "lfu", "ttl", "two_zones", "session", "s3fifo", "belady"]
BackendName = Literal["auto", "metal", "cuda", "cpu", "gather", "dense", "msl"]
RouterName = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "consistent_hash",
    "sticky",
    "cache_aware",
    "prefix",
    "score",
    "vllm",
]
CacheType = Literal["auto", "float32", "float16", "bfloat16", "int8_per_token_head"]


class ConfigFields(TypedDict, total=False):
    """The fields of EngineConfig but ``policy``, which functions have as a parameter."""

    max_num_batched_tokens: int
    max_num_scheduled_tokens: int | None
    max_num_seqs: int
    max_num_active_seqs: int | None
    block_size: int
    num_blocks: int | Literal["auto"]
    gpu_memory_utilization: float | None
    max_model_len: int | None
    enable_prefix_caching: bool
    eviction: EvictionName | Any
    second_tier: Mapping[str, Any] | None
    watermark: float
    scheduler_reserve_full_isl: bool
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    max_num_partial_prefills: int | None
    max_long_partial_prefills: int | None
    enable_chunked_prefill: bool
    async_scheduling: bool
    num_speculative_tokens: int
    speculative: Mapping[str, Any] | None
    kv_cache_groups: Sequence[Mapping[str, Any]] | None
    max_loras: int
    max_lora_rank: int
    prefix_cache_retention_interval: int | str
    attention_backend: BackendName
    kv_cache_dtype: CacheType
    batch_invariant: bool
    seed: int
    shadow_metal: Mapping[str, int] | None
    record_top_tokens: int


class ConfigChanges(ConfigFields, total=False):
    """All fields of EngineConfig; functions that simulate also take a SchedulingPolicy as the policy."""

    policy: Any


class SamplingFields(TypedDict, total=False):
    """The fields of SamplingParams."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int | None
    sampler: Callable[..., Any] | None
    logits_processors: Sequence[Callable[..., Any]]
    structured_outputs: Mapping[str, Any]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    visible_token_ids: Sequence[int]
