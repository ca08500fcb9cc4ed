"""From a prompt to token ids, and checks of requests and of the configuration before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from workbench.base.cache_salt import check_salt
from workbench.config import EngineConfig, SamplingParams
from workbench.models.load import LoadedModel
from workbench.models.template_losses import check_shown
from workbench.models.tokenizer import with_special_tokens
from workbench.scheduler.admission import check_servable


class TokensPrompt(TypedDict):
    """vLLM's: a prompt that has been tokenized, and perhaps its text, which the trace shows."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


def make_config(config: EngineConfig | Mapping[str, Any] | None, changes: Mapping[str, Any]) -> EngineConfig:
    """The configuration an engine was given, with fields by name on top of it.

    Raises:
        ValueError: ``config`` is something else, a field is unknown, or a value is outside its range.
    """
    if config is None or isinstance(config, Mapping):
        config = EngineConfig.from_dict(config or {})
    if not isinstance(config, EngineConfig):
        raise ValueError(
            f"config must be an EngineConfig, got {config!r}; fields can also be given by name, such as "
            "max_num_batched_tokens=64"
        )
    return config.replace(**changes) if changes else config


def resolve_config(config: EngineConfig, model: LoadedModel) -> EngineConfig:
    """The configuration with ``max_model_len`` set from the model, or checked against it.

    Raises:
        ValueError: max_model_len is longer than the model's context.
    """
    if config.max_model_len is None:
        return config.replace(max_model_len=model.max_position)
    if config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len={config.max_model_len} is longer than the context of {model.name!r} "
            f"({model.max_position} tokens): use a value from 2 to {model.max_position}, or leave it out"
        )
    return config


def process_input(
    prompt: Any,
    sampling: SamplingParams,
    config: EngineConfig,
    model: LoadedModel,
    *,
    request_id: str | None,
    priority: int,
    cache_salt: str,
    projects_in_slices: bool = False,
) -> tuple[str, list[int]]:
    """Check a request, and return its prompt as text ("" when it was given as token ids) and as token ids.

    Raises:
        ValueError: See ``Engine.add_request``.
    """
    text, token_ids = tokenize_prompt(prompt, model.tokenizer)
    check_prompt(token_ids, sampling, config, model)
    if sampling.prompt_logprobs is not None and not projects_in_slices:
        _check_logits(config, model)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    check_salt("cache_salt", cache_salt)
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise ValueError(f"request_id must be a string that is not empty, got {request_id!r}")
    return text, token_ids


def tokenize_prompt(prompt: Any, tokenizer: Any) -> tuple[str, list[int]]:
    """The prompt as text and as token ids.

    Args:
        prompt: Text, token ids, chat messages, or a TokensPrompt.
        tokenizer: The model's tokenizer, or None.

    Raises:
        ValueError: The prompt is none of these, is empty, or is text and there is no tokenizer.
    """
    given, text = type(prompt).__name__, ""
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - set(TokensPrompt.__annotations__):
            raise ValueError(f"prompt may hold prompt_token_ids and prompt, got {min(unknown, key=str)!r}")
        text, prompt = prompt.get("prompt", ""), prompt.get("prompt_token_ids", ())
    if hasattr(prompt, "tolist"):  # an array of numpy or MLX, or a number of theirs
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise ValueError(f"prompt must be a str, a list of token ids or a list of chat messages, got {given}")
    if len(prompt) == 0:
        raise ValueError("prompt is empty: give at least one token")
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        if tokenizer is None:
            raise ValueError("prompt is text but the model came without a tokenizer: give a list of token ids")
        text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(list(prompt))
        if not isinstance(prompt, str):
            check_shown(prompt, text, tokenizer.apply_chat_template)
        token_ids = tokenizer.encode(text)
        if isinstance(prompt, str):
            token_ids = with_special_tokens(tokenizer, token_ids)
        if not token_ids:
            raise ValueError("prompt has no tokens: the tokenizer turned the text into nothing")
        return text, token_ids
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ValueError(f"prompt[{index}]={token!r} is not a token id: token ids are integers")
    return text, [int(token) for token in prompt]


def check_prompt(token_ids: list[int], sampling: SamplingParams, config: EngineConfig, model: LoadedModel) -> None:
    """Reject a request that could never be served.

    Raises:
        ValueError: Naming the field, its value and the limit.
    """
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling must be a SamplingParams, got {type(sampling).__name__}")
    limit = config.max_model_len or model.max_position
    if len(token_ids) >= limit:
        raise ValueError(
            f"prompt has {len(token_ids)} tokens; max_model_len={limit} leaves room for {limit - 1} and one "
            "output token: shorten the prompt or raise max_model_len"
        )
    for index, token in enumerate(token_ids):
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"prompt[{index}]={token} is outside the vocabulary: 0 to {model.vocab_size - 1}")
    for field in ("logit_bias", "stop_token_ids"):
        for token in getattr(sampling, field) or ():
            if not 0 <= token < model.vocab_size:
                raise ValueError(f"{field} holds token {token}, outside the vocabulary: 0 to {model.vocab_size - 1}")
    if sampling.stop and model.tokenizer is None:
        raise ValueError("stop needs a tokenizer, and the model came without one: use stop_token_ids")
    check_servable(config, len(token_ids), sampling.max_tokens)


def _check_logits(config: EngineConfig, model: LoadedModel) -> None:
    """Reject the logits of whole prompts that would be too large together."""
    from workbench.engine.prompt_logprobs import MAX_LOGITS_BYTES

    num_bytes = 4 * config.max_num_batched_tokens * model.vocab_size
    if num_bytes > MAX_LOGITS_BYTES:
        allowed = MAX_LOGITS_BYTES // (4 * model.vocab_size)
        raise ValueError(
            f"prompt_logprobs projects every row of a step, {num_bytes >> 20:,} MiB of logits with "
            f"max_num_batched_tokens={config.max_num_batched_tokens}: lower it to {allowed}"
        )
