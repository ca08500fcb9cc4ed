"""Byte-level BPE with PyPI ``tokenizers``: a text is cut, and the bytes of each piece are merged by a list of merges.

Tokens and merges write a byte as a printable character.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workbench.models.gguf.fields import GGUFError
from workbench.models.gguf.pre_tokenizers import PreTokenizer

_LONG_TEXT = 4096
"""Number of characters from which a text is encoded without Python's lock, on a thread of the library."""


def _wrong_merge(tokens: dict[str, int], merges: Sequence[str], problem: Exception) -> Exception:
    """The error that names a wrong merge, or the problem itself if it is something else."""
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in tokens or right not in tokens or left + right not in tokens:
            return GGUFError(
                f"metadata tokenizer.ggml.merges contains {merge!r}; a merge must be two tokens of "
                "tokenizer.ggml.tokens with a space between them, which join to a third one"
            )
    return problem


class ByteLevelBPE:
    """Text to token ids and back.

    Args:
        tokens: Token ids by their text.
        merges: Pairs of tokens with a space between them; of two that can be joined, the first one is.
        special: Tokens that are found in a text before it is cut.
        pre_tokenizer: The rules for cutting a text.

    Raises:
        GGUFError: A merge is not two tokens that join to a third.
    """

    def __init__(
        self, tokens: dict[str, int], merges: Sequence[str], special: Sequence[str], pre_tokenizer: PreTokenizer
    ) -> None:
        try:
            pairs = [(left, right) for left, right in map(str.split, merges, repeat(" "), repeat(1))]
            model = models.BPE(vocab=tokens, merges=pairs, ignore_merges=pre_tokenizer.whole_words)
        except Exception as problem:  # PyPI tokenizers raises no narrower class
            raise _wrong_merge(tokens, merges, problem) from None
        self._tokenizer = Tokenizer(model)
        if (normalizer := pre_tokenizer.normalizer()) is not None:
            self._tokenizer.normalizer = normalizer
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer.splitter(), letters])
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])

    def serialized(self) -> str:
        """The tokenizer in the format of PyPI ``tokenizers``."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        if len(text) < _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; bytes that are not a character become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary writes it."""
        return self._tokenizer.id_to_token(token)
