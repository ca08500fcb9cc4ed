"""A recording of a launch: what chosen threadgroups did, event by event."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.base.on_demand import find, picture
from workbench.kernels.msl.source_lines import SourceLine, line_table

if TYPE_CHECKING:
    import mlx.core as mx

    from workbench.kernels.msl.errors import MslError
    from workbench.kernels.msl.instructions import Instructions
    from workbench.kernels.msl.launch import Binding, Finished
    from workbench.kernels.msl.recorded_numbers import Number

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
        ("place", "u2"), ("name", "u2"), ("site", "u4"), ("detail", "u4"), ("offset", "i8"),
        ("value", "u1", (VALUE_BYTES,)),
    ]
)  # fmt: skip
"""An event. ``array``, ``place``, ``name`` and ``group`` are indices into the lists of the recording; ``site`` is the
place in the compiled code, finer than a line; ``detail`` are the flags of a barrier, the mask of the lanes in a
simd function, or the type of a watched value; ``offset`` is in bytes."""

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
class KernelRun:
    """What chosen threadgroups of a launch did, in the order in which they did it.

    Threadgroups run one after the other, and so do the lanes of a simdgroup between two points where they meet;
    `instructions` puts the lanes side by side again. Loads and stores are those of the compiled kernel: a value that
    the compiler keeps in a register is loaded once.

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
        names: Names of simd functions, watched values and faults by index.
        fault: The fault that ended the launch, or None.
        num_threadgroups: Number of threadgroups of the launch.
        num_left_out: Number of events that had no room in the recording; they are the last ones.
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
    names: tuple[str, ...]
    fault: RecordedFault | None
    num_threadgroups: int
    num_left_out: int = 0
    outputs: list[mx.array] | None = field(default=None)
    error: MslError | None = field(default=None)

    def __repr__(self) -> str:
        asked = len(self.threadgroups)
        text = f"kernel {self.kernel}: {len(self.events)} events of {asked} of {self.num_threadgroups} threadgroups"
        if self.num_left_out:
            text += f"; {self.num_left_out} later events had no room"
        return text + (f"; fault: {self.fault.kind} at {self.fault.file}:{self.fault.line}" if self.fault else "")

    def _repr_html_(self) -> str | None:
        return picture("KernelRun", self)

    @cached_property
    def instructions(self) -> Instructions:
        """The events with the lanes of each simdgroup side by side."""
        from workbench.kernels.msl.instructions import instructions_of

        return instructions_of(self)

    @cached_property
    def numbers(self) -> list[Number]:
        """What the recording adds up to, each number with its definition."""
        from workbench.kernels.msl.recorded_numbers import numbers_of

        return numbers_of(self)

    def place(self, event: int) -> SourceLine:
        """The line of the source at which an event happened."""
        return self.places[self.events["place"][event]]

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a file, see `workbench.kernels.msl.recording_file`."""
        from workbench.kernels.msl.recording_file import encode

        Path(path).write_bytes(encode(self))

    def watch(self) -> Any:
        """A view for a notebook: the source, the lanes and memory at every moment, forwards and backwards.

        Raises:
            ModuleNotFoundError: The extra notebook is not installed; the message says how to install it.
        """
        return find("KernelRun.watch")(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same view as one file that needs no network.

        Args:
            path: The HTML file; replaced if it exists.

        Raises:
            OSError: The file cannot be written; an earlier file of that name is left unchanged.
        """
        find("KernelRun.save_html")(self, path)

    def packet(self) -> bytes:
        """The bytes that a page reads."""
        from workbench.kernels.msl.recording_file import page_packet

        return page_packet(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KernelRun:
        """Read a file that `save` has written.

        Raises:
            ValueError: The file is not a recording, damaged, or of a newer version.
        """
        from workbench.kernels.msl.recording_file import decode

        return decode(Path(path).read_bytes(), os.fspath(path))


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


def chosen_threadgroups(asked: int | Sequence[int | Sequence[int]], counts: Sequence[int], order: int) -> np.ndarray:
    """One byte per threadgroup of a grid, 1 for those to record.

    Args:
        asked: A number of threadgroups, the first ones to run; or their indices or positions (x, y, z).
        counts: Threadgroups of the grid (x, y, z).
        order: 1 if they run in descending order.

    Raises:
        ValueError: There is no such threadgroup.
    """
    total = int(np.prod(counts))
    marks = np.zeros(total, np.uint8)
    if isinstance(asked, int):
        if asked < 1:
            raise ValueError(f"threadgroups is {asked}: record at least 1, or give a list of indices or positions")
        marks[slice(-asked, None) if order else slice(asked)] = 1
        return marks
    if not asked:
        raise ValueError("threadgroups is empty: give a number, or a list of indices or positions (x, y, z)")
    for one in asked:
        position = [int(one)] if isinstance(one, int | np.integer) else [int(axis) for axis in one]
        if len(position) == 1:
            inside, index = 0 <= position[0] < total, position[0]
        else:
            position += [0] * (3 - len(position))
            inside = len(position) == 3 and all(0 <= at < count for at, count in zip(position, counts))
            index = position[0] + counts[0] * (position[1] + counts[1] * position[2])
        if not inside:
            raise ValueError(
                f"threadgroups has {one!r}: the grid has {total} threadgroups, {tuple(counts)} along x, y and z; "
                "give an index or a position within them"
            )
        marks[index] = 1
    return marks


def run_of(
    finished: Finished,
    bindings: Sequence[Binding],
    arrays: Sequence[RecordedArray],
    library: Path,
    **facts: Any,
) -> KernelRun:
    """The recording of a launch that has ended.

    Args:
        finished: The launch.
        bindings: Its buffers.
        arrays: The same buffers as the recording describes them.
        library: The library that ran.
        **facts: Other fields of the recording; ``error`` and ``threadgroups`` are among them.
    """
    recorded = finished.recorded
    assert recorded is not None
    raw = recorded.events
    events = np.zeros(len(raw), EVENT)
    for name in ("kind", "bytes", "has_value", "thread", "group", "site", "detail", "offset", "value"):
        events[name] = raw[name]
    is_variable = (raw["array"] >= FIRST_VARIABLE) & (raw["array"] != 0xFFFFFFFF)
    shift = FIRST_VARIABLE - len(bindings)
    events["array"] = np.where(is_variable, raw["array"] - np.uint32(shift), raw["array"] & 0xFFFF)

    sites, inverse = np.unique(raw["site"], return_inverse=True)
    table, places = line_table(library), [SourceLine("", 0)]
    index_of = {places[0]: 0}
    for site in sites.tolist():
        place = (table.find(site - 1) if site else None) or places[0]
        if place not in index_of:
            index_of[place] = len(places)
            places.append(place)
    found = [index_of[(table.find(site - 1) if site else None) or places[0]] for site in sites.tolist()]
    events["place"] = np.array(found, np.uint16)[inverse] if len(sites) else 0

    named = np.isin(raw["kind"], (SIMDGROUP_BARRIER, SIMD_FUNCTION, WATCH, FAULT))
    addresses, which = np.unique(raw["offset"][named], return_inverse=True)
    names = ["", *(ctypes.string_at(address).decode() for address in addresses.tolist())]
    events["name"][named] = which + 1
    events["offset"][named] = 0

    variables = [
        RecordedArray(name, "threadgroup", dtype, (num_bytes // ITEMSIZE[dtype],), num_bytes)
        for name, num_bytes, element_bytes, code in recorded.variables
        for dtype in [DTYPES[code] if code < len(DTYPES) else "uint32" if element_bytes % 4 == 0 else "uint8"]
    ]
    error = facts.get("error")
    return KernelRun(
        arrays=(*arrays, *variables),
        events=events,
        payload=recorded.payload,
        places=tuple(places),
        names=tuple(names),
        fault=_fault(error, events, places, facts["threadgroups"]) if error else None,
        num_left_out=recorded.num_left_out,
        **facts,
    )


FIRST_VARIABLE = 256
"""Number of the first threadgroup variable in the runtime's events."""


def _fault(
    error: MslError, events: np.ndarray, places: Sequence[SourceLine], threadgroups: Sequence[tuple[int, int, int]]
) -> RecordedFault:
    at = np.flatnonzero(events["kind"] == FAULT)
    event = int(at[-1]) if len(at) else None
    earlier = None
    if event is not None and error.other_thread is not None:
        # The last access by that thread, at that line, to one of the bytes that the fault's own access meant.
        own = next((i for i in range(event - 1, -1, -1) if events["array"][i] != NO_ARRAY), None)
        lines = {index for index, place in enumerate(places) if (place.file, place.line) == error.other_place}
        if own is not None:
            begin, end = events["offset"][own], events["offset"][own] + max(1, int(events["bytes"][own]))
            same = (events["array"] == events["array"][own]) & (events["thread"] == error.other_thread)
            same &= (events["offset"] < end) & (events["offset"] + events["bytes"] > begin)
            same &= np.isin(events["place"], list(lines))
            if error.other_threadgroup in threadgroups:
                same &= events["group"] == threadgroups.index(error.other_threadgroup)
                same[own:] = False
                found = np.flatnonzero(same)
                earlier = int(found[-1]) if len(found) else None
    file, line = error.other_place
    return RecordedFault(error.kind, str(error), event, error.file, error.line, earlier, file, line)
