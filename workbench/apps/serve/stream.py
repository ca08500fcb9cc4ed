"""One request as the server sees it, and what each step adds to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from workbench.config import SamplingParams

if TYPE_CHECKING:
    from workbench.engine.output_processor import RequestOutput


Echo = Literal["output", "both", "prompt"]
"""The contents of an answer."""


@dataclass(frozen=True)
class Delta:
    """Tokens and text that one step added to a request.

    Attributes:
        token_ids: Sampled tokens, behind those of the prompt in the first delta of a request with ``echo``.
        text: Their text, up to a possible beginning of a stop string.
        logprobs: One {token_id: log-probability} per token, if the request asks for them; None for the first token of
            a prompt.
        finish_reason: "length", "stop", "error" or "abort" in a request's last delta, else None.
        error: The error message if finish_reason is "error".
        num_echoed: Number of tokens that are the prompt's.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[dict[int, float] | None, ...] = ()
    finish_reason: str | None = None
    error: str = ""
    num_echoed: int = 0


class Stream:
    """One request as the server sees it; ``async for delta in stream`` ends with the request.

    Args:
        request_id: The engine's request id.
        sampling: Sampling of the request.
        echo: The contents of the answer: the output alone, both, or the prompt alone.
    """

    def __init__(self, request_id: str, sampling: SamplingParams, echo: Echo = "output") -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.output: RequestOutput | None = None  # when it has ended
        self.deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self.ended = False
        # Only the engine's thread uses the following attributes.
        self._echo: Echo = echo
        self._held_back = max((len(stop) for stop in sampling.stop), default=1) - 1
        self._text = ""
        self._sent = 0
        self._num_logprobs = 0

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self.ended:
            raise StopAsyncIteration
        delta = await self.deltas.get()
        self.ended = delta.finish_reason is not None
        return delta

    def advance(
        self, token_ids: tuple[int, ...], text: str, output: Callable[[], RequestOutput], reason: str | None
    ) -> Delta:
        """The delta of a step; called on the engine's thread.

        Args:
            token_ids: Sampled tokens: none, one, or with speculative decoding more.
            text: Text that they added.
            output: Gives the request's output so far; called only if needed, because it takes time.
            reason: Finish reason of a request that ended with this step, else None.
        """
        self._text += text
        logprobs: tuple[dict[int, float], ...] = ()
        current = output() if reason is not None or self.sampling.logprobs is not None else None
        if current is not None and current.logprobs is not None:
            logprobs = current.logprobs[self._num_logprobs :]
            self._num_logprobs = len(current.logprobs)
        if reason is not None and current is not None:
            # The engine's text ends before a stop string, and with the bytes of an incomplete character.
            self._text, self.output = current.text, current
        upto = len(self._text) - (0 if reason is not None else self._held_back)
        upto = max(self._sent, upto)
        new, self._sent = self._text[self._sent : upto], upto
        delta = Delta(token_ids, new, logprobs, reason, current.error if current is not None else "")
        if self._echo == "output" or delta.error:
            return delta
        return self._with_prompt(delta, current or output())

    def _with_prompt(self, delta: Delta, output: RequestOutput) -> Delta:
        """The first delta of a request with the prompt in front of it, or instead of it."""
        if self._echo == "prompt":
            delta = Delta(finish_reason=delta.finish_reason)
        self._echo = "output"
        return replace(
            delta,
            token_ids=output.prompt_token_ids + delta.token_ids,
            text=output.prompt + delta.text,
            logprobs=((output.prompt_logprobs or ()) if self.sampling.logprobs is not None else ()) + delta.logprobs,
            num_echoed=len(output.prompt_token_ids),
        )
