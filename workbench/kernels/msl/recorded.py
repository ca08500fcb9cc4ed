"""The contents of a recorded launch: events, arrays, values, and the fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from workbench.kernels.msl.source_lines import SourceLine

if TYPE_CHECKING:
    import mlx.core as mx

    from workbench.kernels.msl.errors import MslError

LOAD, STORE, ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_UPDATE = range(5)
BARRIER_WAIT, BARRIER_PASSED, SIMDGROUP_BARRIER, SIMD_FUNCTION, WATCH, RETURN, FAULT = range(8, 15)

KIND_NAMES = {
    LOAD: "load",
    STORE: "store",
    ATOMIC_LOAD: "atomic load",
    ATOMIC_STORE: "atomic store",
    ATOMIC_UPDATE: "atomic update",
    BARRIER_WAIT: "waits at a barrier",
    BARRIER_PASSED: "barrier passed",
    SIMDGROUP_BARRIER: "simdgroup barrier",
    SIMD_FUNCTION: "simd function",
    WATCH: "watched value",
    RETURN: "returned",
    FAULT: "fault",
}
"""The kinds of events, as runtime/runtime.h numbers them."""

WRITES = (STORE, ATOMIC_STORE, ATOMIC_UPDATE)
READS = (LOAD, ATOMIC_LOAD, ATOMIC_UPDATE)
NO_ARRAY = 0xFFFF
NO_LANE = 255
SIMD_WIDTH = 32
VALUE_BYTES = 16
MULTIPLY_ACCUMULATE = "simdgroup_multiply_accumulate"

EVENT = np.dtype(
    [
        ("kind", "u1"), ("bytes", "u1"), ("has_value", "u1"), ("thread", "u2"), ("group", "u2"), ("array", "u2"),
        ("place", "u2"), ("stack", "u2"), ("name", "u2"), ("site", "u4"), ("detail", "u4"), ("offset", "i8"),
        ("value", "u1", (VALUE_BYTES,)),
    ]
)  # fmt: skip
"""An event. ``array``, ``place``, ``stack``, ``name`` and ``group`` are indices into the lists of the recording;
``site`` is the place in the compiled code, finer than a line; ``detail`` are the flags of a barrier, the mask of the
lanes in a simd function, or the type of a watched value; ``offset`` is in bytes."""

DTYPES = (
    "float32", "float16", "bfloat16", "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool", "int64", "uint64",
)  # fmt: skip
"""Element types by the codes of include/simd.h."""

ITEMSIZE = {"bool": 1} | {name: int("".join(filter(str.isdigit, name))) // 8 for name in DTYPES if name != "bool"}


@dataclass(frozen=True)
class RecordedArray:
    """A buffer or a threadgroup variable of a recorded kernel.

    Attributes:
        name: Its name in the kernel.
        role: "input", "output", "shape" (shapes, strides and numbers of axes), or "threadgroup".
        dtype: Type of its elements, such as "float32".
        shape: Its shape; a threadgroup variable has one axis.
        num_bytes: Its size.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class RecordedFault:
    """The fault that ended a recorded launch.

    Attributes:
        kind: A key of `workbench.kernels.msl.report.DESCRIPTIONS`.
        message: The report, as the error of a launch would have it.
        event: Index of its event; None if it is found after the last threadgroup, or in one that is not recorded.
        file: Text in which it is, and its ``line``.
        line: Line, from 1; 0 if unknown.
        earlier: Index of the event that it conflicts with, for a race; None for other faults.
        earlier_file: Text of the earlier access.
        earlier_line: Its line.
    """

    kind: str
    message: str
    event: int | None
    file: str
    line: int
    earlier: int | None = None
    earlier_file: str = ""
    earlier_line: int = 0


@dataclass(eq=False, repr=False)
class RecordedLaunch:
    """The events of chosen threadgroups of a launch, in the order in which they happened.

    Threadgroups run one after the other, and so do the lanes of a simdgroup between two points where they meet;
    `workbench.kernels.msl.instructions` puts the lanes side by side again. Loads and stores are those of the compiled
    kernel: a value that the compiler keeps in a register is loaded once.

    Attributes:
        kernel: Name of the kernel.
        texts: Its texts by name ("NAME.source", "NAME.header").
        grid: Threads (x, y, z).
        threadgroup: Threads per threadgroup (x, y, z).
        arrays: Buffers in the order of the signature, then the threadgroup variables.
        threadgroups: Positions of the recorded threadgroups, in the order in which they ran.
        events: Array of `EVENT`.
        payload: Bytes of the values that lanes gave to and got from simd functions, see `meeting`.
        places: Lines of the source by index; index 0 is an unknown place.
        stacks: By index the calls of functions around a place, the outermost first; index 0 has none.
        names: Names of simd functions, watched values and faults by index.
        fault: The fault that ended the launch, or None.
        num_threadgroups: Number of threadgroups of the launch.
        num_left_out: Number of events that had no room in the recording; they are the last ones.
        about: Origin of the launch, such as a step of an engine; "" if nothing is known.
        inputs: The launch's inputs by name; None if the recording comes from a file.
        outputs: The launch's outputs; None if it ended with a fault, or if the recording comes from a file.
        error: The fault as the error that the launch would have raised; None without one, or from a file.
    """

    kernel: str
    texts: dict[str, str]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    arrays: tuple[RecordedArray, ...]
    threadgroups: tuple[tuple[int, int, int], ...]
    events: np.ndarray
    payload: np.ndarray
    places: tuple[SourceLine, ...]
    stacks: tuple[tuple[SourceLine, ...], ...]
    names: tuple[str, ...]
    fault: RecordedFault | None
    num_threadgroups: int
    num_left_out: int = 0
    about: str = ""
    inputs: dict[str, mx.array] | None = field(default=None)
    outputs: list[mx.array] | None = field(default=None)
    error: MslError | None = field(default=None)

    def __repr__(self) -> str:
        asked = len(self.threadgroups)
        text = f"kernel {self.kernel}: {len(self.events)} events of {asked} of {self.num_threadgroups} threadgroups"
        if self.num_left_out:
            text += f"; {self.num_left_out} later events had no room"
        return text + (f"; fault: {self.fault.kind} at {self.fault.file}:{self.fault.line}" if self.fault else "")

    def place(self, event: int) -> SourceLine:
        """The line of the source at which an event happened."""
        return self.places[self.events["place"][event]]

    def callers(self, event: int) -> tuple[SourceLine, ...]:
        """The calls through which the line of an event was reached, the outermost first; those that were inlined."""
        return self.stacks[self.events["stack"][event]]

    def values(self, event: int) -> np.ndarray:
        """The value that an event loaded, stored or shows, as elements of its array; empty if it has none."""
        found = self.events[event]
        if not found["has_value"] or not found["bytes"]:
            return np.empty(0, np.float32)
        dtype = DTYPES[found["detail"]] if found["kind"] == WATCH else self.arrays[found["array"]].dtype
        return decoded(found["value"][: found["bytes"]], dtype)

    def meeting(self, event: int) -> Meeting:
        """The values of a simd function's lanes."""
        start, given, got = np.frombuffer(self.events["value"][event].tobytes(), MEETING_PLACE)[0].tolist()
        lanes = self.payload[start : start + SIMD_WIDTH * (given + got + 1)]
        inputs, results, sources = np.split(lanes, [SIMD_WIDTH * given, SIMD_WIDTH * (given + got)])
        return Meeting(
            self.names[self.events["name"][event]],
            int(self.events["detail"][event]),
            inputs.reshape(SIMD_WIDTH, given),
            results.reshape(SIMD_WIDTH, got),
            sources,
        )


@dataclass(frozen=True)
class Meeting:
    """A simd function of a simdgroup.

    Attributes:
        name: Name of the function.
        lanes: Mask of the lanes that took part.
        inputs: uint8 [32, bytes], the bytes that each lane gave.
        results: uint8 [32, bytes], the bytes that each lane got; zero for a lane that ran no further.
        sources: uint8 [32], the lane that each lane read in a shuffle, else `NO_LANE`.
    """

    name: str
    lanes: int
    inputs: np.ndarray
    results: np.ndarray
    sources: np.ndarray


MEETING_PLACE = np.dtype([("start", "u8"), ("input_bytes", "u4"), ("result_bytes", "u4")])
"""The value of a simd function's event: where its values lie in the payload."""


def decoded(data: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes as elements of a dtype; bfloat16 becomes float32."""
    data = np.ascontiguousarray(data)
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data[: data.size // ITEMSIZE[dtype] * ITEMSIZE[dtype]].view(dtype)
