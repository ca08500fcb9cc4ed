"""Checks of a grammar before it is compiled, which name what would take too long, or end after the first token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MAX_GRAMMAR_BYTES = 1 << 16
"""Maximum size of a grammar or schema."""

MAX_MULTIPLE = 2**22
"""Maximum of ``multipleOf``, without the decimal point and zeros at its end: the automaton has about as many states."""

MAX_RULES, MAX_ALTERNATIVES = 10_000, 10_000
"""Maximum number of rules of a Lark or GBNF grammar, and of alternatives of one of its rules."""

_DATA = ("const", "default", "enum", "examples")
"""Words of a schema whose values are no schemas."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|(?://|#)[^\n]*')
_RULE = re.compile(r"^\s*(?:[?!]*)([a-z_][a-z0-9_-]*)\b[^:\n]*:", re.MULTILINE)
_SCHEMA = re.compile(r"%json\s*(?=\{)")


def check_schema(field: str, text: str) -> None:
    """Check a JSON schema, as far as it can be read; llguidance refuses the rest.

    Raises:
        ValueError: A ``multipleOf`` is too large.
    """
    if "multipleOf" not in text and "\\u" not in text:
        return
    try:
        schema = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError):
        return
    _check_multiples(field, schema)


def check_grammar(field: str, text: str) -> None:
    """Check a Lark or GBNF grammar, with the schemas in it.

    Raises:
        ValueError: It has too many rules or alternatives, or a ``multipleOf`` is too large.
    """
    if "multipleOf" in text or "\\u" in text:
        decoder = json.JSONDecoder(parse_float=Decimal)
        for found in _SCHEMA.finditer(text):
            try:
                schema, _ = decoder.raw_decode(text, found.end())
            except (ValueError, RecursionError):
                continue
            _check_multiples(field, schema)
    rules = list(_RULE.finditer(bare := _LITERAL.sub("_", text)))
    if len(rules) > MAX_RULES:
        raise ValueError(f"{field} has {len(rules):,} rules: allowed are up to {MAX_RULES:,}; use fewer, longer rules")
    for rule, end in zip(rules, [*(each.start() for each in rules[1:]), len(bare)]):
        if (number := 1 + bare.count("|", rule.end(), end)) > MAX_ALTERNATIVES:
            raise ValueError(
                f"{field} has a rule {rule[1][:50]!r} with {number:,} alternatives: allowed are up to "
                f"{MAX_ALTERNATIVES:,}; make them a terminal, whose name is in capitals"
            )


def _check_multiples(field: str, schema: Any) -> None:
    for place, value in _multiples(schema):
        digits = Decimal(value).as_tuple().digits
        number = int("".join(map(str, digits)).rstrip("0") or 0)
        if number > MAX_MULTIPLE:
            raise ValueError(
                f"{field} has multipleOf {str(value)[:40]} at {place[:200]}: allowed are up to {MAX_MULTIPLE:,}, and "
                "such numbers times a power of ten; leave it out, and check the answer"
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
