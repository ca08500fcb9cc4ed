"""Functions that only other compiled functions call.

numba makes machine code of every function, and a wrapper for Python, before a caller takes the function's optimised
code into its own. Nobody runs these, and they are a third of the time that compiling takes.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder


class _WithoutEnvironments:
    """numba's maker of code, which is told where a function's environment is: in machine code that is not made."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, environment: Any) -> None:
        """Nothing to set."""


class _Library(JITCodeLibrary):
    """A function's optimised code, of which no machine code is made."""

    @property
    def codegen(self) -> Any:
        """See `_WithoutEnvironments`."""
        return _WithoutEnvironments(self._codegen)

    def _optimize_final_module(self) -> None:
        """The caller's code is optimised, with this function in it."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """No address; numba asks for one when it has compiled a function."""
        self._ensure_finalized()
        return 0


class _Compiler(CompilerBase):
    """numba's own compiler, but for the library."""

    def define_pipelines(self) -> list[Any]:
        """See numba's class."""
        self.state.library = _Library(self.state.targetctx.codegen(), "inner")
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


_OPTIONS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

jit = numba.njit(nogil=True, error_model="numpy", pipeline_class=_Compiler, **_OPTIONS)
"""Compile a function that Python never calls: that would end the process. Floating-point arithmetic follows IEEE
rules, so NaN and -inf keep their meaning."""
