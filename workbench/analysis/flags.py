"""Fields of EngineConfig as options of ``vllm serve``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAGS = {
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "max_model_len": "--max-model-len",
    "policy": "--scheduling-policy",
    "max_num_scheduled_tokens": "--max-num-scheduled-tokens",
    "max_num_active_seqs": "--max-num-active-seqs",
    "watermark": "--watermark",
    "max_loras": "--max-loras",
    "data_parallel_size": "--data-parallel-size",
}
"""vLLM's flags for fields with a value; switches are in ``vllm_flags``."""

SWITCHES = {
    "enable_prefix_caching": "enable-prefix-caching",
    "enable_chunked_prefill": "enable-chunked-prefill",
    "async_scheduling": "async-scheduling",
    "scheduler_reserve_full_isl": "scheduler-reserve-full-isl",
    "long_prefill_token_threshold_adaptive": "long-prefill-token-threshold-adaptive",
}
"""vLLM's flags for fields that are on or off."""

VLLM_FIELDS = (*FLAGS, *SWITCHES, "num_speculative_tokens", "prefix_cache_retention_interval")
"""Fields that vLLM has too, some of them inside an option in JSON."""


def vllm_flags(changes: Mapping[str, Any]) -> str:
    """The changed fields as vLLM's options, to paste after ``vllm serve MODEL``."""
    flags = []
    for name, value in changes.items():
        if name in SWITCHES:
            flags.append(f"--{'' if value else 'no-'}{SWITCHES[name]}")
        elif name in FLAGS and value is not None:
            flags.append(f"{FLAGS[name]} {value}")
    return " ".join(flags)
