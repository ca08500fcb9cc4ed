"""Texts that a chat template leaves out: found by made-up conversations, and in each conversation by marks."""

from __future__ import annotations

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

    Each content is marked at its beginning and its end, and both marks have to appear. Reasoning is not looked at: a
    template leaves out that of earlier answers on purpose.

    Args:
        messages: The messages, whose contents are texts.
        text: What the template makes of them.
        render: Renders other messages; a ValueError says that the template refuses them.

    Raises:
        ValueError: A text is left out; the message names it.
    """
    given = {i: m["content"] for i, m in enumerate(messages) if isinstance(m.get("content"), str)}
    given = {index: content for index, content in given.items() if content.strip()}
    if not given:
        return
    marked = [
        {**message, "content": f"{_mark(i, 'first')} {given[i]} {_mark(i, 'last')}"} if i in given else dict(message)
        for i, message in enumerate(messages)
    ]
    try:
        shown = render(marked, False).lower()
    except ValueError:  # the template looks into contents, and refuses these
        lost = [index for index, content in given.items() if content.strip() not in text]
    else:
        lost = [index for index, content in given.items() if not _is_shown(index, content, messages[index], shown)]
    if lost:
        message = messages[lost[0]]
        calls = " with tool_calls" if message.get("tool_calls") else ""
        raise ValueError(
            f"messages[{lost[0]}]: the model's chat template leaves out the content of a message of role "
            f"{message.get('role')}{calls}, or a part of it: leave it out of the request, or give another template "
            "(--chat-template)"
        )


def _mark(index: int, place: str) -> str:
    return f"{place}_word_of_message_{index}_"


def _is_shown(index: int, content: str, message: Message, shown: str) -> bool:
    places = ["last"] if message.get("role") == "assistant" and "</think>" in content else ["first", "last"]
    return all(_mark(index, place) in shown for place in places)
