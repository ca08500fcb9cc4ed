"""The forms in which models write calls of tools, found in the model's chat template, and a grammar for each.

A conversation with made-up calls is rendered, and the text around their names and arguments is compared with a table of
forms. A grammar with the tools' schemas holds the answer to the form that was found, so its calls can always be parsed.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from workbench.models.tokenizer import ChatTemplateError, Tokenizer

_NAME, _OTHER, _KEY, _VALUE, _ID = "NAME_OF_A_CALL", "NAME_OF_ANOTHER", "KEY_OF_A_CALL", "VALUE_OF_A_CALL", "call00000"
FIRST_TOOL_LINE = 2
"""Line of a grammar with the first tool's rule; each tool has a line, so that messages about it can name the tool."""
_KINDS = ("null", "boolean", "integer", "number", "string", "array")
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}":\s*"{_VALUE}"\s*\}}')
_PIECES = re.compile(rf"(<[^<>\s]{{1,40}}>|\[[A-Z_]{{1,40}}\]|{_ID})")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_MISTRAL, _LLAMA = "[TOOL_CALLS]", "<|python_tag|>"

FunctionName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call, and the schema of its arguments, which every call obeys."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def as_object(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of arguments that allows nothing but the objects that the given one allows.

    Raises:
        ValueError: It allows none.
    """
    kinds = schema.get("type", "object")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const", {})]
    if all(kind in _KINDS for kind in kinds) or not any(isinstance(value, dict) for value in values):
        raise ValueError("#: arguments are an object, and it allows none")
    return schema | {"type": "object"} if "object" in kinds else schema


class _Pattern(NamedTuple):
    """A form as regular expressions.

    Attributes:
        before: The mark of a call, and the text from there to its name.
        after: The text from the arguments to the text that ends the call, and that text.
        end: The text behind the last call; what ends a call must not be in front of the next one.
    """

    before: str
    after: str
    end: str = ""


_FORMS = (
    # Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}, ...]
    _Pattern(r'(\[TOOL_CALLS\])(\s*\[\{"name":\s*")$', rf'((?:, "id": "{_ID}")?)(\}})', r"\]"),
    # Ministral, Devstral: [TOOL_CALLS]name[ARGS]{...}
    _Pattern(r"(\[TOOL_CALLS\])()$", r"()()"),
    # Llama 3: {"name": ..., "parameters": ...}, where an answer begins
    _Pattern(r'()(\{"name":\s*")$', r"()(\})"),
    # Nemotron Nano 2, Apriel, MiniMax M1: <TOOLCALL>[{"name": ..., "arguments": ...}, ...]</TOOLCALL>
    _Pattern(r"(<[^<>\s]{1,40}>)([^<>]*)$", rf'((?:, "id": "{_ID}")?)(\s*\}})', r"[^<>{}]*</[^<>\s]{1,40}>"),
    # Hermes, Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>
    _Pattern(r"(<[^<>\s]{1,40}>)([^<>]*)$", r"([^<>]*?)(</[^<>\s]{1,40}>)"),
)
"""The known forms; the first that fits is taken."""


@dataclass(frozen=True)
class CallForm:
    """The form of calls: ``mark opening name between arguments closing end_tag``, then more calls, or ``end``.

    Attributes:
        mark: The text with which calls begin.
        opening: The text from the mark to the name.
        between: The text from the name to the arguments.
        closing: The text from the arguments to ``end_tag``; one with an id may be left out.
        end_tag: The text that ends a call.
        more: The text from one call to the name of the next. None: there is one call in an answer.
        end: The text behind the last call.
        leads: Calls stand where an answer begins, or nowhere. The mark may then be left out.
    """

    mark: str
    opening: str
    between: str
    closing: str
    end_tag: str
    more: str | None = None
    end: str = ""
    leads: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> CallForm:
        """The form in which a model's template writes calls.

        Raises:
            ValueError: The template shows no tools or no calls, or writes them in another form.
        """
        user = {"role": "user", "content": "a"}

        def written(*names: str) -> str:
            calls = [
                {"id": _ID, "type": "function", "function": {"name": name, "arguments": {_KEY: _VALUE}}}
                for name in names
            ]
            messages: list[dict[str, Any]] = [user, {"role": "assistant", "content": "", "tool_calls": calls}]
            return tokenizer.apply_chat_template(messages, add_generation_prompt=False, tools=tools)

        try:
            shown = tokenizer.apply_chat_template([user], tools=tools)
            try:
                text = written(_NAME, _OTHER)
            except ChatTemplateError:  # one call in an answer, as with Llama 3
                text = written(_NAME)
        except ChatTemplateError as problem:
            raise ValueError(f"tools: {problem}") from None
        if not all(tool["function"]["name"] in shown for tool in tools):
            raise ValueError("tools: the model's chat template leaves them out")
        for pattern in _FORMS:
            if (form := cls._found(pattern, text, shown)) is not None:
                return form
        raise ValueError("tools: the model's chat template writes calls in a form that is not known")

    @classmethod
    def _found(cls, pattern: _Pattern, text: str, shown: str) -> CallForm | None:
        """The form of a text with one or two calls, if it is that of a pattern.

        Args:
            pattern: The pattern.
            text: The text of a conversation.
            shown: Its text in front of the answer.
        """
        before, name, after = text.partition(_NAME)
        arguments = _ARGUMENTS.search(after)
        opening = re.search(pattern.before, before)
        if not name or arguments is None or opening is None:
            return None
        closing = re.compile(pattern.after).match(after, arguments.end())
        if closing is None or (not opening[1] and before != shown + opening[2]):
            return None
        between, rest, end = after[: arguments.start()], after[closing.end() :], ""
        more, other, last = rest.partition(_OTHER)
        if pattern.end:
            if other:  # behind the last call as behind the first
                again = _ARGUMENTS.search(last)
                ended = re.compile(pattern.after).match(last, again.end()) if again is not None else None
                rest = last[ended.end() :] if ended is not None else ""
            ending = re.match(pattern.end, rest)
            if ending is None or re.search(pattern.end, more if other else ""):
                return None
            end = ending[0]
        form = cls(
            opening[1] or _LLAMA,
            opening[2],
            between,
            closing[1],
            closing[2],
            more if other else None,
            end,
            leads=not opening[1],
        )
        texts = (form.mark, form.opening, form.between, form.closing, form.end_tag, form.more or "", form.end)
        made_up = any(probe in part for probe in (_NAME, _OTHER, _KEY, _VALUE) for part in texts)
        misplaced = any(_ID in part for part in texts if part is not form.closing)
        return None if made_up or misplaced else form

    @property
    def gap(self) -> str | None:
        """The text between two calls that have a mark each; None if only the first has one."""
        start = self.mark + self.opening
        return self.more.removesuffix(start) if self.more and not self.leads and self.more.endswith(start) else None

    @property
    def marks(self) -> str:
        """All text that is not a name or arguments."""
        return "".join((self.mark, self.opening, self.between, self.closing, self.end_tag, self.more or "", self.end))

    def new_id(self) -> str:
        """A new id of a call; Mistral's templates take ids of nine characters only."""
        return uuid.uuid4().hex[:9] if self.mark == _MISTRAL else f"chatcmpl-tool-{uuid.uuid4().hex}"

    def grammar(self, tools: Sequence[Function], choice: str, tokenizer: Tokenizer, *, parallel: bool) -> str:
        """A Lark grammar of the answers with calls of some tools.

        Args:
            tools: The tools that may be called.
            choice: "auto" or "required".
            tokenizer: Knows whether a tag is a token.
            parallel: Allow more than one call, if the form does.
        """

        def literal(text: str) -> str:
            return " ".join(map(piece, filter(None, _PIECES.split(text))))

        def piece(text: str) -> str:
            if text == _ID:
                return "/[a-zA-Z0-9]{9}/"
            ids = tokenizer.encode(text) if _PIECES.fullmatch(text) else []
            return f"({json.dumps(text)} | <[{ids[0]}]>)" if len(ids) == 1 else json.dumps(text)

        rules = []
        for index, tool in enumerate(tools):
            schema = json.dumps(as_object(_NO_PARAMETERS if tool.parameters is None else tool.parameters))
            rules.append(f"tool{index}: {json.dumps(tool.name)} {literal(self.between)} %json {schema}")
        bodies = [f"tool{index}" for index in range(len(rules))]
        closing = f"({literal(self.closing)})?" if _ID in self.closing else literal(self.closing)
        rules += [f"call: ({' | '.join(bodies)}) {closing} {literal(self.end_tag)}", "TEXT: /(.|\\n)*/"]
        several = parallel and self.more is not None
        others = f"({literal(self.more)} call)*" if several and self.more and self.gap is None else ""
        rules.append(f"part: {literal(self.opening)} call {others} {literal(self.end)}")
        mark = literal(self.mark)
        if self.leads:
            begun = "|".join(map(re.escape, (self.opening, self.mark)))
            rules.append(f"FREE: TEXT & ~/({begun})(.|\\n)*/")
            rules.append(f"start: {mark}? part" + ("" if choice == "required" else " | FREE"))
        elif choice == "required":
            again = f"({literal(self.gap)} {mark} part)*" if several and self.gap is not None else ""
            rules.append(f"start: {mark} part {again}")
        else:
            rules.append(f"head[lazy]: TEXT {json.dumps(self.mark)}")
            ids = tokenizer.encode(self.mark)
            heads = "head" if len(ids) != 1 else f"(head | TEXT <[{ids[0]}]>)"
            rules.append(f"start: ({heads} part)* tail" if several else f"start: {heads} part | tail")
            rules.append("tail: TEXT")
        return "%llguidance {}\n" + "\n".join(rules)
