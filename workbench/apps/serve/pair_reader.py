"""Arguments that are written one by one, read as a JSON object while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from workbench.apps.serve.call_parts import Pairs, match
from workbench.apps.serve.pair_rules import OWN_KEY, PYTHON_WORDS

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_KIND_OF_WORD = {"true": "boolean", "false": "boolean", "null": "null"}
_KEY = re.compile(rf"([{{,]\s*)({OWN_KEY}):")
_WORD = re.compile(r"(?<=[\[:,])(True|False|None)\b")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass
class PairReader:
    """Reads the arguments of a call, behind the text in front of its first key.

    Args:
        pairs: The writing of the arguments.
        kinds: The kinds of values that the argument of a name may have.

    Attributes:
        ended: The call has ended.
    """

    pairs: Pairs
    kinds: Callable[[str], frozenset[str]]
    ended: bool = False
    _state: str = field(default="name", init=False)
    _num_pairs: int = field(default=0, init=False)
    _rest: str = field(default="", init=False)
    _allowed: frozenset[str] = field(default=frozenset(), init=False)
    _end: str = field(default="", init=False)

    def feed(self, text: str, *, final: bool) -> tuple[str, str]:
        """JSON for the beginning of a text, and the part of the text that is not read yet.

        Args:
            text: The text: what the last call did not read, and more.
            final: Nothing follows.
        """
        self._rest, made = text, ""
        while not self.ended and (part := getattr(self, f"_{self._state}")(final)) is not None:
            made += part
        return made, self._rest

    def _key(self) -> tuple[int, str] | None:
        """The end of the key, and the text behind it, as far as that is known."""
        opens = {self.pairs.string_open, self.pairs.other_open}
        found = [(at, -len(text), text) for text in opens if (at := self._rest.find(text)) >= 0]
        if not found:
            return None
        at, _, text = min(found)
        longer = [each for each in opens if len(each) > len(text) and each.startswith(self._rest[at:])]
        return None if longer else (at, text)

    def _name(self, final: bool) -> str | None:
        found = self._key()
        if found is None:
            return None
        at, opened = found
        key, self._rest = self._rest[:at], self._rest[at + len(opened) :]
        begun = ("{" if self._num_pairs == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._num_pairs += 1
        kinds = self.kinds(key)
        if self.pairs.typed:
            kinds = frozenset({"string"}) if opened == self.pairs.string_open else kinds - {"string"}
        self._allowed, self._state = kinds, "value"
        return begun

    def _value(self, final: bool) -> str | None:
        """The beginning of a value."""
        begin, end = self.pairs.wrap or ("", "")
        wraps = bool(begin) and "string" in self._allowed
        if wraps and not final and len(self._rest) < len(begin) and begin.startswith(self._rest):
            return None
        wraps = wraps and self._rest.startswith(begin)
        if not wraps and self._allowed != {"string"}:
            self._state = "other"
            return ""
        self._rest = self._rest[len(begin) if wraps else 0 :]
        self._end = (end if wraps else "") + self.pairs.string_close
        self._state = "quoted" if self.pairs.quoted else "text"
        return '"'

    def _text(self, final: bool) -> str | None:
        """More of a string that a text ends."""
        end = self._end
        text, found, rest = self._rest.partition(end)
        if found:
            self._rest, self._state = rest, "between"
            return json.dumps(text, ensure_ascii=False)[1:]
        held = next((n for n in range(len(end), 0, -1) if text.endswith(end[:n])), 0)
        text, self._rest = text[: len(text) - held], text[len(text) - held :]
        return json.dumps(text, ensure_ascii=False)[1:-1] if text else None

    def _quoted(self, final: bool) -> str | None:
        """More of a string in quotes."""
        found = re.match(
            rf"((?:[^{self.pairs.string_close}\\]|\\.)*)({self.pairs.string_close})?", self._rest, re.DOTALL
        )
        assert found is not None
        self._rest = self._rest[found.end() :]
        text = json.dumps(unescaped(found[1]), ensure_ascii=False)[1:-1]
        if found[2]:
            self._state = "between"
            return text + '"'
        return text or None

    def _other(self, final: bool) -> str | None:
        """A value that is not known to be a string, when it is whole."""
        first = self._rest[:1]
        if not first:
            return None
        if first in "[{" and ("array" if first == "[" else "object") in self._allowed:
            end = self._structure_end()
            if end is None or (read := self._closed(end, final)) is None:
                return None
            value, self._rest = self._rest[:end], self._rest[read:]
            self._state = "between"
            return as_json(value, self.pairs.string_close) if self.pairs.own else value
        close = self.pairs.other_close
        end = self._rest.find(close) if close else self._scalar_end()
        if end < 0:
            return None
        value, self._rest = self._rest[:end], self._rest[end + len(close) :]
        self._state = "between"
        word = PYTHON_WORDS.get(value, value) if self.pairs.words else value
        if self.pairs.typed or _KIND_OF_WORD.get(word) in self._allowed:
            return word
        if "number" in self._allowed and _NUMBER.fullmatch(value):
            return value
        return json.dumps(value, ensure_ascii=False)

    def _closed(self, end: int, final: bool) -> int | None:
        read = match(self.pairs.other_close, self._rest[end:], final=final)
        return None if read is None else end + max(read, 0)

    def _scalar_end(self) -> int:
        found = _SCALAR.match(self._rest)
        assert found is not None
        return -1 if found.end() == len(self._rest) else found.end()

    def _structure_end(self) -> int | None:
        """The end of an array or object; None if it is not there yet."""
        quote = self.pairs.string_close if self.pairs.own else '"'
        depth = at = 0
        while at < len(self._rest):
            if self._rest.startswith(quote, at):
                at = self._string_end(at + len(quote), quote)
                if at < 0:
                    return None
                continue
            depth += (self._rest[at] in "{[") - (self._rest[at] in "}]")
            at += 1
            if depth == 0:
                return at
        return None

    def _string_end(self, at: int, quote: str) -> int:
        if quote != '"':
            end = self._rest.find(quote, at)
            return end + len(quote) if end >= 0 else -1
        found = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL).match(self._rest, at)
        return found.end() if found is not None else -1

    def _between(self, final: bool) -> str | None:
        """Behind a value: another pair, or the end of the call."""
        ended = match(self.pairs.final, self._rest, final=final)
        again = match(self.pairs.separator, self._rest, final=final)
        if ended is None or again is None or max(ended, again) < 0:
            return None
        self._rest, self._state = self._rest[max(ended, again) :], "name"
        self.ended = ended >= 0
        return "}" if self.ended else ""


def unescaped(text: str) -> str:
    """A string that stood in quotes."""
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text, flags=re.DOTALL)


def as_json(text: str, quote: str) -> str:
    """An array or object as JSON, whose strings stand between other texts, and whose keys have no quotes."""
    parts = text.split(quote)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = json.dumps(part, ensure_ascii=False)
        else:
            part = _KEY.sub(lambda found: f"{found[1]}{json.dumps(found[2], ensure_ascii=False)}:", part)
            parts[index] = _WORD.sub(lambda found: PYTHON_WORDS[found[0]], part)
    return "".join(parts)
