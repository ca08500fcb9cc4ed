"""The hash with which vllm-router 0.1.17 places sessions: furc_hash of Facebook's mcrouter over MurmurHash64A.

furc_hash gives a number below 2**23 - 1 that changes rarely when the number of places changes; MurmurHash64A spreads it
over 64 bits. The rules are those of mcrouter/lib/fbi/hash.c.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_MULTIPLIER = 0xC6A4A7935BD1E995
_SEED = 4193360111
_SEED_OF_A_WORD = _SEED ^ 8 * _MULTIPLIER & _MASK
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


def furc_hash(key: bytes, modulus: int) -> int:
    """A number from 0 to ``modulus`` - 1: the place of a key among that many."""
    if modulus <= 1:
        return 0
    word = murmur_hash(key)
    bits = f"{word:064b}"[::-1]  # as text, in which every 23rd bit is a slice
    depth = at = (modulus - 1).bit_length()
    for _ in range(_MAX_TRIES):
        while bits[at] == "0":
            if depth == 0:
                return 0
            depth -= 1
            at = depth
        end = at + _SHIFT * depth
        while len(bits) <= end:  # each word is the hash of the one before; without calls, which cost as much
            mixed = word * _MULTIPLIER & _MASK
            mixed = (_SEED_OF_A_WORD ^ (mixed ^ mixed >> 47) * _MULTIPLIER & _MASK) * _MULTIPLIER & _MASK
            mixed = (mixed ^ mixed >> 47) * _MULTIPLIER & _MASK
            word = mixed ^ mixed >> 47
            bits += f"{word:064b}"[::-1]
        number = int("1" + bits[at + _SHIFT : end : _SHIFT], 2)
        if number < modulus:
            return number
        at = end
    return 0


def session_hash(key: str) -> int:
    """The place of a key on the ring of 2**64, as ``ConsistentHash`` and ``Sticky`` take it.

    Example:
        >>> session_hash("header:x-session-id:s1") == session_hash("header:x-session-id:s1")
        True
    """
    return murmur_hash(furc_hash(key.encode(), _MODULUS).to_bytes(4, "little"))
