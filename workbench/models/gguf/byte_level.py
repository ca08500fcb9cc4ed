"""Byte-level BPE: a text is cut by a pre-tokenizer, and the bytes of each piece are merged by a list of merges.

Tokens and merges write a byte as a printable character. PyPI ``tokenizers`` cuts texts and writes tokens as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from tokenizers import decoders

from workbench.cpu.attention.compiled import entry_point
from workbench.cpu.attention.simd import jit
from workbench.models.gguf.fields import GGUFError
from workbench.models.gguf.pre_tokenizers import PreTokenizer
from workbench.models.gguf.special_tokens import Splitter, encodings, no_words
from workbench.models.gguf.texts import Texts
from workbench.models.gguf.vocabulary import (
    FIRST_HASH,
    find,
    first_place,
    free_places,
    hashed,
    make_vocabulary,
    merge_neighbours,
    token_of,
    tokens_of,
)

_SEPARATOR = ord(" ")


class Merges(NamedTuple):
    """The merges, for compiled code.

    Attributes:
        table: int32 [a power of 2], merges by the hash of their pair, then in the next free place; -1 is free.
        pairs: int32 [num_merges, 3], the tokens that are joined, and the token they become.
    """

    table: np.ndarray
    pairs: np.ndarray


class Letters(NamedTuple):
    """The characters that stand for bytes, for compiled code.

    Attributes:
        text: uint8, their UTF-8 bytes, one character after another.
        starts: int32 [257], the first byte of each character, and the end.
    """

    text: np.ndarray
    starts: np.ndarray


class ByteLevelBPE:
    """Text to token ids and back.

    Args:
        tokens: The text of each token.
        merges: Pairs of tokens with a space between them; of two that can be joined, the first one is.
        special: Ids of tokens that are found in a text before it is cut.
        pre_tokenizer: The rules for cutting a text.

    Raises:
        GGUFError: A token occurs twice, or a merge is not two tokens that join to a third.
    """

    def __init__(self, tokens: Texts, merges: Texts, special: Sequence[int], pre_tokenizer: PreTokenizer) -> None:
        self._tokens = tokens
        self._vocabulary = make_vocabulary(tokens)
        self._merges = Merges(free_places(len(merges)), np.empty((len(merges), 3), np.int32))
        wrong = np.full(1, -1, np.int32)
        fill_merges(self._vocabulary, np.frombuffer(merges.joined, np.uint8), merges.starts, self._merges, wrong)
        if wrong[0] >= 0:
            raise GGUFError(
                f"metadata tokenizer.ggml.merges contains {merges[int(wrong[0])]!r}; a merge must be two tokens of "
                "tokenizer.ggml.tokens with a space between them, which join to a third one"
            )
        letters = _letters()
        self._byte_tokens = tokens_of(self._vocabulary, letters)
        self._letters = Letters(np.frombuffer(letters.joined, np.uint8), letters.starts)
        self._whole_words = pre_tokenizer.whole_words
        self._splitter = Splitter([tokens[token] for token in special], special)
        self._normalizer = pre_tokenizer.normalizer()
        self._pieces = no_words()
        self._pieces.pre_tokenizer = pre_tokenizer.splitter()
        self._decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Other threads can run meanwhile."""
        found: list[int] = []
        for part in self._splitter.parts(text):
            if isinstance(part, int):
                found.append(part)
            else:
                found += self._encode_part(part)
        return found

    def _encode_part(self, text: str) -> list[int]:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        ends = [np.array([end for _, end in cut.offsets], np.int64) for cut in encodings(self._pieces, text)]
        stored = np.frombuffer(text.encode(), np.uint8)
        ids = np.empty(len(stored), np.int32)
        tables = (self._vocabulary, self._merges, self._letters, self._byte_tokens)
        encode_pieces(stored, np.concatenate(ends), *tables, self._whole_words, ids)
        return ids[ids >= 0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; bytes that are not a character become U+FFFD."""
        return self._decoder.decode([self._tokens[token] for token in ids if 0 <= token < len(self._tokens)])


@cache
def _letters() -> Texts:
    """The character that stands for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {byte: 256 + number for number, byte in enumerate(others)}
    return Texts.of(chr(codes[byte]) for byte in range(256))


# -- compiled code -------------------------------------------------------------------------------------------------


@jit
def _place_of_pair(merges, left, right):
    """The place in the table of the merge of two tokens, or the free place where it would be."""
    place = first_place(hashed(hashed(FIRST_HASH, left), right), merges.table)
    while merges.table[place] >= 0:
        pair = merges.pairs[merges.table[place]]
        if pair[0] == left and pair[1] == right:
            return place
        place = (place + 1) & (merges.table.size - 1)
    return place


@jit
def _joined(merges, left, right):
    """The number of the merge of two tokens, and the token they become; -1 for none."""
    merge = merges.table[_place_of_pair(merges, left, right)]
    return (float(merge), merges.pairs[merge, 2]) if merge >= 0 else (0.0, np.int32(-1))


@entry_point
def fill_merges(vocabulary, text, starts, merges, wrong):
    """Put every merge into the table, the last one of a pair in place of others.

    Args:
        vocabulary: The tokens.
        text: uint8, the merges one after another.
        starts: int32 [num_merges + 1].
        merges: Written.
        wrong: int32 [1]; written: the first merge that is not two tokens that join to a third.
    """
    for merge in range(starts.size - 1):
        start, end = starts[merge], starts[merge + 1]
        middle = start
        while middle < end and text[middle] != _SEPARATOR:
            middle += 1
        left, right, joined = np.int32(-1), np.int32(-1), np.int32(-1)
        if middle < end:
            left = token_of(vocabulary, text, start, middle)
            right = token_of(vocabulary, text, middle + 1, end)
            joined = vocabulary.table[find(vocabulary, text, start, middle, text, middle + 1, end)]
        if left < 0 or right < 0 or joined < 0:
            wrong[0] = merge
            return
        merges.pairs[merge, 0], merges.pairs[merge, 1], merges.pairs[merge, 2] = left, right, joined
        merges.table[_place_of_pair(merges, left, right)] = merge


@jit
def _write_letters(letters, text, start, end, out):
    """Write bytes of a text as the characters that stand for them, and return the number of bytes of these."""
    size = 0
    for index in range(start, end):
        byte = text[index]
        for at in range(letters.starts[byte], letters.starts[byte + 1]):
            out[size] = letters.text[at]
            size += 1
    return size


@entry_point
def encode_pieces(text, ends, vocabulary, merges, letters, byte_tokens, whole_words, ids):
    """Token ids of a text without special tokens.

    Args:
        text: uint8, valid UTF-8.
        ends: int64, the end of each piece of the text, in characters.
        vocabulary: The tokens.
        merges: The merges.
        letters: The characters that stand for bytes.
        byte_tokens: int32 [256], the token of each byte, -1 for none: the byte is left out.
        whole_words: Whether a piece that is a token stays whole.
        ids: int32 [len(text)]; written: the ids with -1 between and after them.
    """
    ids[:] = -1
    word = np.empty(2 * text.size if whole_words else 0, np.uint8)
    start, characters = 0, 0
    for piece in range(ends.size):
        end = start
        while end < text.size and (characters < ends[piece] or text[end] & 0xC0 == 0x80):
            characters += text[end] & 0xC0 != 0x80
            end += 1
        token = np.int32(-1)
        if whole_words:
            token = token_of(vocabulary, word, 0, _write_letters(letters, text, start, end, word))
        if token >= 0:
            ids[start] = token
        else:
            count = start
            for index in range(start, end):
                if byte_tokens[text[index]] >= 0:
                    ids[count] = byte_tokens[text[index]]
                    count += 1
            merge_neighbours(_joined, merges, ids[start:count])
        start = end
