"""One request as the server sees it, and what each step adds to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.config import SamplingParams

if TYPE_CHECKING:
    from workbench.engine.output_processor import RequestOutput


@dataclass(frozen=True)
class Delta:
    """Tokens and text that one step added to a request.

    Attributes:
        token_ids: Sampled tokens.
        text: Their text, up to a possible beginning of a stop string.
        logprobs: One {token_id: log-probability} per token, if the request asks for them.
        finish_reason: "length", "stop", "error" or "abort" in a request's last delta, else None.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[dict[int, float], ...] = ()
    finish_reason: str | None = None


class Stream:
    """One request as the server sees it; ``async for delta in stream`` ends with the request.

    Args:
        request_id: The engine's request id.
        sampling: Sampling of the request.
    """

    def __init__(self, request_id: str, sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self.ended = False
        # Only the engine's thread uses the following attributes.
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
            self._text = current.text
        upto = len(self._text) - (0 if reason is not None else self._held_back)
        upto = max(self._sent, upto)
        new, self._sent = self._text[self._sent : upto], upto
        return Delta(token_ids, new, logprobs, reason)
