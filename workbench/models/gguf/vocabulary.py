"""The tokens of a vocabulary as bytes with a hash table, and merges of neighbours, for compiled code.

PyPI ``tokenizers`` holds three tables of about 200 bytes a token for byte-level BPE, and more for SentencePiece. Here a
token takes about 20 bytes; each kind of tokenizer adds arrays for its merges.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from workbench.cpu.attention.compiled import entry_point
from workbench.cpu.attention.simd import jit
from workbench.models.gguf.fields import GGUFError
from workbench.models.gguf.texts import Texts


class Vocabulary(NamedTuple):
    """The tokens.

    Attributes:
        text: uint8, the UTF-8 bytes of all tokens, one token after another.
        starts: int32 [num_tokens + 1], the first byte of each token, and the end.
        table: int32 [a power of 2], token ids by hash, then in the next free place; -1 is free.
    """

    text: np.ndarray
    starts: np.ndarray
    table: np.ndarray


def make_vocabulary(tokens: Texts) -> Vocabulary:
    """The vocabulary of some tokens.

    Raises:
        GGUFError: A token occurs twice.
    """
    vocabulary = Vocabulary(np.frombuffer(tokens.joined, np.uint8), tokens.starts, free_places(len(tokens)))
    twice = np.full(1, -1, np.int32)
    fill_table(vocabulary, twice)
    if twice[0] >= 0:
        raise GGUFError(
            f"tokenizer.ggml.tokens contains {tokens[int(twice[0])]!r} twice, so the file's tokenizer is not usable"
        )
    return vocabulary


def tokens_of(vocabulary: Vocabulary, texts: Texts) -> np.ndarray:
    """The token of each text, int32 [num_texts]; -1 for none."""
    tokens = np.empty(len(texts), np.int32)
    find_tokens(vocabulary, np.frombuffer(texts.joined, np.uint8), texts.starts, tokens)
    return tokens


def free_places(count: int) -> np.ndarray:
    """An empty hash table for ``count`` entries, at most half of which will be taken, int32."""
    return np.full(1 << (2 * count).bit_length(), -1, np.int32)


# -- compiled code -------------------------------------------------------------------------------------------------


@jit
def hashed(value, number):
    """The next value of FNV-1a."""
    return (value ^ np.uint64(number)) * np.uint64(0x100000001B3)


@jit
def first_place(value, table):
    """The place in a table at which the search for a hash begins."""
    return np.int64(value ^ (value >> np.uint64(32))) & (table.size - 1)


FIRST_HASH = np.uint64(0xCBF29CE484222325)


@jit
def _equal(vocabulary, at, text, start, end):
    """Whether bytes of the vocabulary from ``at`` on are those of a text."""
    for index in range(end - start):  # noqa: SIM110 (numba compiles loops, not generators)
        if vocabulary.text[at + index] != text[start + index]:
            return False
    return True


@jit
def find(vocabulary, left, left_start, left_end, right, right_start, right_end):
    """The place in the table of the token that consists of two texts, or the free place where it would be."""
    value = FIRST_HASH
    for index in range(left_start, left_end):
        value = hashed(value, left[index])
    for index in range(right_start, right_end):
        value = hashed(value, right[index])
    place = first_place(value, vocabulary.table)
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
        place = (place + 1) & (vocabulary.table.size - 1)
    return place


@jit
def token_of(vocabulary, text, start, end):
    """The token of some bytes of a text, -1 for none."""
    return vocabulary.table[find(vocabulary, text, start, end, text, 0, 0)]


@entry_point
def fill_table(vocabulary, twice):
    """Put every token into the table, and the first one that is there already into ``twice``, int32 [1]."""
    text, starts = vocabulary.text, vocabulary.starts
    for token in range(starts.size - 1):
        place = find(vocabulary, text, starts[token], starts[token + 1], text, 0, 0)
        if vocabulary.table[place] >= 0:
            twice[0] = token
            return
        vocabulary.table[place] = token


@entry_point
def find_tokens(vocabulary, text, starts, tokens):
    """Write the token of each text, -1 for none, into ``tokens``, int32 [num_texts]."""
    for index in range(tokens.size):
        tokens[index] = token_of(vocabulary, text, starts[index], starts[index + 1])


@jit
def _candidate(joined, tables, ids, left, right, place):
    """A merge in the order of merges: of equal ones, that with the smaller ids is first, then the left one."""
    priority, token = joined(tables, ids[left], ids[right])
    return priority, np.int64(ids[left]), np.int64(ids[right]), np.int64(place), np.int64(token)


@jit
def merge_neighbours(joined, tables, ids):
    """Join neighbours, those of the smallest priority first, until none may be joined.

    Args:
        joined: Compiled function of (tables, left, right): the priority of joining two neighbours and the token they
            become, which is -1 if they may not be joined.
        tables: The tables of ``joined``.
        ids: int32; the tokens of a text, overwritten: -1 for a token that was joined to the one before it.
    """
    count = ids.size
    if count < 2:
        return
    before, after = np.arange(-1, count - 1), np.arange(1, count + 1)
    queue = [(0.0, 0, 0, 0, 0) for _ in range(0)]
    for place in range(count - 1):
        merge = _candidate(joined, tables, ids, place, place + 1, place)
        if merge[4] >= 0:
            queue.append(merge)
    heapq.heapify(queue)
    while len(queue) > 0:
        _, _, _, place, token = heapq.heappop(queue)
        right = after[place]
        # A neighbour may have been joined to another one since.
        if ids[place] < 0 or right == count or joined(tables, ids[place], ids[right])[1] != token:
            continue
        ids[place], ids[right] = token, -1
        after[place] = after[right]
        if after[right] < count:
            before[after[right]] = place
        for left in (before[place], place):
            if left >= 0 and after[left] < count:
                merge = _candidate(joined, tables, ids, left, after[left], left)
                if merge[4] >= 0:
                    heapq.heappush(queue, merge)
