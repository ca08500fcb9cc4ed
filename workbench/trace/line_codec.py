"""The lines of a trace file as JSON: how they are written, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import astuple, force_setattr, replace

from workbench.trace.errors import TraceError
from workbench.trace.fields import MAX_BLOCKS, FrozenDict
from workbench.trace.lines import SCHEMA_VERSION, Keyframe, TraceLine, TraceMeta
from workbench.trace.pool_change import Runs, length_of, pack, unpack
from workbench.trace.reasons import Reason
from workbench.trace.records import Chunk, StepRecord


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or MLX as Python's own; the repr of anything else. A recording never fails on it."""
    to_list = getattr(value, "tolist", None)
    return to_list() if to_list is not None else repr(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(TraceLine)

_RUNS = ("free_block_ids", "cached_block_ids")
"""Fields of a keyframe whose block ids are written as runs."""

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions of a decoder for a damaged line, or for a value that no trace may have."""


def encode_line(line: TraceLine) -> bytes:
    """A line of a trace file, newline included. Text that is not valid Unicode is written with U+FFFD in its place."""
    if isinstance(line, StepRecord):
        line = _shortened(line)
    elif isinstance(line, Keyframe):
        line = replace(line, **{name: pack(getattr(line, name)) for name in _RUNS})
    try:
        return _encoder.encode(line) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(msgspec.to_builtins(line, enc_hook=_plain))) + b"\n"


def _with_blocks(keyframe: Keyframe, num_blocks: int) -> Keyframe:
    """A keyframe that was read, with all block ids in the place of runs."""
    for name in _RUNS:
        runs: Runs = getattr(keyframe, name)
        if min(runs, default=0) < 0:
            if length_of(runs) >= num_blocks:
                raise msgspec.ValidationError(f"{name} names more blocks than the pool's {num_blocks - 1}")
            force_setattr(keyframe, name, tuple(unpack(runs)))
    return keyframe


def _shortened(record: StepRecord) -> StepRecord:
    """A record as it is written: each reason once, and nothing that has its default, at the end of an array as well."""
    short: dict[str, Any] = {}
    if record.chunks:
        short["chunks"] = tuple(map(_without_defaults, record.chunks))
    if record.waiting_reason is not None:
        short["waiting_reason"] = _without_defaults(record.waiting_reason)
    written = replace(record, **short)
    for name in ("passed_over", "preempt_reasons"):
        if reasons := getattr(record, name):
            force_setattr(written, name, _each_once(reasons))
    if record.end == record.end_of_phases:
        force_setattr(written, "end", 0.0)
    return written


def _each_once(reasons: Mapping[str, Reason]) -> dict[str, tuple[Any, ...] | int]:
    """Reasons by request; the number n stands for the n-th different one, counted from 0."""
    numbers: dict[Reason, int] = {}
    short: dict[str, tuple[Any, ...] | int] = {}
    for request_id, reason in reasons.items():
        if (number := numbers.get(reason)) is None:
            numbers[reason] = len(numbers)
        short[request_id] = _without_defaults(reason) if number is None else number
    return short


def _with_reasons(record: StepRecord) -> StepRecord:
    """A record that was read, with a reason in the place of each number."""
    for name in ("passed_over", "preempt_reasons"):
        stated: Mapping[str, Reason | int] = getattr(record, name)
        if not stated:
            continue
        known: list[Reason] = []
        reasons: dict[str, Reason] = {}
        for request_id, reason in stated.items():
            if not isinstance(reason, int):
                known.append(reason)
            elif reason < len(known):
                reason = known[reason]
            else:
                raise msgspec.ValidationError(f"reason number {reason} of {len(known)} stated before it")
            reasons[request_id] = reason
        if len(known) < len(stated):
            force_setattr(record, name, FrozenDict(reasons))
    return record


def _without_defaults(value: Chunk | Reason) -> tuple[Any, ...]:
    values, defaults = astuple(value), value.__struct_defaults__
    last, num_required = len(values), len(values) - len(defaults)
    while last > num_required and values[last - 1] == defaults[last - 1 - num_required]:
        last -= 1
    return values[:last]


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


class LineDecoder:
    """Decodes the lines of one file in order. The first line has the version of the format.

    Args:
        path: The file, for messages.

    Attributes:
        number: Number of the line that was decoded last, counted from 1.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.number = 0
        self._path = path
        self._num_blocks = MAX_BLOCKS

    def decode(self, raw: bytes) -> TraceLine:
        """Decode the next line.

        Args:
            raw: The line without its newline.

        Raises:
            TraceError: Not a trace, a version that cannot be read, or a damaged line, with its number.
        """
        self.number += 1
        if self.number == 1:
            _check_version(self._path, raw)
        try:
            line: TraceLine = _decoder.decode(raw)
            if isinstance(line, StepRecord) and (line.passed_over or line.preempt_reasons):
                line = _with_reasons(line)
            elif isinstance(line, Keyframe):
                line = _with_blocks(line, self._num_blocks)
        except _UNDECODABLE as problem:
            raise TraceError(f"{self._path}, line {self.number}: {problem}") from None
        if isinstance(line, TraceMeta) and self.number > 1:
            raise TraceError(f"{self._path}, line {self.number}: the meta line must be the first, and only the first")
        if isinstance(line, TraceMeta) and isinstance(stated := line.config.get("num_blocks"), int):
            self._num_blocks = min(stated, MAX_BLOCKS)
        return line


class _Header(msgspec.Struct):
    """The part of a first line that every version of the format has."""

    kind: str
    schema_version: int


def _check_version(path: str | os.PathLike[str], raw: bytes) -> None:
    """Check the first line of a file.

    Raises:
        TraceError: The line is not that of a trace, or names a version that cannot be read.
    """
    try:
        header = msgspec.json.decode(raw, type=_Header)
    except _UNDECODABLE:
        raise TraceError(f"{path} is not a trace: its first line holds no kind and schema_version") from None
    if header.kind != "meta":
        raise TraceError(f"{path} is not a trace from its beginning: the first line is a {header.kind[:40]!r} line")
    if header.schema_version != SCHEMA_VERSION:
        raise TraceError(
            f"{path} has trace schema version {header.schema_version}, this workbench reads version {SCHEMA_VERSION}: "
            "open it with the workbench that wrote it, or record it again"
        )


def is_json(raw: bytes) -> bool:
    """Whether a line is whole."""
    try:
        msgspec.json.decode(raw, type=msgspec.Raw)
    except _UNDECODABLE:
        return False
    return True
