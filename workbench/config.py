"""The configuration of an engine (`EngineConfig`) and of one request (`SamplingParams`).

Both are frozen and checked when they are made, so no later code checks again. Names are vLLM's. A value that cannot
work is rejected with the field, the value, the allowed range and what to do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import Any, Literal, TypeVar, Unpack, get_args

from workbench.base.compatibility import check_compatible
from workbench.base.field_checks import (
    MAX_INT32,
    FieldError,
    UnknownFieldError,
    choice,
    computable,
    did_you_mean,
    flag,
    integer,
    items,
    json_object,
    number,
)
from workbench.base.keyword_fields import (
    BackendName,
    CacheType,
    ConfigChanges,
    EvictionName,
    PolicyName,
    SamplingFields,
)
from workbench.base.named_fields import show_fields
from workbench.base.text import shown
from workbench.speculation import Speculation
from workbench.trace.fields import MAX_BLOCKS, MAX_TOKENS
from workbench.trace.kv_groups import KVCacheGroup, read_groups

EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)
"""Words for the rule by which cached blocks are evicted."""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

KV_CACHE_DTYPES: tuple[CacheType, ...] = get_args(CacheType)
"""Element types of the KV cache, in vLLM's words."""

BACKEND_NAMES: tuple[BackendName, ...] = get_args(BackendName)
"""Names that ``EngineConfig(attention_backend=...)`` and ``paged_varlen_attention(backend=...)`` take."""

MAX_LORAS, MAX_LORA_RANK = 1024, 512
DEFAULT_NUM_BLOCKS = 512
MAX_TOP_TOKENS = 100
"""Maximum of ``record_top_tokens``: a view shows a few, and a trace keeps them for every output token."""

STRUCTURED_OUTPUTS: dict[str, tuple[type, ...]] = {
    "json": (Mapping, str, bool),
    "json_object": (bool,),
    "regex": (str,),
    "choice": (list, tuple),
    "grammar": (str,),
}
"""Words of ``SamplingParams(structured_outputs=...)``, vLLM's, and the types of their values."""

_STRUCTURED_FORMS = {
    "json": "a JSON schema",
    "json_object": "True",
    "regex": "a regular expression",
    "choice": "a list of texts",
    "grammar": "a grammar in Lark or GBNF",
}


class _Frozen:
    """The common part of both configurations: storing checked values, listing those that differ from the defaults."""

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _changed(self) -> dict[str, Any]:
        default = type(self)()
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: value for name in names if (value := getattr(self, name)) != getattr(default, name)}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._changed().items())
        return f"{type(self).__name__}({given})"


C = TypeVar("C", bound=type)


def _suggesting(kind: C) -> C:
    """Class decorator: a keyword that is not a field is refused with the field that was probably meant.

    ``replace`` names the fields, too.
    """
    make, known = kind.__init__, [field.name for field in fields(kind)]  # type: ignore[misc]

    @wraps(make)
    def make_or_suggest(self: Any, *given: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                hint = did_you_mean(name, known, f"help({kind.__name__})")
                raise UnknownFieldError(f"unknown {kind.__name__} field {name!r}{hint}")
        make(self, *given, **named)

    kind.__init__ = make_or_suggest  # type: ignore[misc]
    show_fields(kind, kind.replace)  # type: ignore[attr-defined]
    return kind


@_suggesting
@dataclass(frozen=True, repr=False)
class EngineConfig(_Frozen):
    """Configuration of an engine: scheduling, size of the KV cache, attention backend.

    Attributes:
        max_num_batched_tokens: Token budget of a step: maximum number of rows of the packed batch.
        max_num_scheduled_tokens: Token budget of the scheduler if it should be smaller than
            ``max_num_batched_tokens``; None for the same.
        max_num_seqs: Maximum number of running requests.
        max_num_active_seqs: A lower limit on running requests than ``max_num_seqs``; None for the same.
        block_size: Tokens per KV block.
        num_blocks: KV blocks of the pool. Block 0 is never handed out, so ``num_blocks - 1`` can be used. "auto": a
            share of the memory that is free when the model has been loaded; a simulation needs a number.
        gpu_memory_utilization: The share of memory that ``num_blocks="auto"`` takes, which it implies: on a GPU of all
            that MLX may use, the model included, as in vLLM; on a CPU of what is free when the model has been loaded.
            None for 0.6 of what is free on a GPU, and 0.2 on a CPU.
        max_model_len: Longest sequence in tokens, prompt and output; None for the model's own limit.
        enable_prefix_caching: Find KV blocks of an equal prefix instead of computing them again.
        eviction: The cached block that is handed out first when no other is free: "lru", vLLM's rule; "lfu", "ttl",
            "two_zones", "session", "s3fifo"; "belady", which knows the future and so runs in simulations alone; or an
            object, see ``workbench.scheduler.eviction``.
        second_tier: Host memory or a disk that keeps content which the pool evicts, simulated: ``{"num_blocks": 20000,
            "kv_bytes_per_token": 131072, "bandwidth": 25e9, "latency": 0.001}``, with bytes per second and the seconds
            of a load beside its bytes (0 by default); None for none. See ``workbench.scheduler.second_tier``.
        policy: Order of the waiting queue: "fcfs", or "priority" (smaller first, then time of arrival).
        watermark: Fraction of the pool that stays free when a request is admitted while others run.
        scheduler_reserve_full_isl: Admit a request only when all of its tokens fit into free blocks now;
            False requires it of the first chunk only.
        long_prefill_token_threshold: With both limits on partial prefills off, maximum number of tokens of one request
            in a step while others run or wait; 0 for no cap. With a limit on, a prompt is long while more than this
            many of its tokens are neither cached nor computed; 0 for the token budget.
        long_prefill_token_threshold_adaptive: Raise that cap to the fair share
            ``max_num_batched_tokens // requests``.
        max_num_partial_prefills: Number of prompts that are guaranteed to progress in every step and share its budget;
            None for off (``workbench.scheduler.partial_prefills``).
        max_long_partial_prefills: Maximum number of prompts in progress that are long; None for no limit.
        enable_chunked_prefill: Split prompts over steps; False computes each prompt in one step.
        async_scheduling: Schedule a step while the step before it is being computed, as vLLM does by default.
        num_speculative_tokens: Draft tokens per request and step; 0 for no speculation.
        speculative: The proposer of drafts, such as ``{"method": "ngram", "prompt_lookup_max": 4}``; None for n-gram
            lookup with its defaults. The keys are the fields of ``workbench.speculation.Speculation``.
        attention_backend: "auto" takes the best backend of the device.
        kv_cache_dtype: Element type of the keys and values in the pool: "float32", "float16", "bfloat16",
            "int8_per_token_head" for 8 bits with a scale per token and head, or "auto" for that of the model's own,
            float32 on a CPU. A narrower one takes less memory and rounds the logits
            (``engine.describe()["preflight_bound"]``).
        batch_invariant: Give a request the same logits to the last bit whatever else is in its steps, and however its
            prompt is cut into chunks. It takes packed weights on a CPU, and makes attention of decodes slower.
        kv_cache_groups: Layers that share block tables, such as ``[{"kind": "full_attention"}, {"kind":
            "sliding_window", "sliding_window": 512}]``; None for those of the engine's model, and in a simulation for
            one group of full attention. The keys of a group are the fields of
            ``workbench.trace.kv_groups.KVCacheGroup``. With one group of full attention every layer of a model keeps
            every token.
        max_loras: Maximum number of different adapters (LoRA) among the running requests, and of those in memory; 0 for
            no limit.
        max_lora_rank: Maximum rank of an adapter.
        prefix_cache_retention_interval: Windows and states that the prefix cache keeps. 0: those at the ends of prompts
            and of shared prefixes. A number of tokens: also those at each multiple of it. "dense": all that a hit can
            use.
        seed: Seed of the requests that have none.
        shadow_metal: ``{"layer": 3, "every": 10}`` hands that layer's attention of every 10th step to the Metal
            source as well, run on the CPU in a second process with every access checked; None for off. The result
            becomes the step's supplement "shadow" (``Trace.supplement``).
        record_top_tokens: Number of most likely tokens that are recorded with each output token, with their
            probabilities before and after the sampling parameters, as the step's supplement "top_tokens"; 0 for none.

    Raises:
        ValueError: A value is outside its range; the message names field, value and range.

    Example:
        >>> config = EngineConfig(max_num_batched_tokens=256, num_blocks=128)
        >>> config.replace(max_num_seqs=4)
        EngineConfig(max_num_batched_tokens=256, max_num_seqs=4, num_blocks=128)
        >>> config.num_usable_blocks
        127
    """

    max_num_batched_tokens: int = 512
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 16
    max_num_active_seqs: int | None = None
    block_size: int = 16
    num_blocks: int | Literal["auto"] = DEFAULT_NUM_BLOCKS
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    eviction: EvictionName | Any = "lru"
    second_tier: Mapping[str, Any] | None = None
    policy: PolicyName = "fcfs"
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False
    num_speculative_tokens: int = 0
    speculative: Mapping[str, Any] | None = None
    kv_cache_groups: Sequence[Mapping[str, Any]] | None = None
    max_loras: int = 0
    max_lora_rank: int = 16
    prefix_cache_retention_interval: int | str = 0
    attention_backend: BackendName = "auto"
    kv_cache_dtype: CacheType = "auto"
    batch_invariant: bool = False
    seed: int = 0
    shadow_metal: Mapping[str, int] | None = None
    record_top_tokens: int = 0

    def __post_init__(self) -> None:
        budget = integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_TOKENS)
        seqs = integer("max_num_seqs", self.max_num_seqs, 1, MAX_INT32)
        if self.max_model_len is not None:
            self._keep(max_model_len=integer("max_model_len", self.max_model_len, 1, MAX_TOKENS))
        self._keep(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            block_size=integer("block_size", self.block_size, 1, 65536),
            **self._checked_pool(),
            enable_prefix_caching=flag("enable_prefix_caching", self.enable_prefix_caching),
            eviction=self._checked_eviction(),
            second_tier=self._checked_second_tier(),
            policy=choice("policy", self.policy, POLICIES),
            watermark=number("watermark", self.watermark, 0.0, 1.0, high_open=True),
            scheduler_reserve_full_isl=flag("scheduler_reserve_full_isl", self.scheduler_reserve_full_isl),
            long_prefill_token_threshold=integer(
                "long_prefill_token_threshold",
                self.long_prefill_token_threshold,
                0,
                self.max_model_len or MAX_TOKENS,
            ),
            long_prefill_token_threshold_adaptive=flag(
                "long_prefill_token_threshold_adaptive", self.long_prefill_token_threshold_adaptive
            ),
            attention_backend=choice("attention_backend", self.attention_backend, BACKEND_NAMES),
            kv_cache_dtype=choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            batch_invariant=flag("batch_invariant", self.batch_invariant),
            max_loras=integer("max_loras", self.max_loras, 0, MAX_LORAS),
            max_lora_rank=integer("max_lora_rank", self.max_lora_rank, 1, MAX_LORA_RANK),
            seed=integer("seed", self.seed, 0, 2**64 - 1),
            shadow_metal=self._checked_shadow_metal(),
            record_top_tokens=integer("record_top_tokens", self.record_top_tokens, 0, MAX_TOP_TOKENS),
        )
        for name, high in (("max_num_scheduled_tokens", budget), ("max_num_active_seqs", seqs)):
            if (value := getattr(self, name)) is not None:
                self._keep(**{name: integer(name, value, 1, high)})
        self._check_partial_prefills()
        self._check_steps_ahead()
        check_compatible(self, "configuration")
        self._check_groups()

    def _check_groups(self) -> None:
        """Check the KV cache groups, and refuse what vLLM's rules for them do not cover."""
        groups = self.cache_groups
        if self.kv_cache_groups is not None:
            self._keep(kv_cache_groups=[dict(group) for group in self.kv_cache_groups])
        interval, unit = self.prefix_cache_retention_interval, math.lcm(*[group.block_size for group in groups])
        if interval != "dense":
            hint = f' ("dense", or a multiple of the least common multiple of the block sizes, {unit})'
            interval = integer("prefix_cache_retention_interval", interval, 0, MAX_TOKENS, hint)
            is_of_use = any(group.kind != "full_attention" for group in groups)
            if interval and (not is_of_use or (self.enable_prefix_caching and interval % unit)):
                allowed = f'0, a multiple of {unit}, or "dense"' if is_of_use else "0 without windows and states"
                raise ValueError(f"prefix_cache_retention_interval must be {allowed}, got {interval}")
            self._keep(prefix_cache_retention_interval=interval)
        if all(group.kind == "full_attention" for group in groups) and len(groups) == 1:
            return
        if self.enable_prefix_caching and any(group.kind == "mamba" for group in groups):
            unit = math.gcd(*[group.block_size for group in groups])
            coarse = [group for group in groups if group.kind == "sliding_window" and group.block_size != unit]
            if unit < self.block_size and not coarse:
                raise ValueError(
                    f"kv_cache_groups: the block sizes have the common divisor {unit}, below the {self.block_size} of "
                    "the mamba groups, and hits inside a block of states are not implemented; give every group a "
                    f"multiple of block_size={self.block_size}"
                )

    def _check_steps_ahead(self) -> None:
        """Check asynchronous scheduling and speculation."""
        speculation = Speculation.checked(self.num_speculative_tokens, self.speculative)
        self._keep(
            async_scheduling=flag("async_scheduling", self.async_scheduling),
            num_speculative_tokens=speculation.num_tokens,
            speculative=None if self.speculative is None else dict(self.speculative),
        )
        if speculation.num_draft_slots and self.max_num_batched_tokens < 2:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} leaves no row for a token: the method "
                "'draft_model' takes one row per request for itself; use 2 or more"
            )

    def _checked_eviction(self) -> Any:
        if callable(getattr(self.eviction, "victim", None)):
            return self.eviction
        return choice("eviction", self.eviction, EVICTIONS)

    def _checked_second_tier(self) -> dict[str, Any] | None:
        if self.second_tier is None:
            return None
        names = ("num_blocks", "kv_bytes_per_token", "bandwidth", "latency")
        given = json_object("second_tier", self.second_tier, names)
        if missing := [name for name in names[:3] if name not in given]:
            raise ValueError(f"second_tier lacks {', '.join(missing)}")
        if not self.enable_prefix_caching:
            raise ValueError("second_tier is a part of the prefix cache: set enable_prefix_caching to True")
        return {
            "num_blocks": integer('second_tier["num_blocks"]', given["num_blocks"], 1),
            "kv_bytes_per_token": number('second_tier["kv_bytes_per_token"]', given["kv_bytes_per_token"], 0.0),
            "bandwidth": number('second_tier["bandwidth"]', given["bandwidth"], 0.0, low_open=True),
            "latency": number('second_tier["latency"]', given.get("latency", 0.0), 0.0),
        }

    def _checked_pool(self) -> dict[str, Any]:
        blocks, share = self.num_blocks, self.gpu_memory_utilization
        if share is not None:
            share = number("gpu_memory_utilization", share, 0.0, 1.0, low_open=True)
            if blocks not in ("auto", DEFAULT_NUM_BLOCKS):
                raise ValueError(
                    f"gpu_memory_utilization={share:g} and num_blocks={blocks} both give the size of the pool; "
                    "leave one of them out"
                )
            blocks = "auto"
        if blocks != "auto":
            hint = ' or "auto" (block 0 is never handed out: 2 is one usable block)'
            blocks = integer("num_blocks", blocks, 2, MAX_BLOCKS, hint)
        return {"num_blocks": blocks, "gpu_memory_utilization": share}

    def _check_partial_prefills(self) -> None:
        """Refuse limits that contradict each other, by name."""
        num, long = self.max_num_partial_prefills, self.max_long_partial_prefills
        self._keep(enable_chunked_prefill=flag("enable_chunked_prefill", self.enable_chunked_prefill))
        if num is not None:
            hint = " (each of them gets at least one token of the budget in every step)"
            num = integer("max_num_partial_prefills", num, 1, self.token_budget, hint)
        if long is not None:
            hint = "" if num is None else " (max_num_partial_prefills, which counts long ones too)"
            long = integer("max_long_partial_prefills", long, 1, num or MAX_INT32, hint)
        self._keep(max_num_partial_prefills=num, max_long_partial_prefills=long)
        if self.enable_chunked_prefill:
            return
        if (self.max_model_len or 0) > self.token_budget:
            raise ValueError(
                f"max_model_len={self.max_model_len} is over the token budget of {self.token_budget}: with "
                "enable_chunked_prefill=False a prompt has to fit into one step; raise max_num_batched_tokens"
            )

    def _checked_shadow_metal(self) -> dict[str, int] | None:
        if self.shadow_metal is None:
            return None
        if not isinstance(self.shadow_metal, Mapping) or set(self.shadow_metal) - {"layer", "every"}:
            raise ValueError(
                f'shadow_metal must be None or like {{"layer": 0, "every": 10}}, got {self.shadow_metal!r}'
            )
        return {
            "layer": integer('shadow_metal["layer"]', self.shadow_metal.get("layer", 0), 0, MAX_INT32),
            "every": integer('shadow_metal["every"]', self.shadow_metal.get("every", 1), 1, MAX_INT32),
        }

    @cached_property
    def speculation(self) -> Speculation:
        """``num_speculative_tokens`` and ``speculative`` with all defaults."""
        return Speculation.checked(self.num_speculative_tokens, self.speculative)

    @cached_property
    def cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """``kv_cache_groups`` with all defaults."""
        return read_groups(self.to_dict())

    @property
    def token_budget(self) -> int:
        """Tokens the scheduler may hand out in a step."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def longest_chunk(self) -> int:
        """Maximum number of tokens of one request in a step: the budget, less the row of the proposer of drafts."""
        return min(self.token_budget, self.max_num_batched_tokens - self.speculation.num_draft_slots)

    @property
    def num_pool_blocks(self) -> int:
        """KV blocks of the pool as a number.

        Raises:
            ValueError: ``num_blocks`` is "auto", and no model has been loaded that it could follow from.
        """
        if self.num_blocks == "auto":
            raise ValueError('num_blocks is "auto", which needs a model to follow from; give a number of blocks here')
        return self.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """KV blocks that can hold tokens: all but the null block 0."""
        return self.num_pool_blocks - 1

    def replace(self, **changes: Unpack[ConfigChanges]) -> EngineConfig:
        """A copy with some fields changed, checked like a new one.

        Raises:
            ValueError: An unknown field, or a value outside its range.
        """
        return self.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as JSON can hold them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """A configuration from names and values; None stands for the default.

        Raises:
            ValueError: An unknown field, or a value outside its range.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                hint = did_you_mean(name, known, "help(EngineConfig)")
                raise FieldError(f"unknown EngineConfig field {name!r}{hint}")
        return cls(**{name: value for name, value in values.items() if value is not None})


@_suggesting
@dataclass(frozen=True, repr=False)
class SamplingParams(_Frozen):
    """Parameters by which the tokens of one request are chosen and by which it ends.

    Attributes:
        max_tokens: Maximum number of output tokens.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 or -1 for all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this.
        min_p: Drop tokens less likely than this fraction of the most likely one.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt and output.
        presence_penalty: Taken from the logit of every token seen in the output.
        frequency_penalty: Taken from the logit once for each time the token was seen in the output.
        logit_bias: Added to the logits of these token ids.
        stop: Strings that end the output.
        stop_token_ids: Tokens that end the output.
        ignore_eos: Continue after the model's end-of-sequence token.
        logprobs: Also report this many log-probabilities per token; None for none.
        prompt_logprobs: The same for each token of the prompt, which then takes nothing from the prefix cache.
        seed: Seed of this request; None takes the engine's.
        sampler: Chooses the token instead of temperature, top_k, top_p and min_p: a callable as mlx-lm's
            ``make_sampler`` returns.
        logits_processors: Callables as mlx-lm's ``make_logits_processors`` returns, applied in order.
        structured_outputs: The form of the output, by one of vLLM's words: {"json": schema}, {"json_object": True},
            {"regex": expression}, {"choice": texts} or {"grammar": a Lark or GBNF grammar}; empty for any output.
        skip_special_tokens: Leave special tokens out of the text. Text that ordinary tokens spell is never left out.
        spaces_between_special_tokens: Keep the spaces that a tokenizer puts between special tokens.
        visible_token_ids: Special tokens that are part of the text in any case.

    Raises:
        ValueError: A value is outside its range; the message names field, value and range.

    Example:
        >>> SamplingParams(max_tokens=64, temperature=0.7, top_p=0.95, stop="END")
        SamplingParams(max_tokens=64, temperature=0.7, top_p=0.95, stop=('END',))
        >>> SamplingParams(temperature=0.7).replace(seed=3)
        SamplingParams(temperature=0.7, seed=3)
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    sampler: Callable[..., Any] | None = None
    logits_processors: Sequence[Callable[..., Any]] = ()
    structured_outputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    visible_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._keep(
            max_tokens=integer("max_tokens", self.max_tokens, 1, MAX_INT32),
            temperature=computable("temperature", number("temperature", self.temperature, 0.0), zero_means="greedy"),
            top_k=max(0, integer("top_k", self.top_k, -1, MAX_INT32, " (0 or -1 keeps all tokens)")),
            top_p=number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            min_p=number("min_p", self.min_p, 0.0, 1.0),
            repetition_penalty=computable(
                "repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0.0, low_open=True)
            ),
            presence_penalty=number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            frequency_penalty=number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            logit_bias=self._checked_logit_bias(),
            stop=self._checked_stop(),
            stop_token_ids=tuple(
                integer(f"stop_token_ids[{i}]", token, 0, MAX_INT32)
                for i, token in enumerate(items("stop_token_ids", self.stop_token_ids, "token ids"))
            ),
            ignore_eos=flag("ignore_eos", self.ignore_eos),
            logits_processors=tuple(items("logits_processors", self.logits_processors, "callables")),
            structured_outputs=self._checked_structured_outputs(),
            skip_special_tokens=flag("skip_special_tokens", self.skip_special_tokens),
            spaces_between_special_tokens=flag("spaces_between_special_tokens", self.spaces_between_special_tokens),
            visible_token_ids=tuple(
                integer(f"visible_token_ids[{i}]", token, 0, MAX_INT32)
                for i, token in enumerate(items("visible_token_ids", self.visible_token_ids, "token ids"))
            ),
        )
        if self.logprobs is not None:
            self._keep(logprobs=integer("logprobs", self.logprobs, 0, MAX_INT32))
        if self.prompt_logprobs is not None:
            self._keep(prompt_logprobs=integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_INT32))
        if self.seed is not None:
            self._keep(seed=integer("seed", self.seed, 0, 2**64 - 1))
        if self.sampler is not None and not callable(self.sampler):
            raise ValueError(f"sampler must be callable, got {self.sampler!r}")
        for i, processor in enumerate(self.logits_processors):
            if not callable(processor):
                raise ValueError(f"logits_processors[{i}] must be callable, got {processor!r}")

    def _checked_logit_bias(self) -> dict[int, float]:
        if self.logit_bias is None:
            return {}
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        return {
            integer("logit_bias token id", token, 0, MAX_INT32): number(f"logit_bias[{token}]", bias, -100, 100)
            for token, bias in self.logit_bias.items()
        }

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(items("stop", self.stop, "strings"))
        for i, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop[{i}] must be a string that is not empty, got {text!r}")
        return stop

    def _checked_structured_outputs(self) -> dict[str, Any]:
        given = self.structured_outputs or {}
        if not isinstance(given, Mapping) or len(given) > 1 or not set(given) <= set(STRUCTURED_OUTPUTS):
            words = ", ".join(STRUCTURED_OUTPUTS)
            raise ValueError(f"structured_outputs must hold one of {words}, got {shown(given)}")
        for kind, value in given.items():
            field, is_valid = f"structured_outputs[{kind!r}]", isinstance(value, STRUCTURED_OUTPUTS[kind])
            if kind == "choice":
                is_valid = is_valid and len(value) > 0 and all(isinstance(text, str) for text in value)
            if not is_valid or (kind == "json_object" and not value):
                raise ValueError(f"{field} must be {_STRUCTURED_FORMS[kind]}, got {shown(value)}")
            if self.ignore_eos:
                raise ValueError(
                    f"{field} does not work with ignore_eos=True: the output ends with the token that it would ignore"
                )
        return dict(given)

    def replace(self, **changes: Unpack[SamplingFields]) -> SamplingParams:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    def non_default(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as JSON can hold them (callables by their repr)."""
        return {name: _jsonable(value) for name, value in self._changed().items()}


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return repr(value) if callable(value) else value


def field_names() -> frozenset[str]:
    """The names of all fields of both configurations."""
    return frozenset(field.name for kind in (EngineConfig, SamplingParams) for field in fields(kind))
