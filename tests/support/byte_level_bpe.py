"""Byte-level BPE from its definition, in a few lines of Python over PyPI regex."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import regex


def _letter_of_byte() -> dict[int, str]:
    """GPT-2's encoding of bytes as printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


LETTERS = _letter_of_byte()


def cut(text: str, pattern: str) -> list[str]:
    """A text cut into the matches of a pattern and the pieces between them."""
    pieces, end = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in (*pieces, text[end:]) if piece]


def numbered(texts: Iterable[str]) -> dict[str, int]:
    """The place of each text, of equal ones the last."""
    return {text: place for place, text in enumerate(texts)}


def reference_bpe(
    text: str, patterns: Iterable[str], ids: Mapping[str, int], ranks: Mapping[str, int], whole_words: bool
) -> list[int]:
    """Token ids of a text without special tokens; bytes without a token are left out.

    Args:
        text: The text.
        patterns: Expressions that cut it, one after another.
        ids: Token ids by token, see `numbered`.
        ranks: Ranks by merge.
        whole_words: Whether a piece that is a token stays whole.
    """
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in cut(piece, pattern)]
    found = []
    for piece in pieces:
        word = [LETTERS[byte] for byte in piece.encode()]
        whole = "".join(word)
        word = [whole] if whole_words and whole in ids else [letter for letter in word if letter in ids]
        while len(word) > 1:
            rank, place = min((ranks.get(f"{a} {b}", 1 << 30), i) for i, (a, b) in enumerate(pairwise(word)))
            if rank == 1 << 30:
                break
            word[place : place + 2] = [word[place] + word[place + 1]]
        found += [ids[token] for token in word]
    return found
