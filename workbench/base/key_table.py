"""Tables of the keys of outside formats: each key is read, harmless for a stated reason, or refused by name.

A key, a value or a form that no rule knows is refused: ignoring it could change what a model computes, and fluent
text would hide that. Each reader has its table beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from workbench.base.text import shown

Verdict = Literal["read", "harmless", "refused"]


class UnknownKeyError(ValueError):
    """A file holds a key or a value that is refused; the message names it and what to do."""


class Rule(NamedTuple):
    """A statement about some keys.

    Attributes:
        verdict: "read", "harmless" or "refused".
        keys: Names of keys, or patterns with ``*``, separated by spaces.
        because: The reason.
        values: Values for which the rule holds; None for all values.
    """

    verdict: Verdict
    keys: str
    because: str
    values: tuple[Any, ...] | None = None

    def holds(self, key: str, value: Any) -> bool:
        """Whether the rule says something about a key with a value."""
        known = any(fnmatchcase(key, pattern) for pattern in self.keys.split())
        return known and (self.values is None or any(same(value, one) for one in self.values))


class Finding(NamedTuple):
    """The verdict on a key.

    Attributes:
        key: The key.
        value: Its value.
        verdict: "read", "harmless" or "refused".
        because: The reason.
    """

    key: str
    value: Any
    verdict: Verdict
    because: str


OFF = Rule("harmless", "*", "it is switched off, and nothing here has it", (None, False, [], {}, "", 0))
"""A feature that is off is what a model without it computes. For tables whose rules above it name all exceptions."""


def same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def judge(
    place: str,
    values: Mapping[str, Any],
    rules: Iterable[Rule],
    accepted: Collection[str] = (),
    advice: str = "",
) -> list[Finding]:
    """The meaning of each key of a file to its reader.

    Args:
        place: The file, for messages.
        values: Its keys and values.
        rules: The table; the first rule that holds decides.
        accepted: Keys that the user accepts without effect.
        advice: Further advice about a refused key, for messages.

    Raises:
        UnknownKeyError: A key is refused; the message names it.
    """
    rules = list(rules)
    findings = []
    for key, value in values.items():
        rule = next((rule for rule in rules if rule.holds(key, value)), None)
        if rule is not None and rule.verdict != "refused":
            findings.append(Finding(key, value, rule.verdict, rule.because))
        elif key in accepted:
            findings.append(Finding(key, value, "harmless", "ignored as asked"))
        else:
            why = rule.because if rule is not None else "it is unknown here, and ignoring it could give wrong results"
            raise UnknownKeyError(f"{place}: {key} {shown(value)} is not supported: {why}{advice}")
    return findings
