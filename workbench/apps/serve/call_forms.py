"""The forms in which models write calls of tools, found in the model's chat template, and a grammar for each.

A grammar with the tools' schemas holds the answer to the form that was learned, so its calls can always be parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import msgspec

from workbench.apps.serve.call_parts import MISTRAL, CallText, Literals
from workbench.apps.serve.call_probes import learn
from workbench.apps.serve.given_tools import given
from workbench.apps.serve.known_forms import known_form
from workbench.apps.serve.pair_rules import NUM_ORDERS, PairRules
from workbench.engine.grammar_form import MAX_GRAMMAR_BYTES
from workbench.engine.schema_words import Unserved
from workbench.models.tokenizer import ChatTemplateError, Tokenizer

_KINDS = ("null", "boolean", "integer", "number", "string", "array")

FunctionName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call, and the schema of its arguments, which every call obeys."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def no_parameters() -> dict[str, Any]:
    """The schema of a function without arguments."""
    return {"type": "object", "properties": {}, "additionalProperties": False}


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


def _argument_names(parameters: dict[str, Any] | None) -> list[str]:
    properties = (parameters or {}).get("properties")
    return list(properties) if isinstance(properties, dict) else []


_LEARNED: WeakKeyDictionary[Tokenizer, CallForm] = WeakKeyDictionary()


@dataclass(frozen=True)
class CallForm(CallText):
    """The form of calls of a model."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], prompt: str = "") -> CallForm:
        """The form in which a model's template writes calls.

        Args:
            tokenizer: Has the template.
            tools: The tools that the model may call.
            prompt: A prompt that may name them in its messages.

        Raises:
            ValueError: The template shows no tools or no calls, or writes them in a form that cannot be learned.
        """
        cls.check_shown(tokenizer, tools, prompt)
        if (form := _LEARNED.get(tokenizer)) is None:
            known = known_form(tokenizer)
            form = learn(cls, tokenizer) if known is None else cls(**vars(known))
            _LEARNED[tokenizer] = form
        return form

    @staticmethod
    def check_shown(tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], prompt: str = "") -> None:
        """Check that a model would see the tools: its template shows them, or the messages of the prompt do.

        Raises:
            ValueError: The template leaves them out, and the prompt lacks the name of one or of an argument.
        """
        try:
            shown = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], **given(tokenizer, tools))
        except ChatTemplateError as problem:
            raise ValueError(f"tools: {problem}") from None
        functions = [tool["function"] for tool in tools]
        if all(function["name"] in shown for function in functions):
            return
        words = [word for each in functions for word in (each["name"], *_argument_names(each.get("parameters")))]
        if not all(word in prompt for word in words):
            raise ValueError(
                "tools: the model's chat template leaves them out: describe them in a message, each by its name and "
                "the names of its arguments, or give another template (--chat-template)"
            )

    def unserved(self, parameters: dict[str, Any]) -> list[Unserved]:
        """Parts of a schema of arguments that calls of this form cannot be held to.

        Raises:
            ValueError: It is not a schema.
        """
        if self.pairs is None:
            return []
        rules = PairRules("tool", self.pairs, Literals(None, "/a/"), parameters)
        try:
            rules.arguments(self.between)
        except (TypeError, AttributeError, ValueError, RecursionError) as problem:
            raise ValueError(f"#: it is not a schema: {problem}") from None
        return rules.unserved

    def grammar(
        self, tools: Sequence[Function], choice: str, tokenizer: Tokenizer, *, parallel: bool, reasons: bool = False
    ) -> str:
        """A Lark grammar of the answers with calls of some tools.

        Args:
            tools: The tools that may be called.
            choice: "auto" or "required".
            tokenizer: Knows whether a tag is a token.
            parallel: Allow more than one call, if the form does.
            reasons: The answer begins with reasoning, which </think> ends.
        """
        for max_orders in NUM_ORDERS:
            text = self._grammar(tools, choice, tokenizer, max_orders, parallel=parallel, reasons=reasons)
            if self.pairs is None or len(text.encode()) <= MAX_GRAMMAR_BYTES:
                break
        return text

    def _grammar(
        self,
        tools: Sequence[Function],
        choice: str,
        tokenizer: Tokenizer,
        max_orders: int,
        *,
        parallel: bool,
        reasons: bool,
    ) -> str:
        rules = []
        text = Literals(tokenizer, "/[a-zA-Z0-9]{9}/" if self.mark == MISTRAL else "/[a-zA-Z0-9_.:-]{1,64}/")
        literal = text.rule
        for index, tool in enumerate(tools):
            parameters = as_object(no_parameters() if tool.parameters is None else tool.parameters)
            name = json.dumps(tool.name)
            if self.pairs is None:
                rules.append(f"tool{index}: {name} {literal(self.between)} %json {json.dumps(parameters)}")
            else:
                written = PairRules(f"tool{index}", self.pairs, text, parameters, max_orders)
                body = written.arguments(self.between)
                rules += [f"tool{index}: {name} {body}", *written.rules]
        bodies = " | ".join(f"tool{index}" for index in range(len(tools)))
        closing = " | ".join(filter(None, map(literal, self.closings)))
        ended = "" if self.pairs is not None or not closing else f"({closing})"
        rules += [f"call: ({bodies}) {ended}", "TEXT: /(.|\\n)*/"]
        several = parallel and self.more is not None
        others = f"({literal(self.more)} call)*" if several and self.more and self.gap is None else ""
        rules.append(f"part: {literal(self.opening)} call {others} {literal(self.end)}")
        mark = literal(self.mark)
        thought = ""
        if reasons:
            rules += [text.until("thought", "TEXT", "</think>"), "SPACE: /[ \\n]{0,4}/"]
            thought = "thought SPACE "
        if self.leads:
            begun = "|".join(map(re.escape, (self.opening, self.mark)))
            rules.append(f"FREE: TEXT & ~/({begun})(.|\\n)*/")
            rules.append(f"start: {thought}({mark}? part" + (")" if choice == "required" else " | FREE)"))
        elif choice == "required":
            again = f"({literal(self.gap)} {mark} part)*" if several and self.gap is not None else ""
            rules.append(f"start: {thought}{mark} part {again}")
        else:
            rules.append(text.until("head", "TEXT", self.mark))
            rules.append(f"start: {thought}" + ("(head part)* tail" if several else "(head part | tail)"))
            ended = f" ({literal(self.answer_end)} /[ \\n]{{0,4}}/)?" if self.answer_end else ""
            rules.append(f"tail: TEXT{ended}")
        return "%llguidance {}\n" + "\n".join(rules)
