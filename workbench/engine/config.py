"""What a person may configure: the engine (`EngineConfig`) and one request (`SamplingParams`).

Both are frozen and checked when they are made, so nothing behind them checks again. Names are vLLM's. A value
that cannot work is refused with the field, the value, the allowed range and what to do about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from workbench.attention.backend import BACKEND_NAMES
from workbench.engine.field_checks import MAX_INT32, choice, flag, integer, items, number
from workbench.trace.bounds import MAX_BLOCKS, MAX_TOKENS

POLICIES = ("fcfs", "priority")


class _Frozen:
    """What both configurations share: keeping checked values, listing what differs from the defaults."""

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


@dataclass(frozen=True, repr=False)
class EngineConfig(_Frozen):
    """How an engine schedules, how much KV cache it has and which attention backend it runs.

    Attributes:
        max_num_batched_tokens: Token budget of a step: rows of the packed batch at most.
        max_num_scheduled_tokens: Token budget of the scheduler where it is to stay below
            ``max_num_batched_tokens``; None for the same.
        max_num_seqs: Running requests at most.
        max_num_active_seqs: A lower limit on running requests than ``max_num_seqs``; None for the same.
        block_size: Tokens per KV block.
        num_blocks: KV blocks of the pool. Block 0 is never handed out, so ``num_blocks - 1`` can be used.
        max_model_len: Longest sequence in tokens, prompt and output; None for the model's own limit.
        enable_prefix_caching: Find KV blocks of an equal prefix instead of computing them again.
        policy: Order of the waiting queue: "fcfs", or "priority" (smaller first, then time of arrival).
        watermark: Fraction of the pool that stays free when a request is admitted while others run.
        scheduler_reserve_full_isl: Admit a request only when all of its tokens fit into free blocks now;
            False asks that of its first chunk only.
        long_prefill_token_threshold: With both limits on partial prefills off, tokens of one request in a step at
            most while others run or wait; 0 for no cap. With a limit on, a prompt is long while more than this
            many of its tokens are neither cached nor computed; 0 for the token budget.
        long_prefill_token_threshold_adaptive: Raise that cap to the fair share
            ``max_num_batched_tokens // requests``.
        max_num_partial_prefills: Prompts guaranteed to progress in every step, the budget shared out among them;
            None for off (``workbench.engine.partial_prefills``).
        max_long_partial_prefills: How many prompts in progress may be long; None for no limit.
        enable_chunked_prefill: Split prompts over steps; False computes each prompt in one step.
        attention_backend: "auto" takes the best backend of the device.
        seed: Seed of the requests that have none of their own.
        shadow_metal: ``{"layer": 3, "every": 10}`` hands that layer's attention of every 10th step to the Metal
            source as well, run on the CPU in a second process with every access checked; None for off. The result
            comes back into the step's record (``kernel.details["shadow"]``).

    Raises:
        ValueError: A value is outside its range; the message names field, value and range.
    """

    max_num_batched_tokens: int = 512
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 16
    max_num_active_seqs: int | None = None
    block_size: int = 16
    num_blocks: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    enable_chunked_prefill: bool = True
    attention_backend: str = "auto"
    seed: int = 0
    shadow_metal: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        budget = integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_TOKENS)
        seqs = integer("max_num_seqs", self.max_num_seqs, 1, MAX_INT32)
        if self.max_model_len is not None:
            self._keep(max_model_len=integer("max_model_len", self.max_model_len, 1, MAX_TOKENS))
        self._keep(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            block_size=integer("block_size", self.block_size, 1, 65536),
            num_blocks=integer(
                "num_blocks",
                self.num_blocks,
                2,
                MAX_BLOCKS,
                " (block 0 is never handed out: 2 is one usable block)",
            ),
            enable_prefix_caching=flag("enable_prefix_caching", self.enable_prefix_caching),
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
            seed=integer("seed", self.seed, 0, 2**64 - 1),
            shadow_metal=self._checked_shadow_metal(),
        )
        for name, high in (("max_num_scheduled_tokens", budget), ("max_num_active_seqs", seqs)):
            if (value := getattr(self, name)) is not None:
                self._keep(**{name: integer(name, value, 1, high)})
        self._check_partial_prefills()

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
        for name, most in (("max_num_partial_prefills", 1), ("long_prefill_token_threshold", 0)):
            if (value := getattr(self, name) or 0) > most:
                raise ValueError(
                    f"{name}={value} splits prompts over steps, which enable_chunked_prefill=False forbids: "
                    f"use at most {most}, or turn chunked prefill on"
                )
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

    @property
    def token_budget(self) -> int:
        """Tokens the scheduler may hand out in a step."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def num_usable_blocks(self) -> int:
        """KV blocks that can hold tokens: all but the null block 0."""
        return self.num_blocks - 1

    def replace(self, **changes: Any) -> EngineConfig:
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
                raise ValueError(f"unknown EngineConfig field {name!r}; the fields are {', '.join(known)}")
        return cls(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, repr=False)
class SamplingParams(_Frozen):
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_tokens: Output tokens at most.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 or -1 for all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this.
        min_p: Drop tokens less likely than this fraction of the most likely one.
        repetition_penalty: Divides (multiplies, where negative) the logits of tokens in prompt and output.
        presence_penalty: Taken from the logit of every token seen in the output.
        frequency_penalty: Taken from the logit once for each time the token was seen in the output.
        logit_bias: Added to the logits of these token ids.
        stop: Strings that end the output.
        stop_token_ids: Tokens that end the output.
        ignore_eos: Go on after the model's end-of-sequence token.
        logprobs: Also report this many log-probabilities per token; None for none.
        seed: Seed of this request; None takes the engine's.
        sampler: Chooses the token instead of temperature, top_k, top_p and min_p: a callable as mlx-lm's
            ``make_sampler`` returns.
        logits_processors: Callables as mlx-lm's ``make_logits_processors`` returns, applied in order.

    Raises:
        ValueError: A value is outside its range; the message names field, value and range.
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
    seed: int | None = None
    sampler: Callable[..., Any] | None = None
    logits_processors: Sequence[Callable[..., Any]] = ()

    def __post_init__(self) -> None:
        self._keep(
            max_tokens=integer("max_tokens", self.max_tokens, 1, MAX_INT32),
            temperature=number("temperature", self.temperature, 0.0),
            top_k=max(0, integer("top_k", self.top_k, -1, MAX_INT32, " (0 or -1 keeps all tokens)")),
            top_p=number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            min_p=number("min_p", self.min_p, 0.0, 1.0),
            repetition_penalty=number("repetition_penalty", self.repetition_penalty, 0.0, low_open=True),
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
        )
        if self.logprobs is not None:
            self._keep(logprobs=integer("logprobs", self.logprobs, 0, MAX_INT32))
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

    def replace(self, **changes: Any) -> SamplingParams:
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
