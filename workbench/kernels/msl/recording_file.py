r"""A recording as bytes: a line of JSON, then columns of numbers, compressed together.

    {"format": "workbench kernel run", "version": 1, ..., "columns": [[name, dtype, count], ...]}\n
    the columns in this order, each begun at a multiple of 8 bytes

Equal values are stored once: an event has the number of its value in the table ``values`` (16 bytes each), a simd
function the numbers of its columns in the table ``lanes`` (32 lanes of 8 bytes each).
"""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from workbench.kernels.msl.recorded import (
    DTYPES,
    EVENT,
    ITEMSIZE,
    KIND_NAMES,
    MEETING_PLACE,
    NO_ARRAY,
    SIMD_FUNCTION,
    SIMD_WIDTH,
    VALUE_BYTES,
    WATCH,
    WRITES,
    RecordedArray,
    RecordedFault,
    RecordedLaunch,
)
from workbench.kernels.msl.source_lines import SourceLine

if TYPE_CHECKING:
    from workbench.kernels.msl.instructions import Instructions
    from workbench.kernels.msl.recorded_numbers import Number

FORMAT = "workbench kernel run"
VERSION = 1
LANE_BYTES = 8
MEETING_COLUMNS = 5
"""Up to three inputs, the results and the source lanes of a simd function."""

_PLAIN = (
    "kind",
    "bytes",
    "has_value",
    "thread",
    "group",
    "array",
    "place",
    "stack",
    "name",
    "site",
    "detail",
    "offset",
)
MAX_BYTES = 1 << 30
"""Largest size of an unpacked file."""


def encode(run: RecordedLaunch) -> bytes:
    """The bytes of a file."""
    return gzip.compress(_joined(*_contents(run)), 6, mtime=0)


def page_packet(run: RecordedLaunch, instructions: Instructions, numbers: list[Number]) -> bytes:
    """The bytes that a page reads: those of a file before they are compressed, with instructions and numbers."""
    header, columns = _contents(run)
    for name in ("order", "starts", "active", "existing"):
        columns[name] = getattr(instructions, name).astype(np.uint32)
    return _joined(header | {"numbers": numbers}, columns)


def _contents(run: RecordedLaunch) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    events = run.events
    columns = {name: np.ascontiguousarray(events[name]) for name in _PLAIN}
    is_meeting = events["kind"] == SIMD_FUNCTION
    values = np.where(is_meeting[:, None], 0, events["value"]).astype(np.uint8)
    table, numbers = np.unique(values.view(f"V{VALUE_BYTES}").ravel(), return_inverse=True)
    columns["value"] = numbers.astype(np.uint32)
    columns["values"] = np.frombuffer(table.tobytes(), np.uint8)
    meetings, lanes = _meetings(run, np.flatnonzero(is_meeting))
    columns["meetings"], columns["lanes"] = meetings.ravel(), lanes
    header = {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(run, name) for name in _TYPES},
    }
    return header, columns


def _joined(header: dict[str, Any], columns: dict[str, np.ndarray]) -> bytes:
    described = [[name, column.dtype.str, len(column)] for name, column in columns.items()]
    line = msgspec.json.encode(header | {"columns": described})
    parts = [line + b" " * (-(len(line) + 1) % 8) + b"\n"]
    for column in columns.values():
        data = column.tobytes()
        parts.append(data + bytes(-len(data) % 8))
    return b"".join(parts)


def _meetings(run: RecordedLaunch, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each simd function the bytes per lane of inputs and results and the numbers of its columns; the columns."""
    found: dict[bytes, int] = {b"": 0}
    rows = np.zeros((len(at), 2 + MEETING_COLUMNS), np.uint32)
    for row, event in zip(rows, at.tolist()):
        meeting = run.meeting(event)
        row[:2] = meeting.inputs.shape[1], meeting.results.shape[1]
        given = meeting.inputs
        parts = [given[:, i : i + LANE_BYTES] for i in range(0, given.shape[1], LANE_BYTES)]
        columns = (*parts, *[given[:, :0]] * (3 - len(parts)), meeting.results, meeting.sources.reshape(-1, 1))
        for place, column in enumerate(columns, 2):
            wide = np.zeros((SIMD_WIDTH, LANE_BYTES), np.uint8)
            wide[:, : column.shape[1]] = column
            row[place] = found.setdefault(wide.tobytes() if column.size else b"", len(found))
    table = b"".join(column.ljust(SIMD_WIDTH * LANE_BYTES, b"\0") for column in found)
    return rows, np.frombuffer(table, np.uint8)


def decode(data: bytes, name: str) -> dict[str, Any]:
    """The fields of the recording in the bytes of a file.

    Args:
        data: The bytes.
        name: Name of the file, for messages.

    Raises:
        ValueError: They are not a recording, damaged, or of a newer version.
    """
    try:
        unpacked = zlib.decompressobj(wbits=31).decompress(data, MAX_BYTES)
        line, newline, _ = unpacked.partition(b"\n")
        header = msgspec.json.decode(line)
        if not newline or header["format"] != FORMAT:
            raise ValueError
    except (zlib.error, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{name} is not a recording of a kernel: make one with kernel.record(...).save(path)"
        ) from None
    if header.get("version") != VERSION:
        raise ValueError(
            f"{name} has version {header.get('version')!r} of the format, and this Workbench reads version {VERSION}: "
            "record the launch again, or install a newer Workbench"
        )
    try:
        return _fields(header, unpacked[len(line) + 1 :])
    except (KeyError, TypeError, ValueError, IndexError, msgspec.ValidationError) as problem:
        raise ValueError(f"{name} is damaged: {problem}") from problem


def _fields(header: dict[str, Any], data: bytes) -> dict[str, Any]:
    columns, start = {}, 0
    for name, dtype, count in header["columns"]:
        columns[name] = np.frombuffer(data, dtype, count, start)
        start += -(-columns[name].nbytes // 8) * 8
    events = np.zeros(len(columns["kind"]), EVENT)
    for name in _PLAIN:
        events[name] = columns[name]
    events["value"] = columns["values"].reshape(-1, VALUE_BYTES)[columns["value"]]
    at = np.flatnonzero(events["kind"] == SIMD_FUNCTION)
    payload = _payload(events, at, columns["meetings"].reshape(-1, 2 + MEETING_COLUMNS), columns["lanes"])
    facts = {name: msgspec.convert(header[name], kind) for name, kind in _TYPES.items()}
    sizes = {"array": len(facts["arrays"]), "place": len(facts["places"]), "name": len(facts["names"])}
    sizes |= {"group": len(facts["threadgroups"]), "stack": len(facts["stacks"])}
    for name, size in sizes.items():
        used = events[name][events[name] != NO_ARRAY] if name == "array" else events[name]
        if used.max(initial=0) >= max(1, size):
            raise ValueError(f"an event has the {name} {used.max()}, and there are {size}")
    if not np.isin(events["kind"], list(KIND_NAMES)).all() or events["bytes"].max(initial=0) > VALUE_BYTES:
        raise ValueError("an event is of an unknown kind or too long")
    is_access = events["kind"] <= max(WRITES)
    if (events["array"][is_access] == NO_ARRAY).any() or any(array.dtype not in ITEMSIZE for array in facts["arrays"]):
        raise ValueError("an access has no array, or an array of an unknown type")
    if events["detail"][events["kind"] == WATCH].max(initial=0) >= len(DTYPES):
        raise ValueError("a watched value is of an unknown type")
    return {"events": events, "payload": payload, **facts}


_TYPES: dict[str, Any] = {
    "kernel": str,
    "texts": dict[str, str],
    "grid": tuple[int, int, int],
    "threadgroup": tuple[int, int, int],
    "arrays": tuple[RecordedArray, ...],
    "threadgroups": tuple[tuple[int, int, int], ...],
    "places": tuple[SourceLine, ...],
    "stacks": tuple[tuple[SourceLine, ...], ...],
    "names": tuple[str, ...],
    "fault": RecordedFault | None,
    "num_threadgroups": int,
    "num_left_out": int,
    "about": str,
}


def _payload(events: np.ndarray, at: np.ndarray, meetings: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """The values of simd functions as a recording has them in memory; their events are told where they lie."""
    table = lanes.reshape(-1, SIMD_WIDTH, LANE_BYTES)
    parts: list[np.ndarray] = []
    start = 0
    for event, (given, got, *numbers) in zip(at.tolist(), meetings.tolist()):
        inputs = np.concatenate([table[number] for number in numbers[:3]], axis=1)[:, :given]
        results, sources = table[numbers[3]][:, :got], table[numbers[4]][:, :1]
        parts += [np.ascontiguousarray(part).ravel() for part in (inputs, results, sources)]
        place = np.array((start, given, got), MEETING_PLACE)
        events["value"][event] = np.frombuffer(place.tobytes(), np.uint8)
        start += SIMD_WIDTH * (given + got + 1)
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
