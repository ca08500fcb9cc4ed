"""Texts that a chat template leaves out: found by made-up conversations, and in each conversation by marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[list[dict[str, Any]], bool], str]
"""Renders messages, with or without the text that makes the model answer."""

MARK = "CONTENT_OF_A_MESSAGE"

_CALL = {"id": "call00000", "type": "function", "function": {"name": "made_up", "arguments": {"a": "b"}}}
_USER: dict[str, Any] = {"role": "user", "content": "a"}
_CALLING: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call00000", "name": "made_up", "content": "c"}
CALLED = [_USER, _CALLING, _RESULT]
"""A conversation with a call of a tool."""

_THOUGHT = {"reasoning": MARK, "reasoning_content": MARK}

MADE_UP: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": MARK}],
    "system": [{"role": "system", "content": MARK}, _USER],
    "assistant": [_USER, {"role": "assistant", "content": MARK}, _USER],
    "tool": [_USER, _CALLING, {**_RESULT, "content": MARK}],
}
"""A conversation for each role, with a marked message of it."""

_OTHERS: dict[str, list[dict[str, Any]]] = {
    "contents of answers with calls of tools": [_USER, {**_CALLING, "content": MARK}, _RESULT],
    "reasoning in front of calls of tools": [_USER, {**_CALLING, **_THOUGHT}, _RESULT],
    "reasoning of earlier answers": [_USER, {"role": "assistant", "content": "b", **_THOUGHT}, _USER],
}


def left_out(render: Render) -> list[str]:
    """The kinds of texts that a template leaves out or refuses, as phrases.

    Args:
        render: Renders messages; a ValueError says that the template refuses them.
    """
    found = []
    texts = {f"messages of role {role}": made for role, made in MADE_UP.items()} | _OTHERS
    for words, messages in texts.items():
        try:
            if MARK not in render(messages, True):
                found.append(words)
        except ValueError:
            found.append(f"{words} (refused)")
    return found


def check_shown(messages: Sequence[Message], text: str, render: Render) -> None:
    """Refuse a conversation of which a template would leave out a text.

    Each content is marked at its beginning and its end, and each call of a tool in its name and its arguments. The
    marks of contents and of arguments have to appear. Two texts may be left out, as templates do on purpose: reasoning
    of earlier answers, and the content of an answer that calls tools, which Llama 3 and Mistral never show. `left_out`
    names them.

    Args:
        messages: The messages, whose contents are texts.
        text: Their text under the template.
        render: Renders other messages; a ValueError says that the template refuses them.

    Raises:
        ValueError: A text is left out; the message names it.
    """
    given = {
        index: content
        for index, message in enumerate(messages)
        if isinstance(content := message.get("content"), str) and content.strip() and not message.get("tool_calls")
    }
    if not given and not any(message.get("tool_calls") for message in messages):
        return
    if len(messages) == 1 and given.get(0, "").strip() == text.strip():  # nothing else is there
        return
    marked = [_with_marks(index, message, given.get(index)) for index, message in enumerate(messages)]
    shown = ""
    try:
        shown = render(marked, False).lower()
    except ValueError:  # the template looks into contents, and refuses these
        lost = [index for index, content in given.items() if content.strip() not in text]
    else:
        lost = [index for index, content in given.items() if not _is_shown(index, content, messages[index], shown)]
    if lost:
        raise ValueError(
            f"messages[{lost[0]}]: the model's chat template leaves out messages of role "
            f"{messages[lost[0]].get('role')}, or parts of them: leave it out of the request, or give another template "
            "(--chat-template)"
        )
    if shown:
        _check_calls(messages, shown)


def _with_marks(index: int, message: Message, content: str | None) -> dict[str, Any]:
    marked = dict(message)
    if content is not None:
        marked["content"] = f"{_mark(index, 'first')} {content} {_mark(index, 'last')}"
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(_mark(index, f"call_{i}"), call) for i, call in enumerate(calls)]
    return marked


def _marked_call(mark: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    name, identity = str(function.get("name")), str(call.get("id"))
    arguments = dict.fromkeys((*function["arguments"], f"of_{mark}"), f"of_{mark}")
    marked = {**function, "name": f"{name}_{mark}", "arguments": arguments}
    if re.fullmatch(rf"functions\.{re.escape(name)}:\d+", identity):  # some templates show the id alone
        call = {**call, "id": identity.replace(name, f"{name}_{mark}")}
    return {**call, "function": marked}


def _check_calls(messages: Sequence[Message], shown: str) -> None:
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            marked = _marked_call(mark := _mark(index, f"call_{number}"), call)
            if marked is call:
                continue
            where = f"messages[{index}].tool_calls[{number}]: the model's chat template"
            has_name, name = marked["function"]["name"].lower() in shown, call["function"]["name"]
            if f"of_{mark}" not in shown:
                raise ValueError(f"{where} leaves out the {'' if has_name else 'name and the '}arguments of a call")
            # A template may say for itself what is called; one that shows ids relies on them.
            if not has_name and str(call.get("id")).lower() in shown:
                raise ValueError(f"{where} shows the name of a call in its id alone, such as 'functions.{name}:0'")


def _mark(index: int, place: str) -> str:
    return f"{place}_word_of_message_{index}_"


def _is_shown(index: int, content: str, message: Message, shown: str) -> bool:
    places = ["last"] if message.get("role") == "assistant" and "</think>" in content else ["first", "last"]
    return all(_mark(index, place) in shown for place in places)
