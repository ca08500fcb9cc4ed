"""OpenAI's request bodies, checked field by field, and the sampling that they ask the engine for.

The structs are the fields that are read; `unread_fields` has the rules for all others. Fields marked as vLLM's are its
additions to OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from workbench.apps.serve.call_forms import CallForm
from workbench.apps.serve.channels import ChannelForm, has_channels
from workbench.apps.serve.conversation import Messages, ReasoningEffort, TemplateKwargs, encode, render_conversation
from workbench.apps.serve.errors import ApiError
from workbench.apps.serve.stream import Echo
from workbench.apps.serve.structured import ResponseFormat, StructuredOutputs, constraint_of
from workbench.apps.serve.tools import MAX_TOOLS, Tool, ToolChoice
from workbench.apps.serve.unread_fields import RefusedFieldError, without_unread
from workbench.base.outside_files import TwoValuesError, json_value
from workbench.config import SamplingParams
from workbench.models.tokenizer import Tokenizer

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 4
"""OpenAI's limit."""
MAX_STOP_LENGTH = 1024
"""In characters."""
MAX_LOGIT_BIAS = 1024
"""vLLM's limit (``MAX_NUM_LOGIT_BIAS_TOKENS``)."""
MAX_STOP_TOKEN_IDS = 128
"""vLLM's limit (``MAX_NUM_STOP_TOKEN_IDS``)."""
MAX_LOGPROBS = 20
MAX_DETOKENIZED = 65_536
"""Maximum number of tokens whose text is asked for: a token may have hundreds of characters."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
# Here, the limits of lists are for the description of the API: ``_check_size``, which says what was sent, checks them.
StopString = Annotated[str, msgspec.Meta(extra_json_schema={"maxLength": MAX_STOP_LENGTH})]
Stop = StopString | Annotated[list[StopString], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOPS})] | None
LogitBias = Annotated[dict[str, float], msgspec.Meta(extra_json_schema={"maxProperties": MAX_LOGIT_BIAS})]
StopTokenIds = Annotated[list[int], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOP_TOKEN_IDS})]


Tools = Annotated[list[Tool], msgspec.Meta(extra_json_schema={"maxItems": MAX_TOOLS})] | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions and chat completions have in common."""

    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stop: Stop = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    @property
    def contains(self) -> Echo:
        """The contents of an answer."""
        return "output"

    def common_sampling(self, max_tokens: int, logprobs: int | None) -> list[SamplingParams]:
        """Sampling of each of the n choices; if there is a seed, choice i uses seed + i.

        Raises:
            ValueError: A value is outside its range.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        _check_size("stop", stops, MAX_STOPS, "strings")
        for i, text in enumerate(stops):
            _check_size(f"stop[{i}]", text, MAX_STOP_LENGTH, "characters")
        _check_size("stop_token_ids", self.stop_token_ids or [], MAX_STOP_TOKEN_IDS, "token ids")
        _check_size("logit_bias", self.logit_bias or {}, MAX_LOGIT_BIAS, "token ids")
        fields: dict[str, Any] = {
            name: value
            for name in (
                "top_p", "presence_penalty", "frequency_penalty", "stop", "top_k", "min_p", "repetition_penalty",
                "ignore_eos", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        # OpenAI's default, not the engine's.
        fields["temperature"] = 1.0 if self.temperature is None else self.temperature
        if self.logit_bias is not None:
            fields["logit_bias"] = {_token_id(name): bias for name, bias in self.logit_bias.items()}
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs does not work with stream=true: ask for the whole answer")
        fields["prompt_logprobs"] = self.prompt_logprobs
        fields["structured_outputs"] = constraint_of(self.response_format, self.structured_outputs)
        options = self.stream_options
        if options is not None and not self.stream and (options.include_usage or options.continuous_usage_stats):
            raise ValueError("stream_options needs stream=true: an answer that comes whole has its usage")
        base = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)
        if self.seed in (None, -1):  # -1 is vLLM's other word for none
            return [base] * (self.n or 1)
        return [base.replace(seed=(self.seed + i) % 2**64) for i in range(self.n or 1)]


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of /v1/completions."""

    prompt: (
        str
        | Annotated[
            list[int | str | TokenIds],
            msgspec.Meta(min_length=1, description="Token ids, or a list of prompts."),
        ]
    )
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # vLLM's

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one.

        Raises:
            ApiError: The list mixes kinds.
            ValueError: The list is too long.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if len({type(item) for item in self.prompt}) > 1:
            raise ApiError(
                400, "prompt must be a list of token ids, of texts, or of lists of token ids", param="prompt"
            )
        if token_ids := [item for item in self.prompt if isinstance(item, int)]:
            return [token_ids]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        _check_size("prompt", prompts, MAX_PROMPTS, "prompts")
        return prompts

    def sampling(self) -> list[SamplingParams]:
        """Sampling of each choice. OpenAI's default is 16 tokens."""
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, f"best_of={self.best_of} must equal n: all choices are returned", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens=0 needs echo=true: the answer would be empty", param="max_tokens")
        max_tokens = 16 if self.max_tokens is None else max(1, self.max_tokens)
        sampling = self.common_sampling(max_tokens, self.logprobs)
        if not self.echo or self.prompt_logprobs is not None:
            return sampling
        return [params.replace(prompt_logprobs=self.logprobs) for params in sampling]

    @property
    def contains(self) -> Echo:
        """The contents of an answer. As in vLLM, a prompt alone samples a token, which is left out."""
        return ("prompt" if self.max_tokens == 0 else "both") if self.echo else "output"


class ChatRequest(SamplingFields, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    tools: Tools = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # vLLM's.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None

    def sampling(self, default_max_tokens: int) -> list[SamplingParams]:
        """Sampling of each choice."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        max_tokens = self.max_completion_tokens or self.max_tokens or default_max_tokens
        return self.common_sampling(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)

    def call_form(self, tokenizer: Tokenizer | None, prompt: str) -> CallForm | None:
        """The form of calls in the answer to a prompt; None if there are none.

        Raises:
            ValueError: A choice without tools, or tools that the template does not show; see also `tool_dicts`.
        """
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise ValueError("tool_choice needs tools")
            return None
        if tokenizer is None:
            raise ValueError("tools need a tokenizer, and the model came without one")
        kind = ChannelForm if has_channels(tokenizer) else CallForm
        form = kind.of(tokenizer, tool_dicts(self.tools) or [], prompt)
        return None if self.tool_choice == "none" else form


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of /tokenize (vLLM's): a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    tools: Tools = None

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids, as the completions of the same prompt or messages have them.

        Raises:
            ApiError: There are both a prompt and messages, or neither.
            ValueError: See `render_conversation`.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if self.messages is not None:
            return render_conversation(self.messages, self, tokenizer, tool_dicts(self.tools))[1]
        assert self.prompt is not None
        for field in (
            "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "tools",
        ):  # fmt: skip
            if getattr(self, field) not in (None, []):
                raise ValueError(f"{field} needs messages, got a prompt")
        return encode(self.prompt, tokenizer, add_special_tokens=self.add_special_tokens is not False)


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of /detokenize (vLLM's)."""

    model: str | None = None
    tokens: Annotated[list[TokenId], msgspec.Meta(extra_json_schema={"maxItems": MAX_DETOKENIZED})]

    def text(self, tokenizer: Tokenizer) -> str:
        """Text of the tokens.

        Raises:
            ValueError: There are too many, or one is outside the vocabulary.
        """
        _check_size("tokens", self.tokens, MAX_DETOKENIZED, "token ids")
        for index, token in enumerate(self.tokens):
            if token >= tokenizer.vocab_size:
                raise ValueError(f"tokens[{index}]={token} is outside the vocabulary: 0 to {tokenizer.vocab_size - 1}")
        return tokenizer.decode(self.tokens)


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """The body of a request, checked.

    Raises:
        ApiError: Status 400; the message names the field.
    """
    try:
        values = msgspec.json.decode(raw)
        if isinstance(values, dict):
            json_value(raw, "the body is not valid")  # refuses two values of one name
            values = without_unread(values, frozenset(kind.__struct_fields__), other_fields(kind))
        return msgspec.convert(values, kind)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except RefusedFieldError as problem:
        raise ApiError(400, str(problem), param=problem.field) from None
    except TwoValuesError as problem:
        raise ApiError(400, str(problem), param=problem.name) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ApiError(400, f"the body is not valid: {problem}", param=_field_in(str(problem))) from None
    except ValueError as problem:
        raise ApiError(400, str(problem)) from None


def tool_dicts(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as chat templates expect them; None without.

    Raises:
        ValueError: There are too many, or two have the same name.
    """
    if not tools:
        return None
    _check_size("tools", tools, MAX_TOOLS, "tools")
    if len({tool.function.name for tool in tools}) < len(tools):
        raise ValueError("tools: two have the same name")
    return [{"function": msgspec.to_builtins(tool.function), "type": tool.type} for tool in tools]


def other_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields that other kinds of bodies have, and one kind does not."""
    kinds = CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest
    return frozenset(name for each in kinds for name in each.__struct_fields__) - {*kind.__struct_fields__}


def field_of(message: str, kind: type[msgspec.Struct]) -> str | None:
    """The field that a message of the engine begins with, None if the body has no such field."""
    match = re.match(r"\w+", message)
    return match[0] if match and match[0] in kind.__struct_fields__ else None


def _field_in(message: str) -> str | None:
    match = re.search(r"\$\.([\w.\[\]]+)|unknown field `(\w+)`|missing required field `(\w+)`", message)
    return next((group for group in match.groups() if group), None) if match else None


def _check_size(field: str, value: Sized, limit: int, unit: str) -> None:
    if len(value) > limit:
        raise ValueError(f"{field} holds {len(value)} {unit}: allowed are up to {limit}")


def _token_id(name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", name):
        raise ValueError(f"logit_bias must have token ids as its keys, got {name[:40]!r}")
    return int(name)
