"""Rules of a grammar for arguments that are written one by one, from the schema of a tool.

The grammar holds the names, each at most once, and each value. Words of a schema that such a grammar cannot hold are
left out, and named with their places.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from workbench.apps.serve.argument_kinds import kind_of, kinds_of, resolved, without_strings
from workbench.apps.serve.call_parts import Literals, Pairs
from workbench.engine.schema_words import FORMATS, Unserved

_LIKE = {
    "null": "null|None", "boolean": "true|false|True|False", "array": r"\[(.|\n)*", "object": r"\{(.|\n)*",
    "number": r"[-+]?[0-9][-+.0-9eE]*",
}  # fmt: skip
"""The look of a value of each kind. A string does not look like that if nothing else tells them apart."""

_BEGINS_LIKE_A_NUMBER = r"[-+0-9](.|\n)*"
_JSON_WORDS: dict[str, tuple[str, ...]] = {"null": ("null",), "boolean": ("true", "false"), "number": ()}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
OWN_KEY = r'[^\s{}\[\],:"](?:[^{}\[\],:"\n]*[^\s{}\[\],:"])?'
"""A key without quotes in an object whose strings stand between other texts."""
_NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "allOf"}
_WHOLE = {"anyOf", "oneOf", "allOf", "enum", "const", "patternProperties", "minProperties", "maxProperties"}
"""Words that constrain an object as a whole."""

NUM_ORDERS = (128, 32, 8, 1)
"""Numbers of rules for the arguments that are still to come: more allow more orders, in a longer grammar."""

_ONE_BY_ONE = "arguments are written one by one in this model's calls"


class PairRules:
    """The rules for the arguments of a tool.

    Args:
        name: Begins the name of each rule.
        pairs: The writing of the arguments.
        literals: Texts as rules.
        parameters: The schema of the arguments.
        max_orders: Maximum number of rules for the arguments that are still to come, see `NUM_ORDERS`.

    Attributes:
        rules: Rules that the arguments need.
        unserved: Parts of the schema that the rules do not hold.
    """

    def __init__(
        self, name: str, pairs: Pairs, literals: Literals, parameters: dict[str, Any], max_orders: int = NUM_ORDERS[0]
    ) -> None:
        self._max_orders = max_orders
        self.rules: list[str] = []
        self.unserved: list[Unserved] = []
        self._name = name
        self._pairs = pairs
        self._literals = literals
        self._root = parameters
        self._values: dict[str, str] = {}

    def arguments(self, first: str) -> str:
        """The text behind a name, whose first key the text ``first`` precedes."""
        return self._object(self._root, "#", first, self._pairs.final, self._pairs.empty)

    def _drop(self, place: str, word: str, because: str) -> None:
        self.unserved.append(Unserved(f"{place}/{quote(word, safe='$')}", because))

    def _rule(self, body: str) -> str:
        self.rules.append(f"{(name := f'{self._name}_{len(self.rules)}')}: {body or json.dumps('')}")
        return name

    def _terminal(self, body: str) -> str:
        self.rules.append(f"{(name := f'{self._name}_{len(self.rules)}'.upper())}: {body}")
        return name

    def _object(self, schema: Any, place: str, first: str, final: str, empty: str) -> str:
        schema = resolved(schema, self._root)
        properties = dict(schema.get("properties") or {})
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        properties |= {name: schema.get("additionalProperties", {}) for name in required if name not in properties}
        allowed = {
            "minProperties": schema.get("minProperties", 0) <= len(required),
            "maxProperties": bool(properties) and schema.get("maxProperties", 0) >= len(properties),
        }
        for word in _WHOLE & set(schema):
            if not allowed.get(word, False):
                self._drop(place, word, _ONE_BY_ONE)
        lit = self._literals.rule
        if not properties:
            more = schema.get("additionalProperties", True)
            if more is False or schema.get("maxProperties") == 0:
                return lit(empty)
            value = self._value({} if more is True else more, f"{place}/additionalProperties")
            pair = self._rule(f"/[a-zA-Z_][a-zA-Z0-9_]*/ {value}")
            return f"({lit(first)} {pair} ({lit(self._pairs.separator)} {pair})* {lit(final)} | {lit(empty)})"
        pairs = {}
        for name, each in properties.items():
            below = f"{place}/properties/{quote(name.replace('~', '~0').replace('/', '~1'), safe='$')}"
            is_spelled = place == "#" or re.fullmatch(OWN_KEY, name)
            if not is_spelled or any(opened in name for opened in (self._pairs.string_open, self._pairs.other_open)):
                self._drop(f"{place}/properties", name, "calls of this model cannot spell this name")
                continue
            pairs[name] = self._rule(f"{json.dumps(name)} {self._value(each, below)}")
        return self._in_orders(pairs, frozenset(required), lit(first), lit(final), lit(empty))

    def _in_orders(self, pairs: dict[str, str], required: frozenset[str], first: str, final: str, empty: str) -> str:
        """The rule for pairs in all orders that a grammar of bounded size can hold, each pair at most once.

        Args:
            pairs: The rule of each pair, by the name of its key.
            required: Names that have to come.
            first: The text in front of the first pair.
            final: The text behind the last one.
            empty: The text without any.
        """
        needed = [name for name in pairs if name in required]
        rest = [name for name in pairs if name not in required]
        if 2 ** len(pairs) <= self._max_orders:
            free, in_order = list(pairs), []
        elif 2 ** len(needed) * (len(rest) + 1) <= self._max_orders:
            free, in_order = needed, rest
        else:
            free, in_order = [], list(pairs)
        separator, made = self._literals.rule(self._pairs.separator), dict[tuple[Any, ...], str]()

        def behind(left: tuple[str, ...], at: int) -> str:
            """The rule for what follows a pair: one that is left, the next in order or one after it, or the end."""
            if (left, at) not in made:
                ways = [f"{separator} {pairs[name]} {behind(without(left, name), at)}" for name in left]
                if at < len(in_order):
                    ways.append(f"{separator} {pairs[in_order[at]]} {behind(left, at + 1)}")
                    ways += [behind(left, at + 1)] if in_order[at] not in required else []
                elif required.isdisjoint(left):
                    ways.append(final or '""')
                made[left, at] = self._rule(" | ".join(ways))
            return made[left, at]

        begun = "" if required & pairs.keys() else empty or '""'
        for at in reversed(range(len(in_order))):  # from the end, so that long lists do not nest calls
            way = f"{first} {pairs[in_order[at]]} {behind(tuple(free), at + 1)}"
            later = begun if in_order[at] not in required else ""
            begun = self._rule(" | ".join(filter(None, [way, later])))
        ways = [f"{first} {pairs[name]} {behind(without(tuple(free), name), 0)}" for name in free]
        return f"({' | '.join(filter(None, [*ways, begun]))})"

    def _value(self, schema: Any, place: str, opened: tuple[str, str] | None = None) -> str:
        """The rule for a value, with the text in front of it: behind a key, if no other is given."""
        opened = opened or (self._pairs.string_open, self._pairs.other_open)
        known = json.dumps([schema, opened], sort_keys=True)
        if known not in self._values:
            self._values[known] = name = f"{self._name}_value{len(self._values)}"
            kinds, lit = kinds_of(schema, self._root), self._literals.rule
            others, ways = kinds - {"string"}, []
            like = [] if self._pairs.typed else [_LIKE[kind] for kind in sorted(others)]
            if like and "string" in kinds:
                held = others - {"array", "object"}
                if (scalars := self._scalars(schema, held)) is None:
                    held -= {"number"}
                    scalars = self._scalars(schema, held) or []
                    like.append(_BEGINS_LIKE_A_NUMBER)
                if scalars:
                    ways.append(f"{lit(opened[1])} {self._until(' | '.join(scalars), self._pairs.other_close)}")
                others -= held
            if "string" in kinds and (text := self._string(schema, place, like)) is not None:
                ways.append(f"{lit(opened[0])} {text}")
            if rules := self._others(schema, place, others):
                ways.append(f"{lit(opened[1])} ({rules}) {lit(self._pairs.other_close)}")
            if not ways:
                self._drop(place, "enum", "calls of this model cannot spell any of the values")
                ways.append(self._value({}, place, opened))
            self.rules.append(f"{name}: {' | '.join(ways)}")
        return self._values[known]

    # -- strings -------------------------------------------------------------------------------------------------------

    def _until(self, terminal: str, end: str) -> str:
        """The rule for a terminal and the text that ends it, which are one lexeme."""
        before = self._terminal(terminal)
        self.rules.append(self._literals.until(before.lower(), before, end))
        return before.lower()

    def _string(self, schema: Any, place: str, like: Sequence[str]) -> str | None:
        """The rule for a string and the text that ends it; None if no allowed string can be spelled.

        Args:
            schema: The schema of the value.
            place: Its place.
            like: Regular expressions for texts that are taken for other values.
        """
        pairs, parts = self._pairs, self._strings(schema, place)
        if parts is None:
            return None
        if pairs.quoted:
            mark = pairs.string_close
            parts.append(rf"/([^{mark}\\\n]|\\[{mark}\\nrt])*/")
        plain = ["/(.|\\n)*/", *parts, *(f"~/{other}/" for other in like)]
        if pairs.wrap is None:
            return self._until(" & ".join(plain), pairs.string_close)
        begin, end = pairs.wrap
        plain.append("~/" + re.escape(begin).replace("/", r"\/") + "(.|\\n)*/")
        wrapped = self._until(" & ".join(["/(.|\\n)*/", *parts]), end + pairs.string_close)
        return f"({self._until(' & '.join(plain), pairs.string_close)} | {self._literals.rule(begin)} {wrapped})"

    def _scalars(self, schema: Any, kinds: frozenset[str], depth: int = 0) -> list[str] | None:
        """Terminals for null, booleans and numbers; None if numbers are held to more than a terminal says."""
        schema = resolved(schema, self._root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            spelled = [json.dumps(value) for value in values if kind_of(value) in kinds]
            words = [word for word, name in PYTHON_WORDS.items() if self._pairs.words and name in spelled]
            return [json.dumps(text) for text in (*spelled, *words)]
        found: list[str] = []
        if "number" in kinds and (_NUMERIC & set(schema) or depth > 20):
            return None
        for word in ("anyOf", "oneOf"):
            for each in schema.get(word, ()):
                some = self._scalars(each, kinds & kinds_of(each, self._root), depth + 1)
                if some is None:
                    return None
                found += some
        if found or "anyOf" in schema or "oneOf" in schema:
            return found
        whole = "integer" in str(schema.get("type")) and "number" not in str(schema.get("type"))
        for kind in sorted(kinds):
            names = _JSON_WORDS[kind]
            words = [word for word, name in PYTHON_WORDS.items() if self._pairs.words and name in names]
            words = [json.dumps(word) for word in (*names, *words)]
            found += words or ["/-?(0|[1-9][0-9]*)/" if whole else "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?/"]
        return found

    def _strings(self, schema: Any, place: str, depth: int = 0) -> list[str] | None:
        """Terminals that a string fits all of; None if no string does."""
        schema = resolved(schema, self._root)
        if depth > 20 or "string" not in kinds_of(schema, self._root):
            return None
        parts: list[str] = []
        values = [value for value in schema.get("enum") or () if isinstance(value, str)]
        values = [schema["const"]] if "const" in schema else values
        if values:
            spelled = [json.dumps(text, ensure_ascii=False) for text in map(self._spelled, values) if text is not None]
            if not spelled:
                return None
            parts.append(f"({' | '.join(spelled)})")
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if low or high is not None:
            letter = rf"([^{self._pairs.string_close}\\\n]|\\.)" if self._pairs.quoted else r"(.|\n)"
            parts.append(f"/{letter}{{{int(low)},{'' if high is None else int(high)}}}/")
        if isinstance(pattern := schema.get("pattern"), str):
            parts += self._pattern(pattern, place)
        if isinstance(word := schema.get("format"), str) and word in FORMATS:
            self._drop(place, "format", "text without quotes is held to no format")
        for word in ("anyOf", "oneOf"):
            if word in schema:
                ways = [self._strings(each, f"{place}/{word}/{i}", depth + 1) for i, each in enumerate(schema[word])]
                if kept := [way for way in ways if way is not None]:
                    parts.append(
                        "(" + " | ".join(self._terminal(" & ".join(way or ["/(.|\\n)*/"])) for way in kept) + ")"
                    )
        for i, each in enumerate(schema.get("allOf") or ()):
            parts += self._strings(each, f"{place}/allOf/{i}", depth + 1) or []
        return parts

    def _spelled(self, value: str) -> str | None:
        """A string as it is written; None if its end would be taken for the text behind it."""
        mark = self._pairs.string_close
        if self._pairs.quoted:
            return escaped(value, mark)
        return None if (value + mark).index(mark) < len(value) else value

    def _pattern(self, pattern: str, place: str) -> Iterable[str]:
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[begins : len(pattern) - ends]
        if re.search(r"(?<!\[)(?<!\\)[\^$]", inner) or (self._pairs.quoted and "\\" in inner) or "|" in inner:
            self._drop(place, "pattern", "anchors and alternatives at the top are not read here: put them in a group")
            return
        around = ["" if begins else "(.|\\n)*", "" if ends else "(.|\\n)*"]
        yield "/" + around[0] + re.sub(r"(?<!\\)/", r"\\/", f"({inner})") + around[1] + "/"

    # -- other values --------------------------------------------------------------------------------------------------

    def _others(self, schema: Any, place: str, kinds: frozenset[str]) -> str:
        """The rule for a value that is not a string; "" if there is none."""
        if not kinds:
            return ""
        pairs, own = self._pairs, kinds & {"array", "object"}
        ways = []
        if pairs.own and own:
            kinds -= own
            ways += [self._nested(schema, kind, place) for kind in sorted(own)]
        if pairs.words and (words := kinds & {"null", "boolean"}):
            kinds -= words
            ways += self._scalars(schema, words) or []
        if kinds:
            kept = without_strings(schema, self._root, kinds)
            places = ("$defs", "definitions") if '"$ref"' in json.dumps(kept) else ()
            definitions = {word: self._root[word] for word in places if word in self._root}
            ways.append(f"%json {json.dumps({**kept, **definitions})}")
        return " | ".join(ways)

    def _nested(self, schema: Any, kind: str, place: str) -> str:
        """An array or an object whose strings are written as arguments are."""
        found = resolved(schema, self._root)
        for word in ("anyOf", "oneOf"):
            ways = [each for each in found.get(word) or () if kind in kinds_of(each, self._root)]
            if ways:
                return " | ".join(self._nested(each, kind, f"{place}/{word}") for each in ways)
        if kind == "object":
            return self._object(found, place, "{", "}", "{}")
        for word in ("prefixItems", "minItems", "maxItems", "enum", "const", "allOf"):
            if word in found:
                self._drop(place, word, _ONE_BY_ONE)
        opened = (self._pairs.string_close, "")
        item = self._value(found.get("items", {}), f"{place}/items", opened)
        return f'"[" ({item} ("," {item})*)? "]"'


def without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The names but one."""
    return tuple(other for other in names if other != name)


def escaped(text: str, mark: str) -> str:
    """A string as it stands in quotes."""
    for plain, written in (("\\", "\\\\"), (mark, "\\" + mark), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, written)
    return text
