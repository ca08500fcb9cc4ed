"""Compiled entry points: functions that Python calls, and calls from one compiled function to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import _dispatcher
from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from workbench.cpu.attention.object_code import Code, Signature, code_of


class EntryPoint:
    """A function that is compiled once per machine, with everything it calls, for each combination of argument types.

    The global interpreter lock is released while it runs.

    Args:
        function: The function; it returns nothing.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.py_func = function
        self._codes: dict[Signature, Code] = {}
        self._calls: dict[bytes, Callable[..., None]] = {}

    def __call__(self, *arguments: Any) -> None:
        """Run the function."""
        fingerprint = _dispatcher.compute_fingerprint(arguments)
        call = self._calls.get(fingerprint)
        if call is None:
            call = self._calls[fingerprint] = self._code(types_of(*arguments)).call
        call(*arguments)

    def address(self, signature: Signature) -> int:
        """Address of the function for arguments of some types, for `call_by_address`."""
        return self._code(signature).address

    def _code(self, signature: Signature) -> Code:
        if signature not in self._codes:
            self._codes[signature] = code_of(self.py_func, signature, for_python=True)
        return self._codes[signature]


entry_point = EntryPoint
"""Decorator."""


def types_of(*arguments: Any) -> Signature:
    """Numba's types of some arguments."""
    return tuple(numba.typeof(argument) for argument in arguments)


def call_by_address(*signatures: Signature) -> Any:
    """A function for compiled code, ``call(address, (arguments, ...))``, that calls one of `EntryPoint.address`.

    numba copies what a function calls into the function's own code, and compiles it again. A call by address does not.

    Args:
        *signatures: Types of the arguments; others are refused when the caller is compiled.
    """

    @intrinsic
    def call(typing_context, address, arguments):
        signature = tuple(arguments)
        if signature not in signatures:
            raise errors.TypingError(f"arguments of types {arguments} instead of one of {signatures}")

        def codegen(context, builder, caller, values):
            parts = [builder.extract_value(values[1], index) for index in range(len(signature))]
            function_type = context.call_conv.get_function_type(types.none, signature)
            pointer = builder.inttoptr(values[0], function_type.as_pointer())
            status, _ = context.call_conv.call_function(builder, pointer, types.none, signature, parts)
            with cgutils.if_unlikely(builder, status.is_error):
                context.call_conv.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return types.none(types.intp, arguments), codegen

    return call
