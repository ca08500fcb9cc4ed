"""Turn the fault that the runtime found into an error that a person can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.kernels.msl.diagnostics import in_metal_words, quote
from workbench.kernels.msl.errors import MslError
from workbench.kernels.msl.launch import Binding, Finished, position_of
from workbench.kernels.msl.source_lines import SourceLine, line_table

# The message of every kind of fault. {access} is "read" or "write", {where} the element or byte meant.
DESCRIPTIONS = {
    "out of bounds": "out-of-bounds {access} of {bytes} bytes at {where} (the buffer holds {count})",
    "write to input": "write to the input {where}",
    "output read before written": "read of {where} before any write to it: outputs start uninitialised",
    "output not written": "{where} was never written: {unwritten} bytes of the output are missing",
    "device race": "race: {access} of {where}, not ordered after the {earlier} by {other}",
    "threadgroup out of bounds": "out-of-bounds {access} of {bytes} bytes at {where} (the variable holds {count})",
    "threadgroup uninitialised": "read of {bytes} bytes at {where}, which this threadgroup has not written",
    "threadgroup memory": "with {object}, the kernel uses {count} of threadgroup memory: the maximum is 32768 bytes",
    "threadgroup race": "race: {access} of {where}, not ordered after the {earlier} by {other}",
    "wild access": "{access} of {bytes} bytes through a pointer outside every buffer (address {address:#x})",
    "array out of bounds": "index {offset} is outside an array of type {detail}",
    "local memory out of bounds": "a pointer into a local array or variable is out of its bounds",
    "private memory": "the thread has used up its 128 KiB of private memory",
    "no memory": "access to an address without memory, or to a misaligned vector",
    "misaligned": "{access} of {bytes} bytes at an address that is {offset} bytes past a multiple of {bytes}",
    "arithmetic": "{detail}",
    "arithmetic stopped": "integer division by zero",
    "divergence": "no thread can continue: {detail}",
    "return past barrier": "a thread returned while others wait at threadgroup_barrier: {detail}",
    "barrier after return": "threadgroup_barrier after {detail} have returned: not all threads can reach it",
    "different barriers": "threads of one threadgroup wait at different threadgroup_barriers, others at {other_line}",
    "simd after return": "{object} after {detail} of the simdgroup have returned: not all lanes take part",
    "different simd operations": (
        "lanes of one simdgroup are at different simd operations: {object}, and {other_object} at {other_line}"
    ),
    "return past simd": "a lane returned while the others of its simdgroup wait in {object}",
    "partial simdgroup": "not all 32 lanes of the simdgroup made the same calls of {object}",
    "absent lane": "{object} reads lane {detail}, which does not take part",
    "assertion": "assert failed",
    "time limit": "the launch ran longer than its time limit",
}


def fault_of(
    finished: Finished,
    bindings: Sequence[Binding],
    library: Path,
    kernel: str,
    texts: Mapping[str, str],
) -> MslError | None:
    """The fault that a launch recorded, with kernel, buffer, index, thread and source line; None without one.

    Args:
        finished: The launch.
        bindings: Its buffers.
        library: The library that ran.
        kernel: The kernel's name.
        texts: Texts by file name ("NAME.source", "NAME.header"), from which the line is quoted.
    """
    fault = finished.launch.fault
    if not fault.kind:
        return None
    kind = fault.kind.decode()
    binding = next((b for b in bindings if b.name.encode() == fault.object), None)
    place = _place(fault, finished, library)
    other = _line_of(fault.other_code_address, finished, library)
    other_line = f"{other.file}:{other.line}" if other else ""
    index = _index(fault, binding)
    text = DESCRIPTIONS[kind].format(
        access="write" if fault.is_write else "read",
        bytes=fault.access_bytes,
        where=_where(fault, binding),
        count=_count(fault, binding),
        object=(fault.object or b"").decode(),
        other_object=(fault.other_object or b"").decode(),
        offset=fault.byte_offset,
        address=fault.byte_offset & (1 << 64) - 1,
        detail=in_metal_words(fault.detail.decode()),
        earlier=fault.detail.decode(),
        unwritten=next((b.unwritten_bytes for b in finished.buffers if b.name == fault.object), 0),
        other=f"thread {fault.other_thread} of threadgroup {fault.other_threadgroup}"
        + (f" at {other_line}" if other else ""),
        other_line=other_line or "another line",
    )
    message = f"kernel {kernel}: {text}"
    if fault.has_thread:
        message += (
            f"\n  by thread {tuple(fault.thread_position_in_grid)} of the grid: thread "
            f"{fault.thread_index_in_threadgroup} (simdgroup {fault.simdgroup_index_in_threadgroup}, lane "
            f"{fault.thread_index_in_simdgroup}) of threadgroup {tuple(fault.threadgroup_position_in_grid)}"
        )
    if place:
        message += f"\n  at {place.file}:{place.line}: {quote(texts, place.file, place.line)}".rstrip(": ")
    is_race = bool(fault.kind.endswith(b"race"))
    return MslError(
        message,
        kind=kind,
        kernel=kernel,
        object=(fault.object or b"").decode(),
        index=index,
        thread_position_in_grid=tuple(fault.thread_position_in_grid) if fault.has_thread else None,
        threadgroup_position_in_grid=tuple(fault.threadgroup_position_in_grid) if fault.has_thread else None,
        file=place.file if place else "",
        line=place.line if place else 0,
        other_thread=fault.other_thread if is_race else None,
        other_threadgroup=position_of(fault.other_threadgroup, finished.launch) if is_race else None,
        other_place=(other.file, other.line) if other else ("", 0),
    )


def _place(fault: Any, finished: Finished, library: Path) -> SourceLine | None:
    if fault.line:
        return SourceLine(Path(fault.file.decode()).name, fault.line)
    return _line_of(fault.code_address, finished, library)


def _line_of(code_address: int, finished: Finished, library: Path) -> SourceLine | None:
    """The line of the call that returns to ``code_address``."""
    if not code_address:
        return None
    return line_table(library).find(code_address - finished.library_address - 1)


def _index(fault: Any, binding: Binding | None) -> int | None:
    has_index = fault.object or fault.access_bytes or fault.byte_offset
    if fault.kind in (b"divergence", b"wild access", b"misaligned") or not has_index:
        return None
    return fault.byte_offset // binding.element_bytes if binding else fault.byte_offset


def _where(fault: Any, binding: Binding | None) -> str:
    """The element of a buffer, or the byte of a variable."""
    name = (fault.object or b"").decode()
    if binding is None:
        return f"byte {fault.byte_offset} of {name or 'threadgroup memory'}"
    element, rest = divmod(fault.byte_offset, binding.element_bytes)
    return f"{name}[{element}]" + (f" + {rest} bytes" if rest else "")


def _count(fault: Any, binding: Binding | None) -> str:
    if binding is None:
        return f"{fault.object_bytes} bytes"
    return f"{fault.object_bytes // binding.element_bytes} elements"
