"""The bytes of a token: of its text, or, for a token that is part of a character, those that the vocabulary names.

Byte-level vocabularies, as in GPT-2, write each byte as a letter; those of sentencepiece have tokens such as ``<0xF0>``
for single bytes, and "▁" for a space, which a decoder drops at the beginning of a text.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

REPLACEMENT = "\ufffd"
"""Stands in a text for bytes that are not a character."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes of a token. Joined, those of an output's tokens are the bytes of its text.

    Args:
        tokenizer: The tokenizer; one with ``piece(token)`` tells the token as its vocabulary writes it.
        token: The token.
        text: Its text, if it is decoded alone.
    """
    piece = tokenizer.piece(token) if hasattr(tokenizer, "piece") else None
    if piece is not None:
        if REPLACEMENT in text and (found := _bytes_of(piece)) is not None:
            return found
        if piece.startswith(_SPACE) and piece.replace(_SPACE, " ") == f" {text}":
            text = f" {text}"
    return text.encode("utf-8", "replace")


def _bytes_of(piece: str) -> bytes | None:
    """The bytes that a token of a vocabulary stands for; None if it is a text like any other."""
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    letters = byte_letters()
    return bytes([letters[letter] for letter in piece]) if letters.keys() >= {*piece} else None


@cache
def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Bytes that can be printed stand for themselves, the others for letters from U+0100 on, in order.
    Source: GPT-2's ``bytes_to_unicode``.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (value for value in range(256) if value not in plain)
    return {chr(value): value for value in plain} | {chr(0x100 + place): value for place, value in enumerate(others)}
