"""Reprs that fit a screen: the fields that differ from their defaults, and the beginning of long values."""

from __future__ import annotations

import reprlib
from typing import Any

import msgspec


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxlist = self.maxdict = 6
        self.maxstring, self.maxother = 80, 600

    def repr_FrozenDict(self, values: dict[Any, Any], level: int) -> str:
        return self.repr_dict(values, level)


_SHORT = _Short()


def _differs(value: Any, default: Any) -> bool:
    """Whether a value is not its default; no array is, and comparing one with a tuple fails or gives many answers."""
    return not (isinstance(value, type(default)) and value == default)


def short_repr(struct: msgspec.Struct) -> str:
    """The ``__repr__`` of a record, which may hold a prompt of thousands of tokens.

    Example:
        >>> from workbench import RequestInfo
        >>> RequestInfo("r0", 1000, prompt_token_ids=tuple(range(1000)))
        RequestInfo(request_id='r0', num_prompt_tokens=1000, prompt_token_ids=(0, 1, 2, 3, 4, 5, ...))
    """
    names, defaults = struct.__struct_fields__, struct.__struct_defaults__
    is_set = [True] * (len(names) - len(defaults))
    is_set += [_differs(getattr(struct, name), default) for name, default in zip(names[len(is_set) :], defaults)]
    shown = (f"{name}={_SHORT.repr(getattr(struct, name))}" for name, given in zip(names, is_set, strict=True) if given)
    return f"{type(struct).__name__}({', '.join(shown)})"
