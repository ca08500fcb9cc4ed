"""The shapes of answers: OpenAI's objects, with vLLM's additions. Answers are dicts; these say what is in them."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    """Where the prompt's KV came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion's tokens, and of the most likely tokens in their places."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One answer to a prompt, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Answer of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


class TokenLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int]


class SampledTokenLogprob(TokenLogprob):
    """A sampled token, and the most likely tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a message's tokens."""

    content: list[SampledTokenLogprob]


class AssistantMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageDelta(TypedDict):
    """What is new of a message; the role comes first and once."""

    role: NotRequired[Literal["assistant"]]
    content: str


class ChatChunkChoice(TypedDict):
    """What is new of one answer."""

    index: int
    delta: MessageDelta
    logprobs: NotRequired[ChatLogprobs | None]
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """Each event of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]


class Model(TypedDict):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["workbench"]
    max_model_len: int | None


class ModelList(TypedDict):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int | None


class Health(TypedDict):
    """Answer of /health."""

    status: Literal["ok", "draining"]


class ErrorDetails(TypedDict):
    """What was wrong and what to do; the field of the request that was wrong, where it is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Answer of every address to what it refuses."""

    error: ErrorDetails
