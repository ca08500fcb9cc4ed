"""Types of answers: OpenAI's objects, with vLLM's additions. Answers are dicts; these describe their items."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    """Source of the prompt's KV."""

    cached_tokens: int


class Usage(TypedDict):
    """Numbers of tokens in the prompt and in the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion's tokens, and of the most likely tokens at the same positions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """A token at a place of the prompt: its log-probability, and its rank among all tokens."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt the likely tokens and itself by token id; null for the first."""


class CompletionChoice(TypedDict):
    """One answer to a prompt, or its next part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


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
    """A sampled token, and the most likely tokens at the same position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a message's tokens."""

    content: list[SampledTokenLogprob]


class CalledFunction(TypedDict):
    """A function that the model calls, and its arguments as JSON; in a stream the next part of them."""

    name: NotRequired[str]
    arguments: str


class CalledTool(TypedDict):
    """A call; in a stream its first part has the id and the name, and each part its index."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The model's message; it has no content if it calls tools without a word. Its reasoning has two names."""

    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


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
    prompt_logprobs: NotRequired[PromptLogprobs]


class MessageDelta(TypedDict):
    """Next part of a message; only the first part has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class ChatChunkChoice(TypedDict):
    """Next part of one answer."""

    index: int
    delta: MessageDelta
    logprobs: NotRequired[ChatLogprobs | None]
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """One event of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]


class Model(TypedDict):
    """The served model, or an adapter, whose parent it is."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["workbench"]
    max_model_len: int | None
    parent: NotRequired[str]


class ModelList(TypedDict):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int | None


class DetokenizedText(TypedDict):
    """Answer of /detokenize."""

    prompt: str


class Version(TypedDict):
    """Answer of /version."""

    version: str


class GrammarAtWork(TypedDict):
    """A grammar that is being compiled, or waits for it: its word in structured_outputs, its size and its time."""

    kind: str
    characters: int
    seconds: float
    state: Literal["waiting", "compiling"]


class Health(TypedDict):
    """Answer of /health; ``error`` is the first line of the last error while the last steps all raised."""

    status: Literal["ok", "draining", "failing"]
    error: NotRequired[str]
    grammars: NotRequired[list[GrammarAtWork]]


class ErrorDetails(TypedDict):
    """The problem and its solution; ``param`` is the field of the request that is wrong, if it is one field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Answer of every address to a request that it rejects."""

    error: ErrorDetails
