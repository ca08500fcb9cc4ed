"""Run a compiled kernel: its memory and the structures it shares with the runtime (runtime/runtime.h)."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.kernels.msl.compiler import RUNTIME_FOLDER

MAX_THREADS = 1024
STACK_BYTES = 128 << 10
STACK_GUARD_BYTES = 16 << 10
"""A page of a Mac, and four of most other machines."""
MAP_NORESERVE = 0x40 if sys.platform == "darwin" else 0x4000
"""Python has it from 3.12 on."""
THREADGROUP_ARENA_BYTES = 1 << 16

# A slot of the address range is so large that no 32-bit index of an 8-byte element leaves it. There is one for every
# buffer that Metal can bind and one for threadgroup memory. Only the part that a launch uses is backed by memory.
SLOT_SHIFT = 36
NUM_SLOTS = 32


# Names of C's types that differ from Python's. A launch's inputs and functions are addresses here.
_KINDS: dict[str, Any] = {
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
    "const char*": ctypes.c_char_p,
    "const uint8_t*": ctypes.c_void_p,
    "uint8_t*": ctypes.c_void_p,
    "const uint64_t*": ctypes.c_void_p,
    "Entry": ctypes.c_void_p,
}


def _structures() -> dict[str, Any]:
    """The structures of a launch, with the fields that runtime.h declares."""
    kinds, made = dict(_KINDS), {}
    header = (RUNTIME_FOLDER / "runtime.h").read_text().partition("// ---- the state of the running")[0]
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", header, re.MULTILINE | re.DOTALL):
        fields = [
            (field, kinds[kind] * int(count) if count else kinds[kind])
            for kind, field, count in re.findall(r"^  ([\w ]+\*?) (\w+)(?:\[(\d+)\])?;", body, re.MULTILINE)
        ]
        made[name] = kinds[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        kinds[f"{name}*"] = ctypes.POINTER(made[name])
    return made


STRUCTURES = _structures()
"""Buffer, Fault, RowRead, Variable, Event and Launch."""

EVENT = np.dtype(STRUCTURES["Event"])
"""An event of a recording, as NumPy reads it."""


@dataclass
class Binding:
    """A buffer bound to a kernel.

    Attributes:
        name: Name in the kernel's signature.
        data: Contents as bytes; only the size matters for an output without an initial value. After the launch, outputs
            hold the kernel's results.
        element_bytes: Bytes per element.
        is_output: Whether the kernel may write.
        is_initialised: Whether an output starts with these contents.
        argument_offset: Byte of ``data`` that the kernel's pointer points to; not 0 for negative strides.
        traced_row_bytes: Bytes per row if the readers of each row are recorded, else 0.
    """

    name: str
    data: np.ndarray
    element_bytes: int
    is_output: bool = False
    is_initialised: bool = False
    argument_offset: int = 0
    traced_row_bytes: int = 0


@dataclass(frozen=True)
class Recorded:
    """The events of a launch as the runtime wrote them.

    Attributes:
        events: Array of `EVENT`.
        payload: Values of the lanes that met in simd functions; events say where.
        num_left_out: Number of events that had no room.
        variables: Name, bytes, bytes per element and type code of each threadgroup variable.
    """

    events: np.ndarray
    payload: np.ndarray
    num_left_out: int
    variables: list[tuple[str, int, int, int]]


@dataclass(frozen=True)
class ToRecord:
    """The threadgroups to record (1 for each of them, by index) and the largest size of the recording in bytes."""

    threadgroups: np.ndarray
    max_bytes: int


@dataclass(frozen=True)
class Finished:
    """A launch that has ended: its structures, the address of the library, and its recording if there is one."""

    launch: Any
    buffers: Any
    rows_read: list[tuple[int, int, int]]
    library_address: int
    seconds: float
    recorded: Recorded | None = None


class _Arena:
    """A reserved range of addresses for the buffers of one launch at a time, and the threads' stacks."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.slot_shift = SLOT_SHIFT
        while not (base := self._reserve(NUM_SLOTS << self.slot_shift)):
            self.slot_shift -= 1  # the process has a limit on address space
            if self.slot_shift < 24:
                raise MemoryError("not enough address space to run a kernel")
        self.address = base
        self._stacks = mmap.mmap(-1, MAX_THREADS * STACK_BYTES)
        self.stacks = ctypes.addressof(ctypes.c_char.from_buffer(self._stacks))
        for thread in range(MAX_THREADS):
            self._libc.mprotect(self.stacks + thread * STACK_BYTES, STACK_GUARD_BYTES, 0)

    def _reserve(self, size: int, address: int | None = None) -> int | None:
        """Reserve addresses without memory; memory that an address in use had is released."""
        no_access, fixed = 0, 0x10
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | (fixed if address else 0)
        found = self._libc.mmap(address, size, no_access, flags, -1, 0)
        return None if found in (None, ctypes.c_void_p(-1).value) else found

    def middle(self, slot: int) -> int:
        """Address at which the contents of a slot begin."""
        return self.address + (slot << self.slot_shift) + (1 << (self.slot_shift - 1))

    def provide(self, slot: int, size: int) -> int:
        """Allocate memory for the contents of a slot and return its address."""
        if size >= 1 << (self.slot_shift - 1):
            raise MemoryError(f"a buffer of {size} bytes is too large for a kernel on the CPU")
        pages = _whole_pages(size)
        if self._libc.mprotect(self.middle(slot), pages, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"no memory for a buffer of {size} bytes: error {ctypes.get_errno()}")
        return self.middle(slot)

    def withdraw(self, slot: int, size: int) -> None:
        """Release the memory of a slot."""
        self._reserve(_whole_pages(size), self.middle(slot))


def _whole_pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


@functools.cache
def _arena() -> _Arena:
    return _Arena()


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.msl_launch.argtypes = [ctypes.POINTER(STRUCTURES["Launch"])]
    library.msl_release_rows.argtypes = [ctypes.POINTER(STRUCTURES["RowRead"])]
    library.msl_release_rows.restype = None
    library.msl_release_recording.argtypes = [ctypes.POINTER(STRUCTURES["Event"]), ctypes.c_void_p]
    library.msl_release_recording.restype = None
    library.msl_library_address.restype = ctypes.c_uint64
    return library


_one_launch_at_a_time = threading.Lock()


def run_library(
    path: Path,
    bindings: Sequence[Binding],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    *,
    checks: bool,
    order: int,
    statistics: bool,
    time_limit: float,
    to_record: ToRecord | None = None,
) -> Finished:
    """Run a kernel over a grid.

    Args:
        path: The library, from `compiler.compile_kernel`.
        bindings: The kernel's buffers in the order of its signature.
        grid: Number of threads (x, y, z).
        threadgroup: Threads per threadgroup (x, y, z), none larger than the grid.
        checks: Whether the library was compiled with checks.
        order: 0 runs threads and threadgroups in ascending order, 1 in descending order.
        statistics: Whether to count traffic per buffer.
        time_limit: Seconds after which a launch with checks ends with a fault; 0 for no limit.
        to_record: The threadgroups to record; requires ``checks``.
    """
    library = _library(path)
    with _one_launch_at_a_time:
        arena = _arena()
        structs = (STRUCTURES["Buffer"] * len(bindings))()
        arguments = (ctypes.c_uint64 * len(bindings))()
        try:
            for i, binding in enumerate(bindings):
                size = binding.data.nbytes
                address = arena.provide(i, size)
                _fill(address, binding)
                arguments[i] = address + binding.argument_offset
                structs[i] = STRUCTURES["Buffer"](
                    name=binding.name.encode(),
                    address=address,
                    bytes=size,
                    element_bytes=binding.element_bytes,
                    is_output=binding.is_output,
                    is_initialised=binding.is_initialised,
                    traced_row_bytes=binding.traced_row_bytes,
                )
            launch = STRUCTURES["Launch"](
                entry=ctypes.cast(library.msl_entry, ctypes.c_void_p),
                arguments=ctypes.cast(arguments, ctypes.c_void_p),
                grid=grid,
                threadgroup=threadgroup,
                buffers=structs,
                num_buffers=len(bindings),
                order=order,
                checks=checks,
                statistics=statistics,
                arena_address=arena.address,
                arena_slot_shift=arena.slot_shift,
                threadgroup_memory=arena.provide(len(bindings), THREADGROUP_ARENA_BYTES),
                stacks=arena.stacks,
                time_limit_seconds=time_limit,
            )
            if to_record:
                launch.recorded_threadgroups = to_record.threadgroups.ctypes.data
                launch.max_recorded_bytes = to_record.max_bytes
            started = time.perf_counter()
            library.msl_launch(ctypes.byref(launch))
            seconds = time.perf_counter() - started
            rows = [(r.threadgroup, r.buffer, r.row) for r in launch.rows_read[: launch.num_rows_read]]
            library.msl_release_rows(launch.rows_read)
            recorded = _recorded(launch) if to_record else None
            library.msl_release_recording(launch.events, launch.payload)
            for struct, binding in zip(structs, bindings):
                if binding.is_output:
                    ctypes.memmove(binding.data.ctypes.data, struct.address, binding.data.nbytes)
        finally:
            for i, binding in enumerate(bindings):
                arena.withdraw(i, binding.data.nbytes)
            arena.withdraw(len(bindings), THREADGROUP_ARENA_BYTES)
    return Finished(launch, structs, rows, library.msl_library_address(), seconds, recorded)


def position_of(threadgroup: int, launch: Any) -> tuple[int, int, int]:
    """The position (x, y, z) in the grid of the threadgroup with an index."""
    across, down = (-(-launch.grid[axis] // launch.threadgroup[axis]) for axis in (0, 1))
    return threadgroup % across, threadgroup // across % down, threadgroup // across // down


def _recorded(launch: Any) -> Recorded:
    events, payload = b"", b""
    if launch.num_events:
        events = ctypes.string_at(launch.events, launch.num_events * EVENT.itemsize)
    if launch.num_payload_bytes:
        payload = ctypes.string_at(launch.payload, launch.num_payload_bytes)
    placed = [launch.variables[number] for number in range(launch.num_variables)]
    return Recorded(
        np.frombuffer(events, EVENT),
        np.frombuffer(payload, np.uint8),
        launch.num_events_left_out,
        [((v.name or b"").decode(), v.bytes, v.element_bytes, v.element_type) for v in placed],
    )


def _fill(address: int, binding: Binding) -> None:
    if binding.is_output and not binding.is_initialised:
        ctypes.memset(address, 0xFF, binding.data.nbytes)  # the bit pattern of a NaN
    else:
        ctypes.memmove(address, binding.data.ctypes.data, binding.data.nbytes)
