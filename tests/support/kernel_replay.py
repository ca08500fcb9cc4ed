"""Replays the recording of a kernel without the emulator.

`replay` keeps its own memory: inputs as they were handed over, everything else as the recorded stores leave it. Every
recorded load must find what the memory holds, every simd function and matrix product is computed again from what its
lanes gave, and no barrier is passed before all threads have arrived. `as_loaded` has the elements that the threads have
loaded, and NaN for all others, so that a formula over it uses recorded loads alone.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from workbench.kernels.msl import KernelRun
from workbench.kernels.msl.recorded import (
    ATOMIC_UPDATE,
    BARRIER_PASSED,
    BARRIER_WAIT,
    FAULT,
    NO_ARRAY,
    READS,
    RETURN,
    SIMD_FUNCTION,
    WRITES,
    decoded,
)


class Differs(AssertionError):
    """A recording that contradicts itself or the inputs."""


def bytes_of(array: mx.array) -> np.ndarray:
    """The bytes of an array in row-major order."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.view(mx.uint8))


def replay(run: KernelRun, inputs: dict[str, mx.array]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The bytes of every output, and for each byte whether a recorded threadgroup has written it.

    Args:
        run: The recording.
        inputs: The inputs by name.

    Raises:
        Differs: An event cannot have happened.
    """
    memory, written = {}, {}
    for number, array in enumerate(run.arrays):
        if array.role == "input":
            memory[number] = bytes_of(inputs[array.name])
            written[number] = np.ones(array.num_bytes, bool)
        elif array.role != "shape":
            memory[number] = np.zeros(array.num_bytes, np.uint8)
            written[number] = np.zeros(array.num_bytes, bool)
    group, arrived, returned = -1, set(), set()
    for index, event in enumerate(run.events):
        kind, thread = int(event["kind"]), int(event["thread"])
        if event["group"] != group:
            group, arrived, returned = int(event["group"]), set(), set()
            for number, array in enumerate(run.arrays):
                if array.role == "threadgroup":
                    written[number][:] = False
        if thread in returned and kind != SIMD_FUNCTION and kind != FAULT:
            raise Differs(f"event {index}: thread {thread} has returned")
        if thread in arrived and kind not in (BARRIER_PASSED, FAULT):
            raise Differs(f"event {index}: thread {thread} waits at a barrier")
        if kind == BARRIER_WAIT:
            arrived.add(thread)
        elif kind == BARRIER_PASSED:
            if len(arrived) != num_threads(run, group):
                raise Differs(f"event {index}: {len(arrived)} threads have arrived at the barrier that is passed")
            arrived = set()
        elif kind == RETURN:
            returned.add(thread)
        elif kind == SIMD_FUNCTION:
            meet_again(run, index)
        elif event["array"] != NO_ARRAY and event["has_value"] and event["array"] in memory:
            number, at = int(event["array"]), int(event["offset"])
            cells, value = slice(at, at + int(event["bytes"])), event["value"][: event["bytes"]]
            if kind in READS and kind != ATOMIC_UPDATE:
                if not written[number][cells].all():
                    raise Differs(f"event {index}: loads what nothing has written")
                if not np.array_equal(memory[number][cells], value):
                    raise Differs(f"event {index}: loads {value}, and memory holds {memory[number][cells]}")
            if kind in WRITES:
                memory[number][cells], written[number][cells] = value, True
    return {
        array.name: (memory[number], written[number])
        for number, array in enumerate(run.arrays)
        if array.role == "output"
    }


def num_threads(run: KernelRun, group: int) -> int:
    """Threads of a threadgroup, which the far edges of the grid cut."""
    position = run.threadgroups[group]
    return int(np.prod([min(t, g - p * t) for p, t, g in zip(position, run.threadgroup, run.grid)]))


COMBINED = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
SHUFFLED = ("simd_shuffle", "simd_broadcast", "quad_shuffle", "quad_broadcast")
VOTES = ("simd_ballot", "simd_any", "simd_all", "simd_active_threads_mask", "simd_is_first", "simd_broadcast_first")
ELEMENTS = {
    4: ("float32", "int32", "uint32"),
    2: ("float16", "bfloat16", "int16", "uint16"),
    1: ("int8", "uint8"),
}
"""The types that an element of so many bytes may have: a recording does not say which, and one of them has to fit."""

ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def meet_again(run: KernelRun, index: int) -> None:
    """Compute a simd function once more from what the lanes gave; the results have to agree."""
    meeting = run.meeting(index)
    lanes = [lane for lane in range(32) if meeting.lanes >> lane & 1]
    name = meeting.name
    if name == "simdgroup_multiply_accumulate":
        a, b, c = (matrix(meeting.inputs[:, start : start + 8]) for start in (0, 8, 16))
        expected, got = a @ b + c, matrix(meeting.results)
        size = np.abs(a) @ np.abs(b) + np.abs(c)
        finite = np.isfinite(expected) & np.isfinite(got)
        if not np.array_equal(expected[~finite], got[~finite], equal_nan=True):
            raise Differs(f"event {index}: matrix product")
        if (np.abs(expected - got)[finite] > 1e-5 * size[finite] + 1e-30).any():
            raise Differs(f"event {index}: matrix product is off by {np.abs(expected - got).max()}")
    elif name.removeprefix("simd_") in COMBINED or name.startswith("simd_prefix_"):
        dtypes = ELEMENTS[meeting.inputs.shape[1]]
        if not any(combined_again(name, dtype, meeting.inputs[lanes], meeting.results[lanes]) for dtype in dtypes):
            raise Differs(f"event {index}: {name}")
    elif name in VOTES:
        ayes = [lane for lane in lanes if meeting.inputs[lane].any()]
        votes = np.ascontiguousarray(meeting.results[lanes]).view(np.uint32).ravel()
        if not (votes == sum(1 << lane for lane in ayes)).all():
            raise Differs(f"event {index}: {name} says {votes[0]:032b}, and lanes {ayes} voted for it")
    elif name.startswith(SHUFFLED):
        for lane in lanes:
            source = meeting.sources[lane]
            if source != 255 and not np.array_equal(meeting.results[lane], meeting.inputs[source]):
                raise Differs(f"event {index}: lane {lane} of {name}")
    else:
        raise Differs(f"event {index}: {name} is not known here, so it cannot be computed again")


def combined_again(name: str, dtype: str, given: np.ndarray, got: np.ndarray) -> bool:
    """Whether a reduction or a scan over lanes gives what they got, if its elements are of a type."""
    *_, kind = name.split("_")
    is_float = dtype in ROUNDING
    if not is_float and dtype[0] == "i" and kind == "product":
        return False  # products of signed integers wrap as those of unsigned ones
    values, results = (decoded(np.ascontiguousarray(part).ravel(), dtype) for part in (given, got))
    if is_float and kind in ("and", "or", "xor"):
        return False
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64 if is_float else np.int64)
        combine = COMBINED[kind]
        if name.startswith("simd_prefix_"):
            first = wide if "inclusive" in name else np.array([{"sum": 0, "product": 1}[kind], *wide[:-1]])
            expected, sums = combine.accumulate(first), np.add.accumulate(np.abs(first))
        else:
            expected, sums = np.full(len(wide), combine.reduce(wide)), np.abs(wide).sum()
        if not is_float:
            return bool(np.array_equal(expected.astype(values.dtype), results))
        size = sums if kind == "sum" else np.abs(expected)
        bound = ROUNDING[dtype] * size * (len(wide) if kind == "product" else 1) + 1e-30
        near = np.abs(results.astype(np.float64) - expected) <= bound
        return bool((near | np.isclose(results.astype(np.float64), expected, 0, 0, equal_nan=True)).all())


def matrix(lanes: np.ndarray) -> np.ndarray:
    """The 8 x 8 matrix of which each lane holds two neighbouring elements: row b4 b2 b1, column b3 b0 0."""
    found = np.zeros((8, 8))
    for lane in range(32):
        row = (lane >> 4 & 1) << 2 | (lane >> 2 & 1) << 1 | lane >> 1 & 1
        column = (lane >> 3 & 1) << 2 | (lane & 1) << 1
        found[row, column : column + 2] = np.ascontiguousarray(lanes[lane]).view(np.float32)
    return found


def as_loaded(run: KernelRun, name: str) -> np.ndarray:
    """An array with the elements that the recorded threads have loaded; NaN for all others."""
    return _elements(run, name, READS)


def as_stored(run: KernelRun, name: str) -> np.ndarray:
    """An array with the elements that the recorded threads have stored; NaN for all others."""
    return _elements(run, name, WRITES)


def _elements(run: KernelRun, name: str, kinds: tuple[int, ...]) -> np.ndarray:
    number, array = next((i, a) for i, a in enumerate(run.arrays) if a.name == name)
    found = np.full(array.num_bytes // array.itemsize, np.nan)
    events = run.events
    of_array = (events["array"] == number) & np.isin(events["kind"], kinds) & (events["has_value"] == 1)
    for event in events[of_array]:
        values = decoded(event["value"][: event["bytes"]], array.dtype)
        at = int(event["offset"]) // array.itemsize
        found[at : at + len(values)] = values
    return found.reshape(array.shape)
