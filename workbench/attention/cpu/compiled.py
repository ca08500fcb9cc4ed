"""Compiled entry points, kept on disk from one process to the next."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from workbench.attention.cpu.simd import config, jit
from workbench.cache_folder import cache_folder


def entry_point(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that Python calls, and everything it calls, once per machine instead of per process.

    If the folder of `kept_code` cannot be written, the function is compiled in every process.
    """
    try:
        with kept_code(function):
            return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except (OSError, RuntimeError):  # numba raises RuntimeError when it can write to none of its cache folders
        return jit(function)


def types_of(*arguments: Any) -> tuple[types.Type, ...]:
    """Numba's types of some arguments."""
    return tuple(numba.typeof(argument) for argument in arguments)


def native_address(function: Any, signature: tuple[types.Type, ...]) -> int:
    """Address of a function of `entry_point` for arguments of some types, for `call_by_address`."""
    function.compile(signature)
    compiled = function.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def call_by_address(signature: tuple[types.Type, ...]) -> Any:
    """A function for compiled code, ``call(address, (arguments, ...))``, that calls one of `native_address`.

    numba copies what a function calls into the function's own code, and compiles it again. A call by address does not.

    Args:
        signature: Types of the arguments; others are refused when the caller is compiled.
    """

    @intrinsic
    def call(typing_context, address, arguments):
        if tuple(arguments) != signature:
            raise errors.TypingError(f"arguments of types {arguments} instead of {signature}")

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


@contextmanager
def kept_code(function: Callable[..., Any]) -> Iterator[None]:
    """Let numba keep what is declared inside the block in a folder for the present sources.

    numba notices a change in the file of a function, but not in the files of the functions it calls. So the code is
    kept in a folder named after a digest of all sources of compiled code: those in this package, which all compiled
    code uses, and those beside the function. Each version has a different folder.

    Raises:
        OSError: The folder cannot be written.
    """
    before = config.CACHE_DIR
    try:
        config.CACHE_DIR = str(_code_folder(Path(function.__code__.co_filename).parent))
        yield
    finally:
        config.CACHE_DIR = before


def _code_folder(sources: Path) -> Path:
    folder = cache_folder() / "numba" / _source_digest(sources)
    if not folder.exists():
        _announce()
    return folder


@cache
def _announce() -> None:
    """Say once that the code is not compiled yet, because the first use takes a while."""
    print(
        f"compiling kernels for this CPU, once: half a minute of processor time; they are kept in {cache_folder()}",
        file=sys.stderr,
        flush=True,
    )


@cache
def _source_digest(sources: Path) -> str:
    digest = hashlib.sha256()
    for folder in sorted({Path(__file__).parent, sources}):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
