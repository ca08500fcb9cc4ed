"""Compiled entry points: functions that Python calls.

Importing and calling them imports neither numba nor the module of the function, as long as its machine code is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workbench.kernels.cpu.attention.object_code import Code, Signature, Wanted, code_of

_IS_C, _IS_F, _IS_TYPE = 0x1, 0x2, 0x500  # bits of an array's flags: its order, and whether it is aligned and writeable
_NAMES = {int: "int64", float: "float64"}


class EntryPoint:
    """A function that is compiled once per machine, with everything it calls, for each combination of argument types.

    The global interpreter lock is released while it runs.

    Args:
        function: The function, or "module:name" of one; it returns nothing.
    """

    def __init__(self, function: Callable[..., None] | str) -> None:
        if isinstance(function, str):
            self._module, _, self._name = function.partition(":")
        else:
            self.py_func = function
            self._module, self._name = function.__module__, function.__name__
        self._codes: dict[str, Code] = {}
        self._calls: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *arguments: Any) -> None:
        """Run the function."""
        kinds = kinds_of(arguments)
        call = self._calls.get(kinds)
        if call is None:
            call = self._calls[kinds] = self._code(arguments, kinds).call
        call(*arguments)

    def address(self, *arguments: Any) -> int:
        """Address of the function for arguments of the types of these, for `call_by_address`."""
        return self._code(arguments, kinds_of(arguments)).address

    def _code(self, arguments: Sequence[Any], kinds: tuple[Any, ...]) -> Code:
        types = _text(kinds)
        if types not in self._codes:

            def signature() -> Signature:
                from workbench.kernels.cpu.attention.calls import types_of

                return types_of(*arguments)

            self._codes[types] = code_of(Wanted(self._module, self._name, types, signature, for_python=True))
        return self._codes[types]


entry_point = EntryPoint
"""Decorator."""


def kinds_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Types of arguments as far as numba tells them apart; those of arrays are their dtype, dimensions and flags."""
    kinds: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind is np.ndarray:
            flags = argument.flags.num
            order = _IS_C if flags & _IS_C else flags & _IS_F
            kinds.append((argument.dtype, argument.ndim, flags & _IS_TYPE | order))
        elif isinstance(argument, tuple):
            kinds.append((kind, kinds_of(argument)))
        else:
            kinds.append(kind)
    return tuple(kinds)


def _text(kinds: Sequence[Any]) -> str:
    """The same text in every process for what `kinds_of` has found."""
    texts = []
    for kind in kinds:
        if isinstance(kind, type):
            texts.append(_NAMES.get(kind, kind.__name__))
        elif isinstance(kind[0], type):
            texts.append(f"{kind[0].__name__}{getattr(kind[0], '_fields', ())}({_text(kind[1])})")
        else:
            texts.append(f"{kind[0].str}[{kind[1]}]{kind[2]:x}")
    return ", ".join(texts)
