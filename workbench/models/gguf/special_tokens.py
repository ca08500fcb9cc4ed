"""Cutting a text with PyPI ``tokenizers``, at tokens that are matched in the text itself and at pre-tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Encoding, models
from tokenizers import Tokenizer as FastTokenizer

_LONG_TEXT = 4096

_PIECES_AT_A_TIME = 8192
"""Offsets that become Python's numbers in one call, which holds Python's lock. No piece of a text is dropped."""


class Splitter:
    """Cuts a text into tokens that are matched in the text itself, and the parts between them.

    Args:
        special: The text of these tokens.
        ids: Their ids.
    """

    def __init__(self, special: Sequence[str], ids: Sequence[int]) -> None:
        self._ids = ids
        self._tokenizer = no_words()
        self._tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])

    def parts(self, text: str) -> Iterator[str | int]:
        """The parts of a text: a token's id, or text between tokens."""
        for cut in encodings(self._tokenizer, text):
            for number, (start, end) in zip(cut.ids, cut.offsets):
                yield self._ids[number - 1] if number else text[start:end]


def no_words() -> FastTokenizer:
    """A tokenizer that only cuts: each piece of a text is its token 0."""
    tokenizer = FastTokenizer(models.WordLevel({"": 0}, unk_token=""))
    tokenizer.enable_truncation(_PIECES_AT_A_TIME)
    return tokenizer


def encodings(tokenizer: FastTokenizer, text: str) -> list[Encoding]:
    """The pieces of a text, cut by a tokenizer of `no_words`, in order; Python's lock is not held for long."""
    if len(text) < _LONG_TEXT:
        first = tokenizer.encode(text, add_special_tokens=False)
    else:  # releases the lock, unlike the other
        first = tokenizer.encode_batch([text], add_special_tokens=False)[0]
    return [first, *first.overflowing]
