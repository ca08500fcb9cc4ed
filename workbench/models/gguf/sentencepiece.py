"""SentencePiece's BPE: neighbours are merged whose concatenation is a token, those of the highest score first.

SentencePiece has no list of merges. PyPI ``tokenizers`` needs every way to cut a token into two as a merge: for the
262,144 tokens of Gemma it holds 70 MiB, and building it takes 3 seconds. Here a merge is looked up in the vocabulary.
Special tokens and the text of tokens are the library's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import decoders

from workbench.cpu.attention.compiled import entry_point
from workbench.cpu.attention.simd import jit
from workbench.models.gguf.fields import GGUFError
from workbench.models.gguf.special_tokens import Splitter
from workbench.models.gguf.texts import Texts
from workbench.models.gguf.vocabulary import Vocabulary, find, make_vocabulary, merge_neighbours, token_of, tokens_of

_SPACE = "▁"


class Scored(NamedTuple):
    """The tokens with what decides about merges, for compiled code.

    Attributes:
        vocabulary: The tokens.
        scores: float64 [num_tokens].
        merged: bool [num_tokens], whether two neighbours may be joined to the token.
    """

    vocabulary: Vocabulary
    scores: np.ndarray
    merged: np.ndarray


class SentencePieceBPE:
    """Text to token ids and back.

    Args:
        tokens: The text of each token; special tokens as they are written in a text.
        scores: Their scores.
        merged: Whether two neighbours may be joined to the token.
        special: Ids of tokens that are found in a text before it is cut.
        unknown: Id of the token for characters that have no token and no tokens of their bytes, or None.
        add_prefix: Whether a text begins with a space, also after a special token.

    Raises:
        GGUFError: A token occurs twice, or the order of merges is unknown.
    """

    def __init__(
        self,
        tokens: Texts,
        scores: Sequence[float],
        merged: Sequence[bool],
        special: Sequence[int],
        unknown: int | None,
        add_prefix: bool,
    ) -> None:
        self._tokens, self._unknown = tokens, -1 if unknown is None else unknown
        self._scored = Scored(make_vocabulary(tokens), np.array(scores, np.float64), np.array(merged, np.bool_))
        _check_order(tokens, self._scored)
        self._byte_tokens = tokens_of(self._scored.vocabulary, Texts.of(f"<0x{byte:02X}>" for byte in range(256)))
        self._splitter = Splitter([tokens[token] for token in special], special)
        self._prefix = _SPACE if add_prefix else ""
        strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
        self._decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Other threads can run meanwhile."""
        found: list[int] = []
        for part in self._splitter.parts(text):
            if isinstance(part, int):
                found.append(part)
                continue
            stored = (self._prefix + part.replace(" ", _SPACE)).encode()
            ids = np.empty(len(stored), np.int32)
            encode_part(np.frombuffer(stored, np.uint8), self._scored, self._byte_tokens, self._unknown, ids)
            found += ids[ids >= 0].tolist()
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; bytes that are not a character become U+FFFD."""
        return self._decoder.decode([self._tokens[token] for token in ids if 0 <= token < len(self._tokens)])


def _check_order(tokens: Texts, scored: Scored) -> None:
    """Refuse scores that say nothing about the order of merges."""
    lengths = np.diff(tokens.starts)
    first = np.append(scored.vocabulary.text, np.uint8(0))[tokens.starts[:-1]]
    of_one_character = 1 + (first >= 0xC0).astype(np.int32) + (first >= 0xE0) + (first >= 0xF0)
    of_merges = scored.scores[scored.merged & (lengths > of_one_character)]
    if of_merges.size > 1 and np.all(of_merges == of_merges[0]):
        raise GGUFError("tokenizer.ggml.scores are all the same, so the order of merges is unknown")


# -- compiled code -------------------------------------------------------------------------------------------------


@jit
def _joined(scored, left, right):
    """The priority of joining two neighbours, and the token they become; -1 for none."""
    text, starts = scored.vocabulary.text, scored.vocabulary.starts
    token = scored.vocabulary.table[
        find(scored.vocabulary, text, starts[left], starts[left + 1], text, starts[right], starts[right + 1])
    ]
    return (-scored.scores[token], token) if token >= 0 and scored.merged[token] else (0.0, np.int32(-1))


@jit
def _characters(text, vocabulary, byte_tokens, unknown, ids):
    """Write the token of each character, or those of its bytes; neighbours without one become one unknown token."""
    count, start, after_unknown = 0, 0, False
    while start < text.size:
        first = text[start]
        end = start + (1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4)
        token = token_of(vocabulary, text, start, end)
        has_bytes = True
        for index in range(start, end):
            has_bytes = has_bytes and byte_tokens[text[index]] >= 0
        if token >= 0:
            ids[count] = token
            count += 1
        elif has_bytes:
            for index in range(start, end):
                ids[count] = byte_tokens[text[index]]
                count += 1
        elif unknown >= 0 and not after_unknown:
            ids[count] = unknown
            count += 1
        after_unknown = token < 0 and not has_bytes
        start = end
    return count


@entry_point
def encode_part(text, scored, byte_tokens, unknown, ids):
    """Token ids of a text without special tokens.

    Args:
        text: uint8, valid UTF-8.
        scored: The tokens.
        byte_tokens: int32 [256], the token of each byte, -1 for none.
        unknown: The unknown token, -1 for none.
        ids: int32 [len(text)]; written: the ids with -1 between and after them.
    """
    count = _characters(text, scored.vocabulary, byte_tokens, unknown, ids)
    ids[count:] = -1
    merge_neighbours(_joined, scored, ids[:count])
