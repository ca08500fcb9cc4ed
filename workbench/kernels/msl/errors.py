"""The errors of `workbench.kernels.msl`."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass


@dataclass(eq=False, repr=False)
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
        other_thread: For a race, the thread of the earlier access, by its index in the threadgroup; else None.
        other_threadgroup: Its threadgroup (x, y, z), or None.
        other_place: File and line of the earlier access, or of the operation at which others wait; ("", 0) if unknown.
    """

    message: InitVar[str]
    _: KW_ONLY
    kind: str = ""
    kernel: str = ""
    object: str = ""
    index: int | None = None
    thread_position_in_grid: tuple[int, int, int] | None = None
    threadgroup_position_in_grid: tuple[int, int, int] | None = None
    file: str = ""
    line: int = 0
    other_thread: int | None = None
    other_threadgroup: tuple[int, int, int] | None = None
    other_place: tuple[str, int] = ("", 0)


class MslCompileError(MslError):
    """A kernel does not compile, or Apple's compiler would reject it."""


class MslCompilerMissing(RuntimeError):
    """No compiler on this machine can compile kernels."""
