"""The variable under which a chat template is handed tools: ``tools``, or another one if it leaves those out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from workbench.models.tokenizer import ChatTemplateError, Tokenizer

MADE_UP: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "made_up", "description": "a", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"],
    }}},
]  # fmt: skip
_NAMES = ("tools", "xml_tools", "available_tools", "custom_tools")
"""Variables, the usual one first; SmolLM 3 reads the second."""

_FOUND: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()


def given(tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """The variables of a template that tells the model about tools; none without tools."""
    if not tools:
        return {}
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = next((name for name in _NAMES if _shows(tokenizer, name)), "tools")
    return {_FOUND[tokenizer]: tools}


def _shows(tokenizer: Tokenizer, name: str) -> bool:
    variables: dict[str, Any] = {name: MADE_UP}
    try:
        return "made_up" in tokenizer.apply_chat_template([{"role": "user", "content": "a"}], **variables)
    except ChatTemplateError:
        return name == "tools"  # its next rendering says what is wrong
