"""Fields of EngineConfig as options of the recorded server: vLLM's, or SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.trace import Trace

BY_VLLM_RULES = (
    "vLLM's rules are applied to its requests; its own (prompts first, a share of each reply reserved, whole pages) "
    "are not simulated"
)
"""Said of SGLang wherever a recorded run is simulated again."""

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


SGLANG_FLAGS = {
    "max_num_batched_tokens": "--chunked-prefill-size",
    "max_num_seqs": "--max-running-requests",
    "block_size": "--page-size",
    "max_model_len": "--context-length",
    "data_parallel_size": "--dp-size",
}
"""SGLang's flags for fields with a value."""

SGLANG_SWITCHES = {
    "enable_prefix_caching": "--disable-radix-cache",
    "enable_chunked_prefill": "--chunked-prefill-size -1",
    "async_scheduling": "--disable-overlap-schedule",
}
"""SGLang's flags that switch a field off, which is on without them."""


_BUDGET_AND_SEATS = {"max_num_batched_tokens", "max_num_seqs"}


class Server(NamedTuple):
    """A server whose options are told.

    Attributes:
        is_sglang: Whether it is SGLang, and not vLLM.
        config: Its recorded settings.
    """

    is_sglang: bool = False
    config: Mapping[str, Any] = {}

    @classmethod
    def of(cls, trace: Trace) -> Server:
        """The server of a recording; vLLM for runs of Workbench."""
        return cls(trace.meta.is_of_sglang, trace.config)

    def refusal(self, changes: Mapping[str, Any]) -> str:
        """Why the server does not start with the changed fields, as a sentence; "" if it does."""
        changed = {**self.config, **changes}
        budget, seats = changed.get("max_num_batched_tokens"), changed.get("max_num_seqs")
        if self.is_sglang or not _BUDGET_AND_SEATS & changes.keys():
            return ""
        if not isinstance(budget, int) or not isinstance(seats, int) or budget >= seats:
            return ""
        return f"vLLM refuses this setting: max_num_batched_tokens={budget} is less than max_num_seqs={seats}"

    def flags(self, changes: Mapping[str, Any]) -> str:
        """The changed fields as its options; "" if it has none for them, or refuses them."""
        if self.refusal(changes):
            return ""
        if not self.is_sglang:
            return vllm_flags(changes)
        flags = [SGLANG_SWITCHES[name] for name, value in changes.items() if name in SGLANG_SWITCHES and not value]
        flags += [f"{SGLANG_FLAGS[name]} {changes[name]}" for name in changes if name in SGLANG_FLAGS]
        block_size = {"block_size": 16, **self.config, **changes}["block_size"]
        if num_blocks := changes.get("num_blocks"):  # the first one is padding
            flags.append(f"--max-total-tokens {(num_blocks - 1) * block_size}")
        return " ".join(flags)

    def command(self, changes: Mapping[str, Any]) -> str:
        """Its command line with the changed fields; "" if it has no option for them, or refuses them."""
        start = "python -m sglang.launch_server --model-path" if self.is_sglang else "vllm serve"
        return f"{start} MODEL {flags}" if (flags := self.flags(changes)) else ""


VLLM = Server()
"""The server whose options are told for runs of Workbench."""
