"""The description of a form of calls, from which the grammar of an answer and its parser are made."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import NamedTuple

from workbench.models.tokenizer import Tokenizer

ID, INDEX = "call00000", "\0"
MISTRAL, LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_PIECES = re.compile(rf"(<[^<>\s]{{1,40}}>|\[[A-Z_]{{1,40}}\]|{ID}|{INDEX})")
_VARIES = {ID: r"[a-zA-Z0-9_.:-]{1,64}", INDEX: r"[0-9]{1,9}"}


class Pairs(NamedTuple):
    """Arguments that are written one by one: ``key open value close separator key open value close final``.

    Attributes:
        empty: The text from the name to the end of a call without arguments.
        string_open: The text from a key to a value that is a string.
        string_close: The text behind a string, which cannot be part of it unless it is a quote.
        other_open: The text from a key to another value, which is written as JSON.
        other_close: The text behind such a value.
        separator: The text from there to the next key.
        final: The text from the last value to the end of the call, behind its ``close``.
        own: Strings in arrays and objects are written as arguments are, and keys without quotes.
        words: Python's True, False and None may stand for JSON's.
        wrap: Texts that may stand around a string inside of ``string_open`` and ``string_close``, as in XML
            ``<![CDATA[`` and ``]]>``: they are written if it has markup.
    """

    empty: str
    string_open: str
    string_close: str
    other_open: str
    other_close: str
    separator: str
    final: str
    own: bool
    words: bool
    wrap: tuple[str, str] | None = None

    @property
    def quoted(self) -> bool:
        """Strings stand in quotes, with escapes."""
        return self.string_close in ("'", '"')

    @property
    def typed(self) -> bool:
        """The text in front of a value tells whether it is a string."""
        return self.string_open != self.other_open


@dataclass(frozen=True)
class CallText:
    """The form of calls: ``mark opening name between arguments closing``, then more calls, or ``end``.

    ``ID`` stands for the id of a call, ``INDEX`` for a number that counts calls.

    Attributes:
        mark: The text with which calls begin.
        opening: The text from the mark to the name.
        between: The text from the name to the arguments, or to the first key.
        closing: The text from the arguments to the end of a call; an id in it may be left out.
        more: The text from one call to the name of the next. None: there is one call in an answer.
        end: The text behind the last call.
        leads: Calls stand where an answer begins, or nowhere. The mark may then be left out.
        pairs: The writing of arguments that stand one by one. None: they are a JSON object.
        answer_end: The text that ends an answer without calls, if the mark begins with it too.
        in_id: The template shows the id of a call and not its name, which is a part of the id: ``functions.NAME:0``.
    """

    mark: str
    opening: str
    between: str
    closing: str
    more: str | None = None
    end: str = ""
    leads: bool = False
    pairs: Pairs | None = None
    in_id: bool = False
    answer_end: str = ""

    @property
    def gap(self) -> str | None:
        """The text between two calls that have a mark each; None if only the first has one."""
        start = self.mark + self.opening
        return self.more.removesuffix(start) if self.more and not self.leads and self.more.endswith(start) else None

    @property
    def closings(self) -> tuple[str, ...]:
        """The texts that may end a call, the longest first."""
        without = self.closing.removeprefix(f', "id": "{ID}"')
        return (self.closing,) if without == self.closing else (self.closing, without)

    @property
    def marks(self) -> str:
        """All text that is not a name or arguments."""
        texts = [self.mark, self.opening, self.between, self.closing, self.more or "", self.end]
        if self.pairs is not None:
            texts += [text for text in (*self.pairs, *(self.pairs.wrap or ())) if isinstance(text, str)]
        return "".join(texts).replace(INDEX, "").replace(ID, "")

    def new_id(self, name: str, between: str) -> str:
        """The id of a call, which is new unless the text contains it; Mistral's have nine characters.

        Args:
            name: The name of the function.
            between: The text behind it.
        """
        if self.in_id:
            return f"functions.{name}{between[: between.find('<')]}"
        return uuid.uuid4().hex[:9] if self.mark == MISTRAL else f"chatcmpl-tool-{uuid.uuid4().hex}"


def match(pattern: str, text: str, *, final: bool) -> int | None:
    """The length of a text's beginning that a pattern with ``ID`` and ``INDEX`` fits; -1 if it does not fit.

    Returns:
        None if more text decides, and more may follow.
    """
    at = 0
    for piece in re.split(f"({ID}|{INDEX})", pattern):
        if piece in _VARIES:
            found = re.compile(_VARIES[piece]).match(text, at)
            if found is None:
                return -1 if final or at < len(text) else None
            at = found.end()
        elif text.startswith(piece, at):
            at += len(piece)
        else:
            return None if not final and piece.startswith(text[at:]) else -1
    return at if final or not pattern.endswith((ID, INDEX)) or at < len(text) else None


class Literals:
    """Texts as rules of a Lark grammar, which may be written with special tokens or as text.

    Args:
        tokenizer: Knows the special tokens; None if there are none.
        id_pattern: A regular expression for ids of calls.
    """

    def __init__(self, tokenizer: Tokenizer | None, id_pattern: str) -> None:
        self._tokenizer = tokenizer
        self._varies = {ID: id_pattern, INDEX: f"/{_VARIES[INDEX]}/"}
        self._special: frozenset[int] = getattr(tokenizer, "special_token_ids", frozenset())

    def rule(self, text: str) -> str:
        """The text as a part of a rule; nothing for an empty text."""
        pieces = [piece for part in filter(None, _PIECES.split(text)) for piece in self._pieces(part)]
        parts: list[str] = []
        plain = ""  # one lexeme: texts that begin alike are told apart only within one
        for piece in [*pieces, ""]:
            token = None if piece in self._varies else self._token(piece)
            if piece and token is None and piece not in self._varies:
                plain += piece
                continue
            parts += [json.dumps(plain)] if plain else []
            parts += [self._varies.get(piece) or f"({json.dumps(piece)} | <[{token}]>)"] if piece else []
            plain = ""
        return " ".join(parts)

    def until(self, name: str, before: str, end: str) -> str:
        """A rule for the shortest text of a terminal that an end follows."""
        text = f"[lazy]: {before} {json.dumps(end)}"
        pieces = self._pieces(end)
        first = next((i for i, piece in enumerate(pieces) if self._token(piece) is not None), None)
        if first is None:
            return name + text
        begun, token = "".join(pieces[:first]), self._token(pieces[first])
        if begun:
            begun = f"{before} {json.dumps(begun)}"
            before = f"{name}_begun".upper()
            begun = f"\n{before}: {begun}"
        rest = self.rule("".join(pieces[first + 1 :]))
        return f"{name}_text{text}{begun}\n{name}: {name}_text | {before} <[{token}]> {rest}"

    def _pieces(self, text: str) -> list[str]:
        """A text in pieces, some of which are special tokens."""
        if self._tokenizer is None or text in self._varies or self._token(text) is not None:
            return [text]
        special = {self._tokenizer.decode([i]) for i in self._special.intersection(self._tokenizer.encode(text))}
        words = sorted((word for word in special if word and word in text), key=len, reverse=True)
        found = re.split("(" + "|".join(map(re.escape, words)) + ")", text) if words else [text]
        return [piece for piece in found if piece]

    def _token(self, text: str) -> int | None:
        ids = self._tokenizer.encode(text) if text and self._tokenizer is not None else []
        return ids[0] if len(ids) == 1 and (ids[0] in self._special or _PIECES.fullmatch(text)) else None
