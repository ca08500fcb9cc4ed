"""From ``SamplingParams.structured_outputs`` to the grammar that llguidance compiles.

The engine takes a value's text and its size, and all else happens in the process of the text. A part that would take
too long there, or end an output after its first token, is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, grammar_from

from workbench.engine.schema_words import served

MAX_GRAMMAR_BYTES = 1 << 16
"""Maximum size of a grammar or schema."""

MAX_MULTIPLE = 2**22
"""Maximum of ``multipleOf``, without the decimal point and zeros at its end: the automaton has about as many states."""

MAX_RULES, MAX_ALTERNATIVES = 10_000, 1_000
"""Maximum number of rules of a grammar in Lark, and of alternatives of one of its rules, which are in one row of the
parser together: see `grammar_process.LIMITS`."""

_DATA = ("const", "default", "enum", "examples")
"""Words of a schema whose values are not schemas."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?|#[^\n]*')
"""A text, a regular expression or a comment; one without an end ends with its line, so that each is read once."""

_RULE = re.compile(r"^[?!]?([A-Za-z_][A-Za-z0-9_-]*)(?:\.\d+)?[ \t]*:", re.MULTILINE)
_SCHEMA = re.compile(r"%json\s*(?=\{)")


def text_of(wanted: Mapping[str, Any]) -> tuple[str, str]:
    """The word of ``SamplingParams.structured_outputs``, and its value as text.

    Raises:
        ValueError: It is too large, or cannot be read.
    """
    ((kind, value),) = wanted.items()
    field = f"structured_outputs[{kind!r}]"
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"{field} is not JSON: {problem}") from None
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{field} holds {size:,} bytes: allowed are up to {MAX_GRAMMAR_BYTES:,}")
    return kind, text


def grammar_of(kind: str, text: str) -> str:
    """The grammar that llguidance compiles for what `text_of` returned.

    Raises:
        ValueError: It cannot be read, or is refused.
    """
    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(_served_schema(text))
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(json.loads(text)))
    grammar = _with_served_schemas(grammar_from("grammar", text))
    _check_grammar(grammar)
    return grammar


def first_line(message: str) -> str:
    """The first line of an error message, shortened."""
    return message.strip().partition("\n")[0][:300]


def _choice(words: Sequence[str]) -> str:
    """A Lark grammar of some texts.

    They are one terminal: a row of the parser holds an item for each alternative of a rule, and has a limit.
    """
    texts = " | ".join(json.dumps(word, ensure_ascii=False) for word in dict.fromkeys(words) if word)
    start = "start: WORD?" if "" in words else "start: WORD"
    return f"{start}\nWORD: {texts}" if texts else 'start: ""'


def _served_schema(text: str) -> str:
    """A JSON schema without the words that are annotations to llguidance, which refuses what cannot be read.

    Raises:
        ValueError: A word that constrains is not served, or would take too long.
    """
    try:
        _check_multiples(json.loads(text, parse_float=Decimal))
        schema = json.loads(text)
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, json.JSONDecodeError | RecursionError):
            return text
        raise
    kept, unserved = served(schema)
    if unserved:
        raise ValueError("; ".join(map(str, unserved[:4])))
    return text if kept is schema else json.dumps(kept)


def _with_served_schemas(text: str) -> str:
    """A grammar in Lark whose schemas (``%json``) are read as a schema alone is.

    Raises:
        ValueError: A word of a schema is not served, or would take too long.
    """
    decoder, end, parts = json.JSONDecoder(), 0, []
    for found in _SCHEMA.finditer(text):
        if found.start() >= end:
            try:
                after = decoder.raw_decode(text, found.end())[1]
            except (ValueError, RecursionError):
                continue
            try:
                parts += [text[end : found.end()], _served_schema(text[found.end() : after])]
            except ValueError as problem:
                raise ValueError(f"at {text.count(chr(10), 0, found.start()) + 1}(1): {problem}") from None
            end = after
    return "".join([*parts, text[end:]])


def _check_grammar(text: str) -> None:
    """Check the size of a grammar in Lark."""
    bare = _LITERAL.sub("_", text)
    rules = list(_RULE.finditer(bare))
    if len(rules) > MAX_RULES:
        raise ValueError(f"it has {len(rules):,} rules: allowed are up to {MAX_RULES:,}; use fewer, longer rules")
    for rule, end in zip(rules, [*(each.start() for each in rules[1:]), len(bare)]):
        is_terminal = rule[1].isupper()
        if not is_terminal and (number := 1 + bare.count("|", rule.end(), end)) > MAX_ALTERNATIVES:
            raise ValueError(
                f"its rule {rule[1][:50]!r} has {number:,} alternatives: allowed are up to {MAX_ALTERNATIVES:,}; make "
                "them a terminal, whose name is in capitals"
            )


def _check_multiples(schema: Any) -> None:
    for place, value in _multiples(schema):
        digits = Decimal(value).as_tuple().digits
        number = int("".join(map(str, digits)).rstrip("0") or 0)
        if number > MAX_MULTIPLE:
            raise ValueError(
                f"multipleOf is {str(value)[:40]} at {place[:200]}: allowed are up to {MAX_MULTIPLE:,}, and such "
                "numbers times a power of ten; leave it out, and check the answer"
            )


def _multiples(schema: Any) -> Iterator[tuple[str, int | Decimal]]:
    """Every ``multipleOf`` of a schema, with its place; references lead to other places of the same schema."""
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, list):
            waiting += [(f"{place}/{index}", each) for index, each in enumerate(part)]
        elif isinstance(part, dict):
            for name, each in part.items():
                is_number = isinstance(each, int | Decimal) and not isinstance(each, bool)
                if name == "multipleOf" and is_number and Decimal(each).is_finite():
                    yield place, each
                elif name not in _DATA or place.endswith("/properties"):
                    waiting.append((f"{place}/{name}", each))
