"""Calls from one compiled function to another, by address."""

from __future__ import annotations

from typing import Any

import numba
from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from workbench.kernels.cpu.attention.object_code import Signature


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
