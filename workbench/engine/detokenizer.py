"""Text of a request as it grows, token by token, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens."""
        ...


class IncrementalDetokenizer:
    """Turns tokens into text one at a time.

    A token may hold half of a character, and a word's first token may decode differently at the start of a text.
    So a short window of tokens is decoded with and without the new one, and the difference is the new text; a text
    that ends in the replacement character waits for the token that completes it. (The two-offset scheme of
    Hugging Face text-generation-inference, also used by vLLM.)

    Args:
        tokenizer: Anything with ``decode(ids)``.
        prompt_token_ids: The prompt, whose last tokens give the first output token its context.
        stop: Stop strings; the text ends before the first one found.
        hidden: Token ids that end the output and are not part of its text.

    Attributes:
        text: The output so far; without the stop string once one was found.
        stopped_by: The stop string that was found, else "".
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-6:])
        self._window = 0
        self._read = len(self._ids)
        self._stop = tuple(stop)
        self._hidden = hidden
        self.text = ""
        self.stopped_by = ""

    def append(self, token_id: int) -> str:
        """Add a token and return the text it adds, "" while a character is incomplete."""
        if token_id in self._hidden:
            return self.flush()
        self._ids.append(token_id)
        return self._advance(final=False)

    def flush(self) -> str:
        """Return what an incomplete character has held back, at the end of the output."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._window : self._read])
        whole = self._tokenizer.decode(self._ids[self._window :])
        if len(whole) <= len(known) or (whole.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return self._accept(whole[len(known) :])

    def _accept(self, new: str) -> str:
        start = len(self.text)
        self.text += new
        found = [
            (position, stop)
            for stop in self._stop
            if (position := self.text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if found:
            position, self.stopped_by = min(found)
            self.text = self.text[:position]
        return self.text[start:]
