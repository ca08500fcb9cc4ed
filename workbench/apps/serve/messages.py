"""Messages of a conversation as clients send them, those of this server's own answers among them.

The fields are those that the messages of the ``openai`` package have, and vLLM's two names for the reasoning. A client
may send a message back as it came, or as the package writes it. Parts that a text cannot hold are refused unless they
are null.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from workbench.base.outside_files import TwoValuesError, json_value


def _number(literal: str) -> float | str:
    """A number of a call; one that no double holds stays the text that the model wrote."""
    value = float(literal)
    return value if math.isfinite(value) else literal


_ARGUMENTS = msgspec.json.Decoder(dict[str, Any], float_hook=_number)

_ROLES = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's, and the roles of the same meaning that chat templates know."""


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content that is text."""

    text: str
    # Labels: equal beginnings are always found in the cache.
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """A part with which the model has declined to answer; as text it is what the model said."""

    refusal: str

    @property
    def text(self) -> str:
        """The text."""
        return self.refusal


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model called, and its arguments as JSON."""

    name: str
    arguments: str | None
    parsed_arguments: Any = None  # the arguments again, which the openai package adds


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in an earlier message of the model; one that was put together from a stream may have its index."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall

    def as_dict(self) -> dict[str, Any]:
        """The call in the form that chat templates expect: the arguments as an object.

        Raises:
            ValueError: The arguments are not a JSON object, or have two values of one name.
        """
        text = self.function.arguments or "{}"
        try:
            arguments = _ARGUMENTS.decode(text)
            json_value(text)  # refuses two values of one name
        except TwoValuesError as problem:
            raise ValueError(f"messages: the arguments of a call of {self.function.name[:40]!r}: {problem}") from None
        except (ValueError, RecursionError):  # all that msgspec raises, and depths that only the second reader refuses
            raise ValueError(
                f"messages: the arguments of a call of {self.function.name[:40]!r} are not a JSON object"
            ) from None
        return {
            "id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments},
        }  # fmt: skip


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Fields of the model's answers.
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None
    audio: None = None
    # Labels of the content.
    annotations: list[Any] | None = None
    parsed: Any = None
    cache_control: Any = None

    def as_dict(self) -> dict[str, Any]:
        """The message in the form that chat templates expect.

        Raises:
            ValueError: It has no content, a field of another role, or two different texts of the same thing.
        """
        calls, reasoning = self._calls(), self._reasoning()
        said = self.content if self.content is not None else self.refusal
        if said is None and not calls and not reasoning:
            raise ValueError(f"messages: a message of role {self.role} needs content")
        for field in ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal"):
            if getattr(self, field) and self.role != "assistant":
                raise ValueError(f"messages: {field} is a field of role assistant, got role {self.role}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"messages: tool_call_id is a field of role tool, got role {self.role}")
        # As in vLLM, parts become lines.
        text = "\n".join(part.text for part in said) if isinstance(said, list) else said or ""
        message: dict[str, Any] = {"role": _ROLES.get(self.role, self.role), "content": text}
        if self.name is not None:
            message["name"] = self.name
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if reasoning:  # templates read the one name or the other
            message["reasoning"] = message["reasoning_content"] = reasoning
        return message

    def _calls(self) -> list[ToolCall]:
        """The calls, also one under OpenAI's older name."""
        if self.function_call is None:
            return self.tool_calls or []
        if self.tool_calls:
            raise ValueError("messages: function_call is the older name of tool_calls: give one of them")
        return [ToolCall(function=self.function_call)]

    def _reasoning(self) -> str | None:
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise ValueError("messages: reasoning and reasoning_content are two names of one text, got two texts")
        return self.reasoning or self.reasoning_content
