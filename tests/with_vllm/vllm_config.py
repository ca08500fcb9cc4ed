"""vLLM's configuration of a model that is never loaded, from the fields of an EngineConfig."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

# The smallest configuration that vLLM accepts as a model.
MODEL = {
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


def vllm_config(config: Mapping[str, Any]) -> VllmConfig:
    """The configuration of a vLLM scheduler with these limits.

    Args:
        config: Fields of an EngineConfig; those that are left out take the defaults of the recorded workloads.
    """
    asynchronous = bool(config.get("async_scheduling"))
    caching = config.get("enable_prefix_caching", True)
    max_model_len = config.get("max_model_len") or 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder,
            served_model_name="made-up",
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            dtype="float32",
        )
    limits = SchedulerConfig(
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        max_num_batched_tokens=config.get("max_num_batched_tokens", 512),
        max_num_scheduled_tokens=config.get("max_num_scheduled_tokens"),
        max_num_seqs=config.get("max_num_seqs", 16),
        max_num_active_seqs=config.get("max_num_active_seqs"),
        policy=config.get("policy", "fcfs"),
        watermark=config.get("watermark", 0.0),
        scheduler_reserve_full_isl=config.get("scheduler_reserve_full_isl", True),
        long_prefill_token_threshold=config.get("long_prefill_token_threshold", 0),
        long_prefill_token_threshold_adaptive=config.get("long_prefill_token_threshold_adaptive", False),
        async_scheduling=asynchronous,
    )
    cache = CacheConfig(block_size=config.get("block_size", 16), enable_prefix_caching=caching)
    cache.num_gpu_blocks = config.get("num_blocks", 512)
    whole = VllmConfig(
        model_config=model,
        scheduler_config=limits,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    # VllmConfig turns some of these off if it finds no GPU.
    whole.cache_config.enable_prefix_caching = caching
    whole.scheduler_config.async_scheduling = asynchronous
    return whole
