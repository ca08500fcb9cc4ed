"""SentencePiece's BPE with PyPI ``sentencepiece``: neighbours are merged whose concatenation is a token.

Those of the highest score are merged first, of equal ones the left ones, as in llama.cpp. PyPI ``tokenizers`` has no
scores: it would need every way to cut a token into two as a merge, 80 MiB and 3 s for the 262,144 tokens of Gemma. It
finds special tokens, and writes tokens as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import AddedToken, Tokenizer, decoders, models

from workbench.models.gguf.fields import GGUFError
from workbench.models.gguf.types import TokenType

_SPACE = "▁"
_BPE = 2  # sentencepiece's TrainerSpec.model_type
_LONG_TEXT = 4096
_PIECES_AT_A_TIME = 8192
"""Parts of a text that become Python's numbers in one call, which holds Python's lock. No part is dropped."""


class SentencePieceBPE:
    """Text to token ids and back.

    Args:
        tokens: The text of each token; special tokens as they are written in a text.
        scores: Their scores.
        types: Their types, `TokenType`; neighbours are joined to NORMAL and UNUSED ones.
        special: Ids of tokens that are found in a text before it is cut.
        add_prefix: Whether a text begins with a space, also after a special token.

    Raises:
        GGUFError: The order of merges is unknown.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        special: Sequence[int],
        add_prefix: bool,
    ) -> None:
        self._tokens = tokens
        self._special = special
        self._processor = SentencePieceProcessor(model_proto=_model(tokens, scores, types))
        self._splitter = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._splitter.enable_truncation(_PIECES_AT_A_TIME)
        self._splitter.add_special_tokens([AddedToken(tokens[token], normalized=False) for token in special])
        self._prefix = _SPACE if add_prefix else ""
        strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
        self._decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Other threads can run meanwhile."""
        found: list[int] = []
        for part in self._parts(text):
            if isinstance(part, int):
                found.append(part)
            else:
                found += [token for token in self._processor.encode(self._prefix + part) if token < len(self._tokens)]
        return found

    def _parts(self, text: str) -> Iterator[str | int]:
        """The parts of a text: a special token's id, or text between such tokens."""
        if len(text) < _LONG_TEXT:
            first = self._splitter.encode(text, add_special_tokens=False)
        else:  # releases Python's lock, unlike the other
            first = self._splitter.encode_batch([text], add_special_tokens=False)[0]
        for cut in (first, *first.overflowing):
            for number, (start, end) in zip(cut.ids, cut.offsets):
                yield self._special[number - 1] if number else text[start:end]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; bytes that are not a character become U+FFFD."""
        return self._decoder.decode([self._tokens[token] for token in ids if 0 <= token < len(self._tokens)])

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary writes it."""
        return self._tokens[token]


def _model(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> bytes:
    """The model that sentencepiece reads.

    Tokens that merges do not reach get a name with a space, which no text has after sentencepiece has replaced its
    spaces. Sentencepiece needs an unknown token, so a vocabulary without one gets another token at its end.
    """
    merged = (TokenType.NORMAL, TokenType.UNUSED)
    of_merges = [score for token, score, kind in zip(tokens, scores, types) if kind in merged and len(token) > 1]
    if len(of_merges) > 1 and len(set(of_merges)) == 1:
        raise GGUFError("tokenizer.ggml.scores are all the same, so the order of merges is unknown")
    model = ModelProto()
    unknown = types.index(TokenType.UNKNOWN) if TokenType.UNKNOWN in types else len(tokens)
    has_bytes = {token for token, kind in zip(tokens, types) if kind == TokenType.BYTE} >= _BYTES
    reached = (*merged, TokenType.BYTE) if has_bytes else merged
    for index, (token, score, kind) in enumerate(zip(tokens, scores, types)):
        piece = model.pieces.add()
        piece.score = score
        if kind in reached and token and "\0" not in token:
            piece.piece = token
            piece.type = kind if kind == TokenType.BYTE else TokenType.NORMAL  # sentencepiece splits UNUSED ones again
        else:
            piece.piece, piece.type = f" {index}", TokenType.UNKNOWN if index == unknown else TokenType.CONTROL
    if unknown == len(tokens):
        model.pieces.add(piece=f" {unknown}", type=TokenType.UNKNOWN)
    model.trainer_spec.model_type = _BPE
    model.trainer_spec.byte_fallback = has_bytes
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
