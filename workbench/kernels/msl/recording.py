"""A recording of a launch: what chosen threadgroups did, event by event."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.base.on_demand import find, picture
from workbench.kernels.msl.instructions import Instructions, instructions_of
from workbench.kernels.msl.recorded import (
    DTYPES,
    EVENT,
    FAULT,
    ITEMSIZE,
    NO_ARRAY,
    SIMD_FUNCTION,
    SIMDGROUP_BARRIER,
    WATCH,
    RecordedArray,
    RecordedFault,
    RecordedLaunch,
)
from workbench.kernels.msl.recorded_numbers import DEFINITIONS, Number, numbers_of
from workbench.kernels.msl.recording_file import decode, encode, page_packet
from workbench.kernels.msl.source_lines import SourceLine, line_table

if TYPE_CHECKING:
    from workbench.kernels.msl.errors import MslError
    from workbench.kernels.msl.launch import Binding, Finished


@dataclass(eq=False, repr=False)
class KernelRun(RecordedLaunch):
    """A recorded launch, and what can be asked of it."""

    def _repr_html_(self) -> str | None:
        return picture("KernelRun", self)

    @cached_property
    def instructions(self) -> Instructions:
        """The events with the lanes of each simdgroup side by side."""
        return instructions_of(self)

    @cached_property
    def numbers(self) -> list[Number]:
        """Sums and averages over the recording, each with its definition."""
        return numbers_of(self, self.instructions)

    def number(self, name: str, array: str = "") -> float:
        """The value of one of `numbers`, such as ``run.number("bytes read", "x")``; 0 for an array never touched.

        Raises:
            KeyError: There is no number of this name.
        """
        if name not in DEFINITIONS:
            raise KeyError(f"{name!r}: the numbers are {', '.join(DEFINITIONS)}")
        return next((one.value for one in self.numbers if (one.name, one.array) == (name, array)), 0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a file, see `workbench.kernels.msl.recording_file`."""
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
        return page_packet(self, self.instructions, self.numbers)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KernelRun:
        """Read a file that `save` has written.

        Raises:
            ValueError: The file is not a recording, damaged, or of a newer version.
        """
        return cls(**decode(Path(path).read_bytes(), os.fspath(path)))


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
    table, texts = line_table(library), facts["texts"]
    places: dict[SourceLine, int] = {SourceLine("", 0): 0}
    stacks: dict[tuple[SourceLine, ...], int] = {(): 0}
    found = np.zeros((len(sites), 2), np.uint16)
    for row, site in zip(found, sites.tolist()):
        if site and (place := table.find(site - 1)):
            calls = tuple(call for call in table.callers(site - 1) if call.file in texts)
            row[:] = places.setdefault(place, len(places)), stacks.setdefault(calls, len(stacks))
    if len(sites):
        events["place"], events["stack"] = found[inverse].T

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
    if error and error.line:  # a check of arithmetic or of an index knows its line, and no place in the compiled code
        placeless = (events["kind"] == FAULT) & (events["place"] == 0)
        events["place"][placeless] = places.setdefault(SourceLine(error.file, error.line), len(places))
    return KernelRun(
        arrays=(*arrays, *variables),
        events=events,
        payload=recorded.payload,
        places=tuple(places),
        stacks=tuple(stacks),
        names=tuple(names),
        fault=_fault(error, events, list(places), facts["threadgroups"]) if error else None,
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
