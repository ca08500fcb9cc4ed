"""Answers in OpenAI's shape, whole or as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from workbench.apps.serve.channels import ChannelParser
from workbench.apps.serve.stream import Delta, Stream
from workbench.apps.serve.tools import MessageParser
from workbench.models.token_bytes import token_bytes
from workbench.models.tokenizer import Tokenizer


@dataclass
class Answer:
    """One answer, of which a stream sends many parts.

    Attributes:
        id: Id of the answer.
        model: Name of the model.
        chat: Whether it answers /v1/chat/completions.
        tokenizer: Gives the text of a token; None for a model without a tokenizer.
        streams: The choices, in order.
        parsers: For each the separation of its text into content, reasoning and calls.
        token_ids: Whether token ids are sent too (vLLM's ``return_token_ids``).
        created: Start of the answer, in seconds since 1970.
    """

    id: str
    model: str
    chat: bool
    tokenizer: Tokenizer | None
    streams: list[Stream]
    parsers: Sequence[MessageParser | ChannelParser]
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """The fields before the choices."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self, num_completion_tokens: int, num_prompts: int) -> dict[str, Any]:
        """Prompt and completion tokens; a prompt is counted once for all of its choices."""
        per_prompt = self.streams[:: max(1, len(self.streams) // num_prompts)]
        prompt_tokens = sum(stream.num_prompt_tokens for stream in per_prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in per_prompt)},
        }

    def choice(self, index: int, delta: Delta, *, chunk: bool, offset: int = 0) -> dict[str, Any]:
        """One choice as a whole, or the part of it that a delta adds.

        Args:
            index: Index of the choice.
            delta: Text, tokens and finish reason.
            chunk: Whether it is a part of a stream.
            offset: Number of characters in the parts before it.
        """
        choice: dict[str, Any] = {"index": index}
        if not self.chat:
            choice["text"] = delta.text
            choice |= {} if chunk else self.prompt_logprobs(index)
        else:
            added = self.parsers[index].feed(delta.text, final=delta.finish_reason is not None)
            if chunk:
                choice["delta"] = added or {"content": ""}
            else:
                for call in added.get("tool_calls", ()):
                    del call["index"]
                content = None if "tool_calls" in added else ""
                choice["message"] = {"role": "assistant", "content": content, **added}
        choice["logprobs"] = self._logprobs(delta, offset) if delta.logprobs else None
        has_calls = self.chat and delta.finish_reason == "stop" and self.parsers[index].num_calls > 0
        choice["finish_reason"] = "tool_calls" if has_calls else delta.finish_reason
        if self.token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def prompt_logprobs(self, index: int) -> dict[str, Any]:
        """The field ``prompt_logprobs`` of a whole answer, as vLLM has it; empty if it was not asked for."""
        output = self.streams[index].output
        if output is None or output.prompt_logprobs is None or output.prompt_ranks is None:
            return {}
        found: list[dict[str, Any] | None] = []
        for own, near, own_rank in zip(output.prompt_token_ids, output.prompt_logprobs, output.prompt_ranks):
            entries = {
                str(token): {
                    "logprob": max(logprob, -9999.0),  # JSON has no infinity
                    "rank": own_rank if token == own else rank,
                    "decoded_token": self._text(token),
                }
                for rank, (token, logprob) in enumerate((near or {}).items(), 1)
            }
            found.append(entries or None)
        return {"prompt_logprobs": found}

    def _logprobs(self, delta: Delta, offset: int) -> dict[str, Any]:
        if self.chat:
            return {
                "content": [
                    self._chat_logprob(token, near or {}) for token, near in zip(delta.token_ids, delta.logprobs)
                ]
            }
        tokens = [self._text(token) for token in delta.token_ids]
        offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": [near and near.get(token) for token, near in zip(delta.token_ids, delta.logprobs)],
            "top_logprobs": [near and {self._text(t): p for t, p in near.items()} for near in delta.logprobs],
            "text_offset": offsets,
            "bytes": list(map(self._bytes, delta.token_ids, tokens)),
        }

    def _chat_logprob(self, token: int, near: dict[int, float]) -> dict[str, Any]:
        return {**self._token(token, near.get(token)), "top_logprobs": [self._token(t, p) for t, p in near.items()]}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": self._bytes(token, text)}

    def _bytes(self, token: int, text: str) -> list[int]:
        """The bytes of a token, which clients join: a character can be several tokens."""
        return list(token_bytes(self.tokenizer, token, text) if self.tokenizer else text.encode())

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token]) if self.tokenizer else f"token_id:{token}"


def joined(deltas: Sequence[Delta]) -> Delta:
    """One delta from several of the same request."""
    return Delta(
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        tuple(near for delta in deltas for near in delta.logprobs),
        deltas[-1].finish_reason if deltas else None,
        deltas[-1].error if deltas else "",
        sum(delta.num_echoed for delta in deltas),
    )
