"""The schemas that the arguments of calls obey, and the parts of them that no grammar can hold.

Tools come from many hands, and one odd schema must not end a conversation. With ``tool_choice`` "auto" a part that is
not served is left free, and a header of the answer names it. If the client relies on the schema (``strict``, and calls
that are required), the request is refused with the tool and the place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from workbench.apps.serve.call_forms import CallForm, Function, as_object
from workbench.engine.schema_words import served

HEADER = "X-Unconstrained-Arguments"
"""Names each part of a schema that is left free, as the name of its tool and a JSON pointer."""

MAX_HEADER = 2000
MAX_ATTEMPTS = 8
"""Maximum number of grammars that are tried for a request."""

_FAULT = re.compile(r"is not valid: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)")
_UNSERVED = re.compile(
    r"Unimplemented|regex|not supported|Unsatisfiable|not present in a registry|multipleOf|Failed to generate"
)


@dataclass
class ToolSchemas:
    """The tools of a request, with schemas that can be compiled.

    Attributes:
        functions: The tools; their parameters are what a grammar holds.
        lenient: Parts that are not served are left free, unless a tool is strict.
        left_free: These parts.
    """

    functions: list[Function]
    lenient: bool
    left_free: list[str] = field(default_factory=list)
    _attempts: int = 0

    @classmethod
    def of(cls, functions: Sequence[Function], *, lenient: bool, form: CallForm) -> ToolSchemas:
        """The schemas of some tools, for calls of a form.

        Raises:
            ValueError: A part of a schema is not served, and must not be left free.
        """
        found = cls([], lenient)
        for function in functions:
            parameters = function.parameters
            if parameters is not None:
                parameters, unserved = served(parameters)
                for each in unserved:
                    found._leave_free(function, each.place, str(each))
                try:
                    parameters = as_object(parameters)
                except ValueError as problem:
                    found._leave_free(function, "#", str(problem))
                    parameters = {"type": "object"}
                try:
                    unserved = form.unserved(parameters)
                except ValueError as problem:
                    raise ValueError(f"tools: the parameters of {function.name!r}: {problem}") from None
                for each in unserved:
                    found._leave_free(function, each.place, str(each))
            found.functions.append(msgspec.structs.replace(function, parameters=parameters))
        return found

    def relax(self, message: str, lines: Sequence[str]) -> None:
        """Leave free what a grammar was refused for.

        Args:
            message: The message about the grammar, which names a line.
            lines: The lines of the grammar; those that belong to a tool begin with its number.

        Raises:
            ValueError: It is not about a schema, or the schema must not be left free.
        """
        self._attempts += 1
        fault = _FAULT.search(message)
        line = int(fault[1]) if fault is not None else 0
        named = re.match(r"tool(\d+)", lines[line - 1], re.IGNORECASE) if 0 < line <= len(lines) else None
        if fault is None or named is None:
            raise ValueError(message)
        index = int(named[1])
        function, because = self.functions[index], fault[2].rstrip(": ")
        if not _UNSERVED.search(because) or self._attempts == MAX_ATTEMPTS:
            raise ValueError(f"tools: the parameters of {function.name!r}: {because}")
        self._leave_free(function, "#", f"#: {because}")
        schema: dict[str, Any] = {"type": "object"}
        if "oneOf" in because and "x-guidance" not in (function.parameters or {}):
            schema = {**(function.parameters or {}), "x-guidance": {"coerce_one_of": True}}
        self.functions[index] = msgspec.structs.replace(function, parameters=schema)

    def _leave_free(self, function: Function, place: str, because: str) -> None:
        if not self.lenient or function.strict:
            raise ValueError(f"tools: the parameters of {function.name!r}: {because}")
        if (name := function.name + place) not in self.left_free:
            self.left_free.append(name)

    @property
    def headers(self) -> dict[str, str]:
        """The header that names what is left free, if anything is."""
        if not self.left_free:
            return {}
        value = ", ".join(self.left_free)
        return {HEADER: value if len(value) <= MAX_HEADER else value[:MAX_HEADER].rpartition(",")[0] + ", ..."}
