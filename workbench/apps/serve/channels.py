"""Answers in channels, as gpt-oss writes them: analysis is reasoning, final is content, and commentary calls tools.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Models write the recipient behind the channel or in front of it, with or without a word about the type.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from workbench.apps.serve.call_forms import CallForm, Function, as_object, no_parameters
from workbench.apps.serve.call_parts import Literals
from workbench.engine.schema_words import Unserved
from workbench.models.tokenizer import ChatTemplateError, Tokenizer

_CONTENT = "CONTENT_OF_AN_ANSWER"
_BEGIN, _CHANNEL, _MESSAGE, _END, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_MARKS = (_BEGIN, _CHANNEL, _MESSAGE, _END, "<|constrain|>", _CALL, "<|return|>")
_ENDS = re.compile("|".join(map(re.escape, (_END, _CALL, "<|return|>", _BEGIN))))
_BEGINNINGS = (_BEGIN, _CHANNEL, " to=", "to=")
_TO = re.compile(r"to=functions\.([a-zA-Z0-9_.-]+?)(?=<\||\s|$)")
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*([a-z]+)")

_FOUND: WeakKeyDictionary[Tokenizer, bool] = WeakKeyDictionary()


def has_channels(tokenizer: Tokenizer) -> bool:
    """Whether a model's template writes answers in channels."""
    if not getattr(tokenizer, "has_chat_template", True):
        return False
    if tokenizer not in _FOUND:
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": _CONTENT}
        try:
            shown = tokenizer.apply_chat_template([user])
            text = tokenizer.apply_chat_template([user, answer], add_generation_prompt=False)
        except ChatTemplateError:
            shown = text = ""
        lead = text.partition(_CONTENT)[0].removeprefix(shown)
        _FOUND[tokenizer] = shown.endswith(f"{_BEGIN}assistant") and lead == f"{_CHANNEL}final{_MESSAGE}"
    return _FOUND[tokenizer]


@dataclass(frozen=True)
class ChannelForm(CallForm):
    """The form of calls in channels; a call ends an answer."""

    mark: str = _CHANNEL
    opening: str = "commentary to=functions."
    between: str = _MESSAGE
    closing: str = ""

    @property
    def marks(self) -> str:
        """All text that is not a name, arguments or a message."""
        return "".join(_MARKS)

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], prompt: str = "") -> ChannelForm:
        """The form of a model whose template writes channels; see `CallForm.of`.

        Raises:
            ValueError: The template leaves out tools.
        """
        cls.check_shown(tokenizer, tools, prompt)
        return cls()

    def unserved(self, parameters: dict[str, Any]) -> list[Unserved]:
        """Nothing: arguments are a JSON object."""
        return []

    def grammar(
        self, tools: Sequence[Function], choice: str, tokenizer: Tokenizer, *, parallel: bool, reasons: bool = False
    ) -> str:
        """See `CallForm.grammar`."""
        text = Literals(tokenizer, "")
        lit = text.rule
        typed = f"({lit(' <|constrain|>json')} | {lit('<|constrain|>json')} | {lit(' json')})? {lit(_MESSAGE)}"
        rules = ["TEXT: /(.|\\n)*/", text.until("said", "TEXT", _END)]
        calls = []
        for index, tool in enumerate(tools):
            parameters = as_object(no_parameters() if tool.parameters is None else tool.parameters)
            rules.append(f"tool{index}: %json {json.dumps(parameters)}")
            behind = f"{lit(f'{_CHANNEL}commentary to=functions.{tool.name}')} {typed}"
            before = f"{lit(f' to=functions.{tool.name}{_CHANNEL}commentary')} {typed}"
            calls.append(f"({behind} | {before}) tool{index}")
        rules.append(f"call: {' | '.join(calls)}")
        heads = " | ".join(lit(f"{_CHANNEL}{name}{_MESSAGE}") for name in ("analysis", "commentary"))
        rules.append(f"begun: ({heads}) said {lit(f'{_BEGIN}assistant')}")
        final = "" if choice == "required" else f" | {lit(f'{_CHANNEL}final{_MESSAGE}')} TEXT"
        rules.append(f"start: begun* (call{final})")
        return "%llguidance {}\n" + "\n".join(rules)


@dataclass
class ChannelParser:
    """Separates an answer in channels, part by part, into reasoning, content and a call.

    Attributes:
        num_calls: Calls so far.
    """

    num_calls: int = 0
    _rest: str = field(default="", init=False)
    _kind: str = field(default="head", init=False)

    def feed(self, text: str, *, final: bool) -> dict[str, Any]:
        """The fields that more text adds to a message, see `workbench.apps.serve.tools.MessageParser.feed`."""
        self._rest += text
        added: dict[str, Any] = {}
        while self._step(added, final):
            pass
        if "reasoning" in added:
            added["reasoning_content"] = added["reasoning"]
        return added

    def _step(self, added: dict[str, Any], final: bool) -> bool:
        """Read a head, or a body up to its end; whether anything else can be read."""
        if self._kind == "head":
            return self._head(added, final)
        found = _ENDS.search(self._rest)
        end = found.start() if found is not None else len(self._rest) - (0 if final else self._held())
        self._add(self._rest[:end], added)
        if found is None:
            self._rest = self._rest[end:]
            return False
        self._rest = self._rest[end if found[0] == _BEGIN else found.end() :]
        self._kind = "head"
        return bool(self._rest)

    def _head(self, added: dict[str, Any], final: bool) -> bool:
        head, found, rest = self._rest.partition(_MESSAGE)
        if not found:
            begins = any(self._rest.startswith(text) or text.startswith(self._rest) for text in _BEGINNINGS)
            if not self._rest or (begins and not final):
                return False
            if begins:  # an answer that was cut off in a head
                self._rest = ""
                return False
            self._kind = "content"  # a model that does not keep to its form
            return True
        self._rest = rest
        name, to = _NAME.search(head), _TO.search(head)
        if to is not None:
            call = {"index": self.num_calls, "id": f"chatcmpl-tool-{uuid.uuid4().hex}", "type": "function"}
            added.setdefault("tool_calls", []).append({**call, "function": {"name": to[1], "arguments": ""}})
            self.num_calls += 1
            self._kind = "arguments"
        else:
            self._kind = "reasoning" if name is not None and name[1] == "analysis" else "content"
        return True

    def _held(self) -> int:
        """The number of characters at the end that may begin a mark."""
        marks = (_END, _CALL, "<|return|>", _BEGIN)
        return next(
            (n for n in range(10, 0, -1) if any(self._rest.endswith(mark[:n]) for mark in marks if n < len(mark))), 0
        )

    def _add(self, text: str, added: dict[str, Any]) -> None:
        if not text:
            return
        if self._kind != "arguments":
            added[self._kind] = added.get(self._kind, "") + text
            return
        calls = added.setdefault("tool_calls", [])
        if not calls:
            calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text
