"""Tables of the keys of outside formats: each key is read, harmless for a stated reason, or refused by name.

A key, a value or a form that no rule knows is refused: ignoring it could change what a model computes, and fluent
text would hide that. Each reader has its table beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from workbench.base.field_checks import FieldError
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


NO_VALUE: tuple[Any, ...] = (None, "", [], {})
"""Values by which a row of a log says nothing."""


def same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


class RowCheck:
    """Checks the rows of a log against a table. Rows have mostly the same keys: each set of keys is judged once.

    No rule may depend on a value. Keys without a value say nothing, and are not judged.

    Args:
        ignored: Keys that the user leaves out, in any case.
        name_of: The name by which the rules know a key.
    """

    def __init__(self, ignored: Collection[str] = (), name_of: Callable[[str], str] = str) -> None:
        self._ignored = {name.strip().lower(): name for name in ignored}
        self._unused = dict(self._ignored)
        self._name_of = name_of
        self._known: set[tuple[Any, ...]] = set()

    def check(self, place: str, row: Mapping[str, Any], rules: Sequence[Rule]) -> Mapping[str, Any]:
        """The row without the keys that are left out.

        Raises:
            UnknownKeyError: A key is refused; the message names the row, the key and the option that leaves it out.
        """
        if self._ignored:
            for key in row:
                self._unused.pop(key.strip().lower(), None)
            row = self.kept(row)
        keys = tuple(key for key, value in row.items() if value not in NO_VALUE)
        if (known := (id(rules), *keys)) not in self._known:
            for key in keys:
                advice = f"; if it does not matter, leave it out with --ignore-columns {shlex.quote(key)}"
                judge(place, {self._name_of(key): row[key]}, rules, advice=advice)
            self._known.add(known)
        return row

    def kept(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row without the keys that are left out, whatever the others are."""
        return {key: value for key, value in row.items() if key.strip().lower() not in self._ignored}

    def finish(self, path: Any) -> None:
        """Refuse names to leave out that no row has.

        Raises:
            FieldError: There is one; the message names it.
        """
        for name in self._unused.values():
            raise FieldError(f"--ignore-columns {name} has no effect on {path}, which has no such column: leave it out")


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
