"""Fields of EngineConfig as options of ``vllm serve``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAGS = {
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "max_num_partial_prefills": "--max-num-partial-prefills",
    "max_long_partial_prefills": "--max-long-partial-prefills",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "max_model_len": "--max-model-len",
    "policy": "--scheduling-policy",
    "max_num_scheduled_tokens": "--max-num-scheduled-tokens",
}
"""vLLM's flags for fields with a value; switches are in ``vllm_flags``."""

SWITCHES = {"enable_prefix_caching": "enable-prefix-caching", "async_scheduling": "async-scheduling"}
"""vLLM's flags for fields that are on or off."""


def vllm_flags(changes: Mapping[str, Any]) -> str:
    """The changed fields as vLLM's options, to paste after ``vllm serve MODEL``."""
    flags = []
    for name, value in changes.items():
        if name in SWITCHES:
            flags.append(f"--{'' if value else 'no-'}{SWITCHES[name]}")
        elif name in FLAGS and value is not None:
            flags.append(f"{FLAGS[name]} {value}")
    return " ".join(flags)
