"""The errors of `workbench.msl`."""

from __future__ import annotations


class MslError(RuntimeError):
    """A kernel did something that Metal leaves undefined or forbids.

    Attributes:
        kind: What happened, such as "out of bounds" or "threadgroup race"; the keys of `report.DESCRIPTIONS`.
        kernel: Name of the kernel.
        object: Name of the buffer, threadgroup variable or operation concerned; "" where there is none.
        index: Index of the element, in elements of the buffer or bytes of a threadgroup variable; None without one.
        thread_position_in_grid: The thread (x, y, z); None where no single thread is at fault.
        threadgroup_position_in_grid: Its threadgroup (x, y, z), or None.
        file: "NAME.source", "NAME.header" or what a ``#line`` in the source says; "" where unknown.
        line: Line in that file, from 1; 0 where unknown.
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
    """A kernel does not compile, or uses what Apple's compiler would reject."""


class MslCompilerMissing(RuntimeError):
    """There is no compiler on this machine that can compile kernels."""
