"""Words of a JSON schema that constrain and that llguidance does not implement, found with their places.

The rest of a schema is compiled. The caller refuses the words, or lets that part of an output be free.
Formats that llguidance does not know are annotations, as JSON Schema says, and so are words that no rule names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from workbench.engine.schema_numbers import UNBOUND, Bounds, is_exact, with_kept_bounds

FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""The formats that llguidance constrains."""

UNSERVED = {
    "not": "a grammar says what is allowed, and not what is forbidden",
    "if": "a condition over a whole value needs a parser with memory",
    "contains": "one element that fits needs a parser with memory",
    "uniqueItems": "elements that differ need a parser with memory",
    "propertyNames": "the names of properties are given by properties and patternProperties",
    "dependentRequired": "properties that depend on others need a parser with memory",
    "dependentSchemas": "properties that depend on others need a parser with memory",
    "dependencies": "properties that depend on others need a parser with memory",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_FREE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}),
    "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},), "propertyNames": (True, {}),
}  # fmt: skip
"""Values with which such a word allows everything."""

_PARTS = {"if": ("then", "else"), "contains": ("minContains", "maxContains")}
"""Words that mean nothing without another."""

_ONE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PATTERN = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\(?:[1-9bB]|k<)")


class Unserved(NamedTuple):
    """A part of a schema that constrains nothing here.

    Attributes:
        place: Its place, a JSON pointer as part of a URL.
        because: The reason.
    """

    place: str
    because: str

    def __str__(self) -> str:
        return f"{self.place} is not supported: {self.because}"


def served(schema: Any) -> tuple[Any, list[Unserved]]:
    """A schema without its words that are not served, and these; the same object if it is served as it is.

    Raises:
        ValueError: It is nested too deeply.
    """
    found: list[Unserved] = []
    try:
        kept = _served(schema, "#", schema, found, UNBOUND)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return (schema if kept == schema else kept), found


def _served(part: Any, place: str, root: Any, found: list[Unserved], around: Bounds = UNBOUND) -> Any:
    """A part without its words that are not served; ``around`` bounds its values, too."""
    if not isinstance(part, dict):
        return part
    dropped = set()
    for word, because in _unserved(part, root):
        dropped |= {word, *_PARTS.get(word, ())}
        if because:
            found.append(Unserved(f"{place}/{quote(word, safe='$')}", because))
    bounds = _bounds(part, root, around, frozenset())
    kept = with_kept_bounds({word: value for word, value in part.items() if word not in dropped}, bounds)
    for word, value in kept.items():
        below = f"{place}/{quote(word, safe='$')}"
        if word in _ONE and isinstance(value, dict):
            kept[word] = _served(value, below, root, found)
        elif word in _LISTS and isinstance(value, list):
            outer = bounds if word in ("anyOf", "oneOf") else UNBOUND
            kept[word] = [_served(each, f"{below}/{index}", root, found, outer) for index, each in enumerate(value)]
        elif word in _MAPS and isinstance(value, dict):
            kept[word] = {}
            for name, each in value.items():
                place_of_name = f"{below}/{quote(name.replace('~', '~0').replace('/', '~1'), safe='$')}"
                if word == "patternProperties" and _PATTERN.search(name):
                    found.append(Unserved(place_of_name, _LOOKS))
                else:
                    kept[word][name] = _served(each, place_of_name, root, found)
    return kept


_LOOKS = "look-around, back-references and \\b are not regular: write the pattern without them"


def _unserved(part: dict[str, Any], root: Any) -> Iterator[tuple[str, str]]:
    """The words of one schema that are left out, each with its reason; "" for one that constrains nothing."""
    for word, because in UNSERVED.items():
        if word in part:
            is_free = any(part[word] == free and type(part[word]) is type(free) for free in _FREE.get(word, ()))
            is_free = is_free or (word == "if" and not {"then", "else"} & set(part))
            yield word, "" if is_free else because
    for word, needed in (("minContains", "contains"), ("maxContains", "contains"), ("then", "if"), ("else", "if")):
        if word in part and needed not in part:
            yield word, ""
    for word in ("const", "enum"):
        if word in part and not is_exact(part[word]):
            yield word, "integers beyond 2**53 are not told apart"
    if isinstance(format := part.get("format"), str) and format not in FORMATS:
        yield "format", ""
    if isinstance(pattern := part.get("pattern"), str) and _PATTERN.search(pattern):
        yield "pattern", _LOOKS
    if isinstance(reference := part.get("$ref"), str) and _target(reference, root) is None:
        yield "$ref", "it leads to no place of this schema"


def _bounds(part: Any, root: Any, around: Bounds, seen: frozenset[str]) -> Bounds:
    """The bounds of a schema together with those of its allOf, of what it refers to, and with those around it."""
    if not isinstance(part, dict):
        return around
    bounds = around.also(part)
    for each in part["allOf"] if isinstance(part.get("allOf"), list) else ():
        bounds = _bounds(each, root, bounds, seen)
    reference = part.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        bounds = _bounds(_target(reference, root), root, bounds, seen | {reference})
    return bounds


def _target(reference: str, root: Any) -> Any:
    """The schema to which a JSON pointer leads, None if to none; llguidance reads no other references."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    place = root
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdigit() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place
