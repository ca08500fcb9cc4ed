"""Calls of models whose template shows tools and leaves calls out, so that nothing shows their form."""

from __future__ import annotations

import json
import re
from typing import Any
from weakref import WeakKeyDictionary

from workbench.apps.serve.call_parts import CallText, Pairs
from workbench.apps.serve.call_probes import shown_tools, shows_calls
from workbench.apps.serve.pair_rules import escaped
from workbench.models.tokenizer import Tokenizer

_LFM2 = CallText(
    mark="<|tool_call_start|>",
    opening="[",
    between="(",
    closing='")',
    more=", ",
    end="]<|tool_call_end|>",
    pairs=Pairs("()", '="', '"', "=", "", ", ", ")", own=False, words=True),
)
_GRANITE_3 = CallText(
    mark="<|tool_call|>",
    opening='[{"name": "',
    between='", "arguments": ',
    closing="}",
    more=', {"name": "',
    end="]",
)
_KNOWN = {"<|tool_list_start|>": _LFM2, "<|tool_call|> followed by a JSON list": _GRANITE_3}
"""Forms by a text that the template puts around tools."""
_BY_VOCABULARY = (_LFM2,)
"""Forms whose mark, as a token of the vocabulary, tells as much."""

_SAID = re.compile(
    r"(?P<mark><(?P<tag>[^<>\s/]{1,40})>)(?P<begin>\s*)(?P<open>\{\s*\"name\": )<[^<>]{1,40}>"
    r"(?P<between>, \"(?:arguments|parameters)\": )<[^<>]{1,40}>(?P<close>\s*\})(?P<end>\s*</(?P=tag)>)"
)
"""A call as prompts describe it: ``<tool_call>``, ``{"name": <function-name>, "arguments": <args-json-object>}``."""

_FOUND: WeakKeyDictionary[Tokenizer, CallText | None] = WeakKeyDictionary()


def known_form(tokenizer: Tokenizer) -> CallText | None:
    """The form of a model whose template shows tools and no calls; None for others."""
    if tokenizer not in _FOUND:
        try:
            shown = shown_tools(tokenizer)
            known = [form for text, form in _KNOWN.items() if text in shown]
            known += [_form_of(found) for found in _SAID.finditer(shown)]
            known += [form for form in _BY_VOCABULARY if len(tokenizer.encode(form.mark)) == 1]
            found = next(iter(known), None)
            _FOUND[tokenizer] = None if found is None or shows_calls(tokenizer) else found
        except ValueError:  # the template refuses tools, or the tokenizer the mark
            _FOUND[tokenizer] = None
    return _FOUND[tokenizer]


def _form_of(said: re.Match[str]) -> CallText:
    """The form of a call that a prompt describes."""
    mark, opening = said["mark"], f'{said["begin"]}{said["open"]}"'
    closing = said["close"] + said["end"]
    return CallText(mark, opening, f'"{said["between"]}', closing, more=f"\n{mark}{opening}")


def with_written_calls(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The messages, with calls in front of contents if the template leaves them out."""
    if not any("tool_calls" in message for message in messages):
        return messages
    if (form := known_form(tokenizer)) is None:
        return messages
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        made.append(plain | {"content": _written(form, calls) + message["content"]} if calls else message)
    return made


def _written(form: CallText, calls: list[dict[str, Any]]) -> str:
    texts = []
    for call in calls:
        name, given = call["function"]["name"], call["function"]["arguments"]
        if (pairs := form.pairs) is None:
            texts.append(name + form.between + json.dumps(given, ensure_ascii=False) + form.closing)
            continue
        arguments = [f"{key}{_value(pairs, value)}" for key, value in given.items()]
        texts.append(name + (form.between + pairs.separator.join(arguments) + pairs.final if given else pairs.empty))
    return form.mark + form.opening + (form.more or "").join(texts) + form.end


def _value(pairs: Pairs, value: Any) -> str:
    if isinstance(value, str):
        return pairs.string_open + escaped(value, pairs.string_close) + pairs.string_close
    plain = repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
    return pairs.other_open + plain + pairs.other_close
