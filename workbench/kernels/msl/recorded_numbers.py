"""Sums and averages over a recording, each with its definition.

All are counts of the recorded threadgroups. None is a time on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.kernels.msl.recorded import (
    BARRIER_PASSED,
    MULTIPLY_ACCUMULATE,
    NO_ARRAY,
    READS,
    SIMD_FUNCTION,
    WRITES,
)

if TYPE_CHECKING:
    from workbench.kernels.msl.instructions import Instructions
    from workbench.kernels.msl.recorded import RecordedLaunch

LINE_BYTES = 128
BANKS = 32
BANK_BYTES = 4


@dataclass(frozen=True)
class Number:
    """A number of a recording.

    Attributes:
        name: Its name, such as "bytes read".
        array: The buffer or variable that it belongs to; "" for the whole recording.
        value: Its value.
        best: The value of a kernel that wastes nothing, None if there is no such value.
        definition: Meaning of the value.
    """

    name: str
    array: str
    value: float
    best: float | None
    definition: str


DEFINITIONS = {
    "bytes read": "bytes that all threads have loaded",
    "least bytes": "bytes of the elements that were loaded, each counted once per threadgroup",
    "reads per element": "loads of an element by the threads of a threadgroup, on average over the elements loaded",
    "bytes written": "bytes that all threads have stored",
    "lines per access": (
        "distinct lines of 128 bytes that a simdgroup's load or store touches, on average; at best, the lanes' bytes "
        "follow each other"
    ),
    "bank conflicts": (
        "most distinct words in one bank that a simdgroup's load or store needs, on average, in a model of threadgroup "
        "memory as 32 banks of 4 bytes, which is not a measurement of Apple's; at best, the words are spread evenly"
    ),
    "active lanes": (
        "lanes that take part in a simdgroup's instruction, of all its lanes, on average; those that returned early "
        "take part in none"
    ),
    "barriers": "threadgroup barriers that were passed",
    "events between barriers": "loads, stores and simd functions between two threadgroup barriers, on average",
    "simd functions": "reductions, shuffles and ballots, one per simdgroup and call",
    "matrix products": "8 x 8 multiply-accumulates, one per simdgroup and call",
}
"""Names of the numbers, and what each of them counts."""


def numbers_of(run: RecordedLaunch, instructions: Instructions) -> list[Number]:
    """The numbers of a recording: of each array, then of the whole."""
    return [*_of_arrays(run, instructions), *_of_all(run, instructions)]


def lines_touched(offsets: np.ndarray, num_bytes: np.ndarray) -> tuple[int, int]:
    """Distinct lines of 128 bytes that a simdgroup's access touches, and the fewest possible for its bytes."""
    lines = np.unique(np.concatenate([offsets // LINE_BYTES, (offsets + num_bytes - 1) // LINE_BYTES]))
    distinct = dict(zip(offsets.tolist(), num_bytes.tolist()))  # lanes that load the same bytes need them once
    return len(lines), -(-sum(distinct.values()) // LINE_BYTES)


def bank_conflicts(offsets: np.ndarray, num_bytes: np.ndarray) -> tuple[int, int]:
    """Most distinct words of 4 bytes in one of 32 banks that a simdgroup's access needs, and the fewest possible.

    Lanes that need the same word are served together. A wide access needs several words of each bank in any case.
    """
    parts = range(-(-int(num_bytes.max()) // BANK_BYTES))
    words = np.unique(np.concatenate([(offsets[num_bytes > p * BANK_BYTES] // BANK_BYTES) + p for p in parts]))
    return int(np.bincount(words % BANKS).max()), -(-len(words) // BANKS)


def _number(name: str, value: float, array: str = "", best: float | None = None) -> Number:
    return Number(name, array, value, best, DEFINITIONS[name])


def _of_arrays(run: RecordedLaunch, instructions: Instructions) -> Iterator[Number]:
    events = run.events
    is_access = (events["array"] != NO_ARRAY) & (events["has_value"] == 1)
    for index, array in enumerate(run.arrays):
        own = np.flatnonzero(is_access & (events["array"] == index))
        if not len(own):
            continue
        read = events[own[np.isin(events["kind"][own], READS)]]
        written = events[own[np.isin(events["kind"][own], WRITES)]]
        if len(read):
            first = read["offset"] // array.itemsize
            counts = np.maximum(1, read["bytes"].astype(np.int64) // array.itemsize)
            elements = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            groups = np.repeat(read["group"].astype(np.int64), counts)
            distinct = len(np.unique(groups << 48 | elements))
            least = float(distinct * array.itemsize)
            yield _number("bytes read", float(read["bytes"].sum(dtype=np.int64)), array.name, least)
            yield _number("reads per element", len(elements) / distinct, array.name, 1.0)
        if len(written):
            yield _number("bytes written", float(written["bytes"].sum(dtype=np.int64)), array.name)
        name = "bank conflicts" if array.role == "threadgroup" else "lines per access"
        needed, least_needed = np.mean(_of_instructions(run, instructions, index), axis=0).tolist()
        yield _number(name, needed, array.name, least_needed)


def _of_instructions(run: RecordedLaunch, instructions: Instructions, array: int) -> list[tuple[int, int]]:
    """Of each instruction that loads from or stores to an array: lines or words needed, and the fewest possible."""
    events = run.events
    needed = []
    first = instructions.order[instructions.starts[:-1]]
    for number in np.flatnonzero((events["array"][first] == array) & (events["has_value"][first] == 1)).tolist():
        own = events[instructions.events(number)]
        offsets, num_bytes = own["offset"], own["bytes"].astype(np.int64)
        needs = bank_conflicts if run.arrays[array].role == "threadgroup" else lines_touched
        needed.append(needs(offsets, num_bytes))
    return needed


def _of_all(run: RecordedLaunch, instructions: Instructions) -> Iterator[Number]:
    kinds = run.events["kind"]
    per_lane = instructions.active != 0
    if per_lane.any():
        active = np.bitwise_count(instructions.active[per_lane]).astype(float)
        lanes = np.bitwise_count(instructions.existing[per_lane])
        yield _number("active lanes", float(np.mean(active / lanes)), best=1.0)
    barriers = int((kinds == BARRIER_PASSED).sum())
    work = int(((kinds <= max(WRITES)) | (kinds == SIMD_FUNCTION)).sum())
    yield _number("barriers", float(barriers))
    yield _number("events between barriers", work / (barriers + len(run.threadgroups)))
    functions = run.events["name"][kinds == SIMD_FUNCTION].tolist()
    products = sum(run.names[name] == MULTIPLY_ACCUMULATE for name in functions)
    yield _number("simd functions", float(len(functions) - products))
    yield _number("matrix products", float(products))
