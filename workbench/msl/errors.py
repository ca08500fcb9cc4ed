"""The errors of `workbench.msl`."""

from __future__ import annotations


class MslError(RuntimeError):
    """A kernel did something that Metal leaves undefined or forbids.

    Attributes:
        kind: Kind of fault, such as "out of bounds" or "threadgroup race": a key of `report.DESCRIPTIONS`.
        kernel: Name of the kernel.
        object: Name of the buffer, threadgroup variable or operation concerned; "" if there is none.
        index: Index of the element, in elements of the buffer or bytes of a threadgroup variable; None without one.
        thread_position_in_grid: The thread (x, y, z); None if no single thread is at fault.
        threadgroup_position_in_grid: Its threadgroup (x, y, z), or None.
        file: "NAME.source", "NAME.header" or the name in a ``#line`` of the source; "" if unknown.
        line: Line in that file, from 1; 0 if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        kernel: str = "",
        object: str = "",
        index: int | None = None,
        thread_position_in_grid: tuple[int, int, int] | None = None,
        threadgroup_position_in_grid: tuple[int, int, int] | None = None,
        file: str = "",
        line: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.object = object
        self.index = index
        self.thread_position_in_grid = thread_position_in_grid
        self.threadgroup_position_in_grid = threadgroup_position_in_grid
        self.file = file
        self.line = line


class MslCompileError(MslError):
    """A kernel does not compile, or Apple's compiler would reject it."""


class MslCompilerMissing(RuntimeError):
    """No compiler on this machine can compile kernels."""
