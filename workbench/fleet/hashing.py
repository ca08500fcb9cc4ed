"""The hash with which vllm-router 0.1.17 places sessions: furc_hash of Facebook's mcrouter over MurmurHash64A.

furc_hash gives a number below 2**23 - 1 that changes rarely when the number of places changes; MurmurHash64A spreads it
over 64 bits. The rules are those of mcrouter/lib/fbi/hash.c.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_MULTIPLIER = 0xC6A4A7935BD1E995
_SEED = 4193360111
_MODULUS = 2**23 - 1
_SHIFT = 23
_MAX_TRIES = 32


def _mixed(word: int) -> int:
    word = word * _MULTIPLIER & _MASK
    return (word ^ word >> 47) * _MULTIPLIER & _MASK


def _finished(value: int) -> int:
    value = (value ^ value >> 47) * _MULTIPLIER & _MASK
    return value ^ value >> 47


def murmur_hash(key: bytes) -> int:
    """MurmurHash64A of a key, a number below 2**64."""
    value = _SEED ^ len(key) * _MULTIPLIER & _MASK
    whole = len(key) - len(key) % 8
    for place in range(0, whole, 8):
        word = int.from_bytes(key[place : place + 8], "little")
        value = (value ^ _mixed(word)) * _MULTIPLIER & _MASK
    if whole < len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & _MASK
    return _finished(value)


def _rehash(value: int) -> int:
    return _finished((_SEED ^ 8 * _MULTIPLIER & _MASK ^ _mixed(value)) * _MULTIPLIER & _MASK)


def furc_hash(key: bytes, modulus: int) -> int:
    """A number from 0 to ``modulus`` - 1: the place of a key among that many."""
    if modulus <= 1:
        return 0
    words = [murmur_hash(key)]

    def bit(index: int) -> int:
        while len(words) <= index >> 6:
            words.append(_rehash(words[-1]))
        return words[index >> 6] >> (index & 63) & 1

    depth = (modulus - 1).bit_length()
    at = depth
    for _ in range(_MAX_TRIES):
        while not bit(at):
            if depth == 0:
                return 0
            depth -= 1
            at = depth
        at += _SHIFT
        number = 1
        for _ in range(depth - 1):
            number = number << 1 | bit(at)
            at += _SHIFT
        if number < modulus:
            return number
    return 0


def session_hash(key: str) -> int:
    """The place of a key on the ring of 2**64, as ``ConsistentHash`` and ``Sticky`` take it.

    Example:
        >>> session_hash("header:x-session-id:s1") == session_hash("header:x-session-id:s1")
        True
    """
    return murmur_hash(furc_hash(key.encode(), _MODULUS).to_bytes(4, "little"))
