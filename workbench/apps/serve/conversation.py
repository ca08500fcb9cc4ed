"""Conversations as clients send them, and their text under the model's chat template.

The fields are vLLM's: ``add_generation_prompt``, ``continue_final_message``, ``chat_template_kwargs`` and
``add_special_tokens``. The template itself runs in a sandbox (workbench/models/tokenizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from workbench.apps.serve.given_tools import given
from workbench.apps.serve.known_forms import with_written_calls
from workbench.apps.serve.messages import ChatMessage
from workbench.models.template_losses import Render, check_shown
from workbench.models.tokenizer import Tokenizer, with_special_tokens

MAX_TEMPLATE_KWARGS = 32
"""Maximum number of variables that a request gives to the chat template."""
MAX_TEMPLATE_KWARG_LENGTH = 1024
"""Maximum number of characters of such a variable."""
RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "tokenize",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "self",
    )
)
"""Names that are not variables of a request: fields of the body, or arguments of the code that renders."""

_MARK, _SPACES = "END_OF_FINAL_MESSAGE", " \t \t"
"""Stand behind a text whose end in the rendered conversation is wanted. A template that strips contents strips the
spaces, which no template writes itself."""


Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
TemplateValue = str | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | float | bool | None
TemplateKwargs = Annotated[
    dict[str, TemplateValue], msgspec.Meta(extra_json_schema={"maxProperties": MAX_TEMPLATE_KWARGS})
]
ReasoningEffort = Annotated[str, msgspec.Meta(max_length=32)]
"""OpenAI's words are "none" to "xhigh"; a template that reads it may have others."""


class TemplateOptions(Protocol):
    """The fields of a body, besides its messages, that decide on the text of its conversation."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, TemplateValue] | None
    reasoning_effort: str | None
    add_special_tokens: bool | None


def render_conversation(
    messages: Sequence[ChatMessage],
    options: TemplateOptions,
    tokenizer: Tokenizer | None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> tuple[str, list[int]]:
    """The text of a conversation and its token ids.

    Args:
        messages: The messages, oldest first.
        options: The fields of the body that change the text.
        tokenizer: The model's tokenizer, or None.
        tools: The tools that the model may call.

    Raises:
        ValueError: Options exclude each other or are outside their ranges, the template refuses the messages or leaves
            some out, or there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("messages need a tokenizer, and the model came without one: give a prompt of token ids")
    kwargs = checked_kwargs(options.chat_template_kwargs or {})
    if (effort := options.reasoning_effort) is not None:  # as in vLLM, a variable: most templates do not read it
        if kwargs.get("reasoning_effort", effort) != effort:
            raise ValueError(
                f"reasoning_effort is {effort!r}, and in chat_template_kwargs it is "
                f"{kwargs['reasoning_effort']!r}: give one of them"
            )
        kwargs = kwargs | {"reasoning_effort": effort}
    dicts = with_written_calls([message.as_dict() for message in messages], tokenizer)
    if options.continue_final_message and options.add_generation_prompt:
        raise ValueError(
            "continue_final_message and add_generation_prompt cannot both be true: the first continues the final "
            "message, the second begins a new one"
        )

    variables = given(tokenizer, tools)
    if twice := sorted(variables.keys() & kwargs.keys()):
        raise ValueError(
            f"chat_template_kwargs: {twice[0]} is the variable in which the template gets tools: leave it out"
        )
    variables |= kwargs

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)

    if options.continue_final_message:
        text = _unfinished(dicts, render)
    else:
        text = render(dicts, options.add_generation_prompt is not False)
    check_shown(dicts, text, render)
    return text, encode(text, tokenizer, add_special_tokens=bool(options.add_special_tokens))


def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, with the tokens that the tokenizer puts around one if that is asked for."""
    token_ids = tokenizer.encode(text)
    return with_special_tokens(tokenizer, token_ids) if add_special_tokens else token_ids


def checked_kwargs(kwargs: dict[str, TemplateValue]) -> dict[str, TemplateValue]:
    """Variables for a template, checked.

    Raises:
        ValueError: There are too many, or a name or value is not allowed.
    """
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"chat_template_kwargs holds {len(kwargs)} variables: allowed are up to {MAX_TEMPLATE_KWARGS}")
    for name, value in kwargs.items():
        if name in RESERVED or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
            raise ValueError(
                f"chat_template_kwargs must hold names of variables, and none of {', '.join(sorted(RESERVED))}; "
                f"got {name[:70]!r}"
            )
        if isinstance(value, str) and len(value) > MAX_TEMPLATE_KWARG_LENGTH:
            raise ValueError(
                f"chat_template_kwargs: {name} holds {len(value)} characters: allowed are up to "
                f"{MAX_TEMPLATE_KWARG_LENGTH}"
            )
    return kwargs


def _unfinished(messages: list[dict[str, Any]], render: Render) -> str:
    """The conversation up to the end of the final message's content.

    Raises:
        ValueError: The final message has no content, or the template does not show it as it is.
    """
    *before, final = messages
    if not final["content"]:
        raise ValueError("continue_final_message needs a final message with content")
    text = render([*before, final | {"content": final["content"] + _MARK + _SPACES}], False)
    content, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ValueError("continue_final_message: the model's chat template does not show the final message as it is")
    return content if after.startswith(_SPACES) else content.rstrip()  # the template strips contents
