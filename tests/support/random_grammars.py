"""Random schemas, patterns, choices and grammars, and hostile ones."""

import json
import random
from typing import Any

import jsonschema
import regex

LETTERS = "abcxyz"


def random_constraint(rng: random.Random) -> dict[str, Any]:
    """A value for ``structured_outputs``."""
    kind = rng.choice(["json", "json", "regex", "regex", "choice", "grammar"])
    if kind == "json":
        return {kind: random_schema(rng)}
    if kind == "regex":
        return {kind: random_pattern(rng)}
    if kind == "choice":
        return {kind: [random_word(rng) for _ in range(rng.randint(1, 6))]}
    return {kind: f'start: item ("," item)*\nitem: /{random_pattern(rng, 1)}/ | "{random_word(rng)}" | "(" start ")"'}


def random_word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS + "é0 _") for _ in range(rng.randint(1, 8))).strip() or "a"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema that has values."""
    kinds = ["integer", "string", "boolean", "null", "enum", "number"]
    kinds += ["object", "object", "array", "anyOf"] if depth else []
    match rng.choice(kinds):
        case "integer":
            low = rng.randint(-50, 50)
            limits = {"minimum": low, "maximum": low + rng.randint(0, 2000)} if rng.random() < 0.5 else {}
            return {"type": "integer", **limits}
        case "number":
            return {"type": "number", **({"minimum": 0, "maximum": rng.randint(1, 9)} if rng.random() < 0.5 else {})}
        case "string":
            if rng.random() < 0.3:
                return {"type": "string", "pattern": f"^{random_pattern(rng, 1)}$"}
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
        case "enum":
            return {"enum": rng.sample(["a", "bc", 1, -7, True, None, 2.5, "é"], rng.randint(1, 4))}
        case "object":
            names = rng.sample(["a", "b", "name", "x y", "é"], rng.randint(0, 3))
            required = [name for name in names if rng.random() < 0.6]
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case kind:
            return {"type": kind}


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    """A regular expression that re and llguidance read alike."""
    if not depth or rng.random() < 0.3:
        return rng.choice([*LETTERS, "[a-c]", "[0-9]", "[^a-y ]" if depth > 1 else "[xyz]", "ab"])
    parts = [random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        return f"({'|'.join(parts)})"
    return "".join(f"({part}){rng.choice(['', '', '*', '+', '?', '{1,3}', '{2}'])}" for part in parts)


def is_valid(constraint: dict[str, Any], text: str) -> bool:
    """Whether a complete output is what was asked for, by other means than llguidance; True for a Lark grammar."""
    ((kind, value),) = constraint.items()
    match kind:
        case "json":
            try:
                jsonschema.validate(json.loads(text), value)
            except (jsonschema.ValidationError, ValueError):
                return False
            return True
        case "regex":
            return regex.fullmatch(value, text) is not None
        case "choice":
            return text in value
    return True


def is_beginning(constraint: dict[str, Any], text: str) -> bool:
    """Whether an output may become what was asked for; True where only llguidance knows."""
    ((kind, value),) = constraint.items()
    if kind == "regex":
        return regex.fullmatch(value, text, partial=True) is not None
    return kind != "choice" or any(choice.startswith(text) for choice in value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def referring(count: int, **around: Any) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a chain."""
    definitions: dict[str, Any] = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}", **around} for i in range(count)}
    return {"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{count}": {"type": "integer"}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "repeated a million times": {"regex": "a{1000000}"},
    "nested repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "exponential states": {"regex": "(([a-z]*[0-9]?){3}[a-z0-9]*x.{30}){4}"},
    "nested groups": {"regex": "(" * 10_000 + "a" + ")" * 10_000},
    "nested parentheses": {"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000},
    "a chain of rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4500)) + '\nr4500: "x"'},
    "many choices": {"choice": [f"w{i}" for i in range(6000)]},
    "a chain of references": {"json": referring(1900)},
    "a circle of references": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "nested objects": {"json": nested(90)},
    "nested too deep for Python": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}},
    "long strings": {"json": {"type": "string", "minLength": 10_000_000}},
    "many items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
    "nothing is valid": {"json": False},
    "ambiguous": {"grammar": 'start: start start | "a" | ""'},
    "too large": {"regex": "a" * 70_000},
}
"""Grammars that are meant to take much time or memory, or to crash."""
