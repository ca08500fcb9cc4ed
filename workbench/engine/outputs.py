"""What a request gave back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RequestOutput:
    """The output of one request, finished or so far.

    Attributes:
        request_id: The request.
        prompt: The prompt as text, "" when it was given as token ids.
        prompt_token_ids: The prompt.
        token_ids: Sampled tokens, an end-of-sequence token included.
        text: Their text, without the end-of-sequence token and without a stop string that ended it.
        finish_reason: "length", "stop", "error" or "abort"; None while the request runs.
        logprobs: One {token_id: log-probability} per token when SamplingParams(logprobs=k) asked, else None.
        error: What went wrong, when finish_reason is "error".
    """

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[dict[int, float], ...] | None = field(default=None, repr=False)
    error: str = ""

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.finish_reason is not None
