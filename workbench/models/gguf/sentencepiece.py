"""SentencePiece's BPE: the vocabulary as bytes with a hash table, and merges that are looked up in it.

SentencePiece has no list of merges: of all neighbours whose concatenation is a token, it joins those whose token has
the highest score. PyPI ``tokenizers`` needs every way to cut a token into two as a merge. For the 262,144 tokens of
Gemma it holds 70 MiB, and building it takes 3 seconds. Here a token takes 25 bytes, and a merge none. Special tokens
and the text of tokens are the library's part.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from workbench.attention.cpu.compiled import entry_point
from workbench.attention.cpu.simd import jit
from workbench.models.gguf.fields import GGUFError

_SPACE = "▁"


class Vocabulary(NamedTuple):
    """The tokens, for compiled code.

    Attributes:
        text: uint8, the UTF-8 bytes of all tokens, one token after another.
        starts: int32 [num_tokens + 1], the first byte of each token, and the end.
        table: int32 [a power of 2], token ids by hash, then in the next free place; -1 is free.
        scores: float64 [num_tokens].
        merged: bool [num_tokens], whether two neighbours may be joined to the token.
    """

    text: np.ndarray
    starts: np.ndarray
    table: np.ndarray
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
        tokens: Sequence[str],
        scores: Sequence[float],
        merged: Sequence[bool],
        special: Sequence[int],
        unknown: int | None,
        add_prefix: bool,
    ) -> None:
        self._text = "".join(tokens).encode()
        self._vocabulary = _vocabulary(self._text, tokens, scores, merged)
        self._starts = self._vocabulary.starts.data
        self._special, self._unknown = list(special), -1 if unknown is None else unknown
        self._byte_tokens = np.full(256, -1, np.int32)
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        for token, text in enumerate(tokens):
            if text in names:
                self._byte_tokens[names[text]] = token
        # Id 0 is a part of a text between special tokens, n > 0 the n-th special token.
        self._splitter = FastTokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._splitter.add_special_tokens([AddedToken(tokens[token], normalized=False) for token in special])
        self._prefix = _SPACE if add_prefix else ""
        strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
        self._decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Other threads can run meanwhile."""
        # ``encode`` would hold Python's lock.
        parts = self._splitter.encode_batch([text], add_special_tokens=False)[0]
        found: list[int] = []
        for number, (start, end) in zip(parts.ids, parts.offsets):
            if number:
                found.append(self._special[number - 1])
                continue
            stored = (self._prefix + text[start:end].replace(" ", _SPACE)).encode()
            ids = np.empty(len(stored), np.int32)
            encode_part(np.frombuffer(stored, np.uint8), self._vocabulary, self._byte_tokens, self._unknown, ids)
            found += ids[ids >= 0].tolist()
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; bytes that are not a character become U+FFFD."""
        text, starts = self._text, self._starts
        known = [token for token in ids if 0 <= token < len(starts) - 1]
        return self._decoder.decode([text[starts[token] : starts[token + 1]].decode() for token in known])


def _vocabulary(text: bytes, tokens: Sequence[str], scores: Sequence[float], merged: Sequence[bool]) -> Vocabulary:
    of_merges = [score for token, score, is_merged in zip(tokens, scores, merged) if is_merged and len(token) > 1]
    if len(of_merges) > 1 and len(set(of_merges)) == 1:
        raise GGUFError("tokenizer.ggml.scores are all the same, so the order of merges is unknown")
    starts = np.zeros(len(tokens) + 1, np.int32)
    np.cumsum(np.fromiter((len(token.encode()) for token in tokens), np.int32, len(tokens)), out=starts[1:])
    vocabulary = Vocabulary(
        np.frombuffer(text, np.uint8),
        starts,
        np.full(1 << (2 * len(tokens)).bit_length(), -1, np.int32),
        np.array(scores, np.float64),
        np.array(merged, np.bool_),
    )
    twice = np.full(1, -1, np.int32)
    fill_table(vocabulary, twice)
    if twice[0] >= 0:
        raise GGUFError(
            f"tokenizer.ggml.tokens contains {tokens[twice[0]]!r} twice, so the file's tokenizer is not usable"
        )
    return vocabulary


# -- compiled code -------------------------------------------------------------------------------------------------


@jit
def _hashed(text, start, end, value):
    """FNV-1a of some bytes, after ``value``."""
    for index in range(start, end):
        value = (value ^ np.uint64(text[index])) * np.uint64(0x100000001B3)
    return value


@jit
def _equal(vocabulary, at, text, start, end):
    """Whether bytes of the vocabulary from ``at`` on are those of a text."""
    for index in range(end - start):  # noqa: SIM110 (numba compiles loops, not generators)
        if vocabulary.text[at + index] != text[start + index]:
            return False
    return True


@jit
def _find(vocabulary, left, left_start, left_end, right, right_start, right_end):
    """The place in the table of the token that consists of two texts, or the free place where it would be."""
    value = _hashed(left, left_start, left_end, np.uint64(0xCBF29CE484222325))
    value = _hashed(right, right_start, right_end, value)
    last = vocabulary.table.size - 1
    place = np.int64(value ^ (value >> np.uint64(32))) & last
    middle = left_end - left_start
    length = middle + right_end - right_start
    while vocabulary.table[place] >= 0:
        token = vocabulary.table[place]
        start = vocabulary.starts[token]
        if (
            vocabulary.starts[token + 1] - start == length
            and _equal(vocabulary, start, left, left_start, left_end)
            and _equal(vocabulary, start + middle, right, right_start, right_end)
        ):
            return place
        place = (place + 1) & last
    return place


@jit
def _joined(vocabulary, left, right):
    """The token that two neighbours may be joined to, -1 for none."""
    text, starts = vocabulary.text, vocabulary.starts
    token = vocabulary.table[
        _find(vocabulary, text, starts[left], starts[left + 1], text, starts[right], starts[right + 1])
    ]
    return token if token >= 0 and vocabulary.merged[token] else -1


@entry_point
def fill_table(vocabulary, twice):
    """Put every token into the table, and the first one that is there already into ``twice``, int32 [1]."""
    text, starts = vocabulary.text, vocabulary.starts
    for token in range(starts.size - 1):
        place = _find(vocabulary, text, starts[token], starts[token + 1], text, 0, 0)
        if vocabulary.table[place] >= 0:
            twice[0] = token
            return
        vocabulary.table[place] = token


@jit
def _characters(text, vocabulary, byte_tokens, unknown, ids):
    """Write the token of each character, or those of its bytes; neighbours without one become one unknown token."""
    count, start, after_unknown = 0, 0, False
    while start < text.size:
        first = text[start]
        end = start + (1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4)
        token = vocabulary.table[_find(vocabulary, text, start, end, text, 0, 0)]
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


@jit
def _merge(vocabulary, ids, left, right, token):
    """A merge in the order of merges: of equal scores, the one with the smaller ids is first, then the left one."""
    return -vocabulary.scores[token], np.int64(ids[left]), np.int64(ids[right]), np.int64(left), np.int64(token)


@entry_point
def encode_part(text, vocabulary, byte_tokens, unknown, ids):
    """Token ids of a text without special tokens.

    Args:
        text: uint8, valid UTF-8.
        vocabulary: The vocabulary.
        byte_tokens: int32 [256], the token of each byte, -1 for none.
        unknown: The unknown token, -1 for none.
        ids: int32 [len(text)]; written: the ids with -1 between and after them.
    """
    count = _characters(text, vocabulary, byte_tokens, unknown, ids)
    ids[count:] = -1
    before, after = np.arange(-1, count - 1), np.arange(1, count + 1)
    queue = [(0.0, 0, 0, 0, 0) for _ in range(0)]
    for place in range(count - 1):
        token = _joined(vocabulary, ids[place], ids[place + 1])
        if token >= 0:
            queue.append(_merge(vocabulary, ids, place, place + 1, token))
    heapq.heapify(queue)
    while len(queue) > 0:
        _, _, _, place, token = heapq.heappop(queue)
        right = after[place]
        # A neighbour may have been joined to another one since.
        if ids[place] < 0 or right == count or _joined(vocabulary, ids[place], ids[right]) != token:
            continue
        ids[place], ids[right] = token, -1
        after[place] = after[right]
        if after[right] < count:
            before[after[right]] = place
        for left in (before[place], place):
            if left >= 0 and after[left] < count:
                joined = _joined(vocabulary, ids[left], ids[after[left]])
                if joined >= 0:
                    heapq.heappush(queue, _merge(vocabulary, ids, left, after[left], joined))
