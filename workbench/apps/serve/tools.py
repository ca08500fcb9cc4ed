"""Tools in chat completions: the fields of a request, and the parts of an answer.

The same pass that finds calls separates reasoning, which stands in front of an answer between <think> and </think>.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from workbench.apps.serve.argument_kinds import property_kinds
from workbench.apps.serve.call_forms import CallForm, Function
from workbench.apps.serve.call_parts import match
from workbench.apps.serve.pair_reader import PairReader
from workbench.apps.serve.tool_schemas import ToolSchemas
from workbench.models.tokenizer import Tokenizer

MAX_TOOLS = 128
"""OpenAI's limit."""


THINK_MARKS = "<think></think>"
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool; functions are the only kind."""

    function: Function
    type: Literal["function"] = "function"
    cache_control: Any = None  # a label, which no template reads


class FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The tool that has to be called."""

    function: FunctionChoice
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass
class CallGrammar:
    """The grammar of an answer with tools.

    Attributes:
        schemas: The tools that may be called.
        choice: "auto" or "required".
        form: The form of calls.
        tokenizer: Knows whether a tag is a token.
        parallel: Allow more than one call.
        reasons: The answer begins with reasoning.
    """

    schemas: ToolSchemas
    choice: str
    form: CallForm
    tokenizer: Tokenizer
    parallel: bool
    reasons: bool = False

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        choice: ToolChoice | None,
        form: CallForm,
        tokenizer: Tokenizer,
        *,
        parallel: bool,
        reasons: bool = False,
    ) -> CallGrammar:
        """The grammar for a choice of tools.

        Raises:
            ValueError: The tool that has to be called does not exist, or the schema of one is not served.
        """
        functions = [tool.function for tool in tools]
        if not isinstance(choice, NamedTool):
            schemas = ToolSchemas.of(functions, lenient=choice != "required", form=form)
            return cls(schemas, choice or "auto", form, tokenizer, parallel, reasons)
        named = [function for function in functions if function.name == choice.function.name]
        if not named:
            names = ", ".join(function.name for function in functions)
            raise ValueError(f"tool_choice names {choice.function.name[:70]!r}, the tools are {names}")
        schemas = ToolSchemas.of(named, lenient=False, form=form)
        return cls(schemas, "required", form, tokenizer, parallel=False, reasons=reasons)

    def constraint(self) -> dict[str, Any]:
        """The form of the answer, as ``SamplingParams(structured_outputs=...)`` has it."""
        return {"grammar": self._grammar()}

    def _grammar(self) -> str:
        options = {"parallel": self.parallel, "reasons": self.reasons}
        return self.form.grammar(self.schemas.functions, self.choice, self.tokenizer, **options)

    def relax(self, message: str) -> None:
        """Leave free what the grammar was refused for.

        Args:
            message: The message about the grammar, which names a line.

        Raises:
            ValueError: It is not about a schema, or the schema must not be left free.
        """
        self.schemas.relax(message, self._grammar().splitlines())


@dataclass
class MessageParser:
    """Separates an answer, part by part, into reasoning, content and calls.

    Attributes:
        form: The form of calls; None without tools.
        reasons: The prompt has opened <think>.
        num_calls: Calls so far.
        functions: The tools, whose schemas tell a string from other arguments in some forms.
    """

    form: CallForm | None = None
    reasons: bool = False
    num_calls: int = 0
    functions: Sequence[Function] = ()
    _rest: str = ""
    _blank: str = field(default="", init=False)
    _state: str = field(default="", init=False)
    _depth: int = field(default=0, init=False)
    _in_string: bool = field(default=False, init=False)
    _escaped: bool = field(default=False, init=False)
    _opened: bool = field(default=False, init=False)
    _reader: PairReader | None = field(default=None, init=False)

    def feed(self, text: str, *, final: bool) -> dict[str, Any]:
        """The fields that more text adds to a message: content, reasoning and reasoning_content, tool_calls.

        Args:
            text: The text.
            final: Nothing follows.
        """
        if not self._state:
            self._state = "reasoning" if self.reasons else "start"
        self._rest += text
        added: dict[str, Any] = {}
        while (step := getattr(self, f"_{self._state}")(added, final)) is not None and step != self._state:
            self._state = step
        return added

    def _start(self, added: dict[str, Any], final: bool) -> str | None:
        begun = self._rest.lstrip()
        if begun.startswith("<think>"):
            self._rest = begun.removeprefix("<think>")
            return "reasoning"
        leading: tuple[str, ...] = ()
        if self.form is not None and self.form.leads:
            leading = self.form.mark, self.form.opening
        if self._rest.startswith(leading):
            self._rest = self._rest.removeprefix(leading[0])
            return "name"
        undecided = "<think>".startswith(begun) or any(text.startswith(self._rest) for text in leading)
        return None if undecided and not final else "content"

    def _reasoning(self, added: dict[str, Any], final: bool) -> str | None:
        found = self._until("</think>", "reasoning", added, final)
        if "reasoning" in added:  # vLLM's present name, and the one before it
            added["reasoning_content"] = added["reasoning"]
        if found:
            self._rest = self._rest.lstrip()
        return "content" if found else None

    def _content(self, added: dict[str, Any], final: bool) -> str | None:
        if self.form is None or self.form.leads:
            self._add("content", self._take(len(self._rest)), added)
            return None
        if self.form.answer_end and self.form.mark not in self._rest:
            before, found, after = self._rest.rpartition(self.form.answer_end)
            if found and not after.strip():  # the answer ends here, or a call begins
                self._add("content", before, added)
                self._rest = "" if final else found + after
                return None
        return "name" if self._until(self.form.mark, "content", added, final) else None

    def _name(self, added: dict[str, Any], final: bool) -> str | None:
        assert self.form is not None
        opened = 0 if self._opened else match(self.form.opening, self._rest, final=final)
        if opened is None or opened < 0:
            return None
        if (name := _NAME.match(self._rest, opened)) is None:
            return None
        rest = self._rest[name.end() :]
        empty = match(self.form.pairs.empty, rest, final=final) if self.form.pairs is not None else -1
        between = match(self.form.between, rest, final=final)
        if empty is None or between is None or max(empty, between) < 0:
            return None
        self._rest, self._opened = rest[max(empty, between) :], False
        function = {"name": name[0], "arguments": "{}" if empty >= 0 else ""}
        call = {"index": self.num_calls, "id": self.form.new_id(name[0], rest[: max(between, 0)]), "type": "function"}
        added.setdefault("tool_calls", []).append({**call, "function": function})
        self.num_calls, self._blank = self.num_calls + 1, ""
        if empty >= 0:
            return "content" if self.form.gap is not None else "next"
        self._depth, self._in_string = 0, False
        if self.form.pairs is not None:
            parameters = next((each.parameters for each in self.functions if each.name == name[0]), None)
            self._reader = PairReader(self.form.pairs, partial(property_kinds, parameters))
            return "pairs"
        return "arguments"

    def _pairs(self, added: dict[str, Any], final: bool) -> str | None:
        assert self.form is not None and self._reader is not None
        part, self._rest = self._reader.feed(self._rest, final=final)
        self._add_arguments(part, added)
        if not self._reader.ended:
            return None
        return "content" if self.form.gap is not None else "next"

    def _arguments(self, added: dict[str, Any], final: bool) -> str | None:
        end = next((i for i, letter in enumerate(self._rest, 1) if self._closes(letter)), None)
        self._add_arguments(self._take(len(self._rest) if end is None else end), added)
        return "closing" if end is not None else None

    def _add_arguments(self, part: str, added: dict[str, Any]) -> None:
        if part:
            calls = added.setdefault("tool_calls", [])
            if not calls:
                calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part

    def _closes(self, letter: str) -> bool:
        """Whether a character ends the arguments."""
        if self._in_string:
            self._in_string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
            return False
        self._in_string = letter == '"'
        self._depth += (letter in "{[") - (letter in "}]")
        return self._depth == 0 and letter in "}]"

    def _closing(self, added: dict[str, Any], final: bool) -> str | None:
        assert self.form is not None
        ends = [match(closing, self._rest, final=final) for closing in self.form.closings]
        fitting = [end for end in ends if end is not None and end >= 0]
        if not fitting:
            return None
        self._take(fitting[0])
        return "content" if self.form.gap is not None else "next"

    def _next(self, added: dict[str, Any], final: bool) -> str | None:
        """Behind a call, another one without a mark or the end of all calls."""
        assert self.form is not None
        undecided = False
        for state, text in {"name": self.form.more or "", "content": self.form.end}.items():
            length = match(text, self._rest, final=final) if text else -1
            if length is not None and length >= 0:
                self._take(length)
                self._opened = state == "name"
                return state
            undecided = undecided or length is None
        return None if undecided else "content"

    def _until(self, mark: str, name: str, added: dict[str, Any], final: bool) -> bool:
        """Add the text before a mark to a field; whether the mark was found. Its possible beginning is held back."""
        before, found, after = self._rest.partition(mark)
        if found:
            self._add(name, before, added)
            self._rest = after
            return True
        held = 0 if final else next((n for n in range(len(mark), 0, -1) if self._rest.endswith(mark[:n])), 0)
        self._add(name, self._take(len(self._rest) - held), added)
        return False

    def _add(self, name: str, text: str, added: dict[str, Any]) -> None:
        if self.num_calls:  # white space around calls is theirs
            text = self._blank + text
            self._blank = text[len(text.rstrip()) :]
            text = text.rstrip()
        if text:
            added[name] = added.get(name, "") + text

    def _take(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends where the model reasons."""
    return prompt.rstrip().endswith("<think>")
