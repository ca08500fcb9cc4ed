"""The hash with which vllm-router 0.1.17 places sessions: furc_hash of Facebook's mcrouter over MurmurHash64A.

furc_hash gives a number below 2**23 - 1 that changes rarely when the number of places changes; MurmurHash64A spreads it
over 64 bits. The rules are those of mcrouter/lib/fbi/hash.c.

Keys of one length are hashed together, in a tenth of the time: their 64-bit words lie side by side in one integer, each
in a lane of 128 bits, which has room for the product of two words. One operation of Python then works on all of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

_WORD = 2**64 - 1
_MULTIPLIER = 0xC6A4A7935BD1E995
_SEED = 4193360111
_MODULUS = 2**23 - 1
_SHIFT = 23
_MAX_TRIES = 32
_MAX_LANES = 512


def session_hash(key: str) -> int:
    """The place of a key on the ring of 2**64, as ``ConsistentHash`` and ``Sticky`` take it.

    Example:
        >>> session_hash("header:x-session-id:s1") == session_hashes(["header:x-session-id:s1"])[0]
        True
    """
    return session_hashes([key])[0]


def session_hashes(keys: Sequence[str]) -> list[int]:
    """The places of keys on the ring of 2**64."""
    found = [0] * len(keys)
    by_length: dict[int, list[tuple[int, bytes]]] = {}
    for index, key in enumerate(keys):
        encoded = key.encode()
        by_length.setdefault(len(encoded), []).append((index, encoded))
    for pairs in by_length.values():
        for first in range(0, len(pairs), _MAX_LANES):
            some = pairs[first : first + _MAX_LANES]
            places = furc_hashes([key for _, key in some], _MODULUS)
            words = _words(_murmur_hashes([place.to_bytes(4, "little") for place in places]), len(places))
            for (index, _), word in zip(some, words):
                found[index] = word
    return found


def furc_hashes(keys: Sequence[bytes], modulus: int) -> list[int]:
    """The places of keys of one length among ``modulus`` places: numbers from 0 to ``modulus`` - 1."""
    if modulus <= 1:
        return [0] * len(keys)
    depth, count = (modulus - 1).bit_length(), len(keys)
    num_words = (_SHIFT + 1) * depth // 64 + 1  # each is the hash of the one before; these do for one try
    table, lanes = array("Q", bytes(8 * num_words * count)), _murmur_hashes(keys)
    for column in range(num_words):
        table[column::num_words] = _words(lanes, count)
        lanes = _rehashed(lanes, count)
    return [_place(table[row : row + num_words], modulus, depth) for row in range(0, len(table), num_words)]


def _place(words: array[int], modulus: int, depth: int) -> int:
    """The place of a key, from the bits of its hash and of the hashes of that; further ones are made if needed."""
    bits = _bits(words)
    at = depth
    for _ in range(_MAX_TRIES):
        while bits[at] == "0":
            if depth == 0:
                return 0
            depth -= 1
            at = depth
        end = at + _SHIFT * depth
        while len(bits) <= end:
            words = _words(_rehashed(words[-1], 1), 1)
            bits += _bits(words)
        number = int("1" + bits[at + _SHIFT : end : _SHIFT], 2)
        if number < modulus:
            return number
        at = end
    return 0


def _bits(words: array[int]) -> str:
    """The bits of words, the lowest first, as text, in which every 23rd bit is a slice."""
    return f"{int.from_bytes(words.tobytes(), sys.byteorder):0{64 * len(words)}b}"[::-1]


@lru_cache(maxsize=64)
def _in_lanes(word: int, count: int) -> int:
    """The same word in each lane."""
    return int.from_bytes(word.to_bytes(16, "little") * count, "little")


def _words(lanes: int, count: int) -> array[int]:
    """The word of each lane."""
    words = array("Q", lanes.to_bytes(16 * count, "little"))
    if sys.byteorder == "big":
        words.byteswap()
    return words[::2]


def _mixed(lanes: int, mask: int) -> int:
    lanes = lanes * _MULTIPLIER & mask
    return ((lanes ^ lanes >> 47) & mask) * _MULTIPLIER & mask


def _finished(lanes: int, mask: int) -> int:
    lanes = ((lanes ^ lanes >> 47) & mask) * _MULTIPLIER & mask
    return (lanes ^ lanes >> 47) & mask


def _murmur_hashes(keys: Sequence[bytes]) -> int:
    """MurmurHash64A of keys of one length, in lanes."""
    length, count = len(keys[0]), len(keys)
    mask = _in_lanes(_WORD, count)
    lanes = _in_lanes(_SEED ^ length * _MULTIPLIER & _WORD, count)
    for place in range(0, length, 8):
        part = int.from_bytes(b"".join([key[place : place + 8].ljust(16, b"\0") for key in keys]), "little")
        lanes = (lanes ^ (_mixed(part, mask) if place + 8 <= length else part)) * _MULTIPLIER & mask
    return _finished(lanes, mask)


def _rehashed(lanes: int, count: int) -> int:
    """MurmurHash64A of the words in lanes."""
    mask = _in_lanes(_WORD, count)
    seeds = _in_lanes(_SEED ^ 8 * _MULTIPLIER & _WORD, count)
    return _finished((seeds ^ _mixed(lanes, mask)) * _MULTIPLIER & mask, mask)
