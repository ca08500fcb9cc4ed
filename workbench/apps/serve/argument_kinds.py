"""The kinds of values that the schema of an argument allows."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

_ALL = frozenset({"null", "boolean", "number", "string", "array", "object"})


def kind_of(value: Any) -> str:
    """The kind of a JSON value; integers are numbers."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """A schema without a reference at its top."""
    for _ in range(20):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        place = root
        for name in unquote(reference.removeprefix("#")).split("/")[1:]:
            place = place.get(name.replace("~1", "/").replace("~0", "~"), {}) if isinstance(place, dict) else {}
        schema = {**(place if isinstance(place, dict) else {}), **{k: v for k, v in schema.items() if k != "$ref"}}
    return schema if isinstance(schema, dict) else {}


def kinds_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """The kinds of values that a schema may allow."""
    schema = resolved(schema, root)
    if depth > 20:
        return _ALL
    kinds = _ALL
    if (named := schema.get("type")) is not None:
        listed = named if isinstance(named, list) else [named]
        kinds &= {"number" if kind == "integer" else str(kind) for kind in listed}
    if isinstance(schema.get("enum"), list):
        kinds &= {kind_of(value) for value in schema["enum"]}
    if "const" in schema:
        kinds &= {kind_of(schema["const"])}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            kinds &= frozenset[str]().union(*(kinds_of(each, root, depth + 1) for each in schema[word]))
    for each in schema.get("allOf") or ():
        kinds &= kinds_of(each, root, depth + 1)
    return kinds


def property_kinds(parameters: dict[str, Any] | None, key: str) -> frozenset[str]:
    """The kinds of values that an argument may have."""
    top = resolved(parameters or {}, parameters)
    properties = top.get("properties") or {}
    if key in properties:
        return kinds_of(properties[key], parameters)
    return kinds_of(top.get("additionalProperties"), parameters)


def without_strings(schema: Any, root: Any, kinds: frozenset[str]) -> dict[str, Any]:
    """A schema that allows the same values of some kinds, and no others."""
    schema = resolved(schema, root)
    named = sorted(kinds)
    if isinstance(listed := schema.get("type"), (str, list)):
        own = [listed] if isinstance(listed, str) else listed
        named = [kind for kind in own if ("number" if kind == "integer" else kind) in kinds]
    kept: dict[str, Any] = {**schema, "type": named}
    if isinstance(schema.get("enum"), list):
        kept["enum"] = [value for value in schema["enum"] if kind_of(value) in kinds]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            ways = [(each, kinds & kinds_of(each, root)) for each in schema[word]]
            kept[word] = [without_strings(each, root, some) for each, some in ways if some]
    return kept
