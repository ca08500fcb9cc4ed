"""Packets: a range of a trace's columns as bytes, the same for a notebook, a served page and a saved file.

A packet is a little-endian uint32 with the length of a JSON header, the header padded with spaces to a multiple
of 8 bytes, then the columns named in ``header["columns"]`` one after another, each padded to 8 bytes, so that a
browser can lay typed arrays over it without copying.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from workbench.base.on_demand import np
from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.readings.compare import is_simulated
from workbench.trace.readings.computed_before import computed_before
from workbench.trace.readings.last_tokens import last_tokens_before
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.records import Layout
from workbench.trace.run_zero import kept_zero, run_zero
from workbench.viz.layout.columns import (
    CHILD_COLUMNS,
    EVENT_KINDS,
    FLAG_FIRST_TOKEN,
    FLAG_PARTIAL,
    LIMIT_SHIFT,
    LIMITS,
    PROMPT_PREVIEW,
    TraceColumns,
)

PACKET_VERSION = 1


def encode_packet(
    columns: TraceColumns,
    first_step: int = 0,
    last_step: int | None = None,
    *,
    known: Mapping[str, int] = {},
    extra: dict[str, Any] | None = None,
) -> bytes:
    """Encode steps ``[first_step, last_step)``, and the rows of tables that the receiver does not have.

    Args:
        columns: The columns, already up to date.
        first_step: First step to encode.
        last_step: One past the last; all encoded steps by default.
        known: Number of rows of each table that the receiver has, as `TraceColumns.sizes` gave it; none by default.
        extra: Additional facts for the header.
    """
    last_step = columns.num_steps if last_step is None else min(last_step, columns.num_steps)
    names: list[tuple[str, str, int]] = []
    parts: list[bytes] = []

    def add(name: str, column: Any, start: int, stop: int) -> None:
        data = column[start:stop].tobytes()
        names.append((name, column.typecode, stop - start))
        parts.append(data + b"\0" * (-len(data) % 8))

    for name, column in columns.steps.items():
        add(name, column, first_step, last_step)
    for kind in CHILD_COLUMNS:
        bounds = columns.bounds[kind]
        for name, column in columns.children[kind].items():
            add(f"{kind}.{name}", column, bounds[first_step], bounds[last_step])
    tables: dict[str, Any] = {}
    for name, rows in columns.tables.items():
        first = tables[f"first_{name}"] = known.get(name, 0)
        tables[f"{name}s"] = [_describe(row) for row in rows[first:]] if name == "request" else rows[first:]
    texts = columns.bounds["text"]
    header = {
        "version": PACKET_VERSION,
        "first_step": first_step,
        "num_steps": last_step - first_step,
        **tables,
        "texts": columns.texts[texts[first_step] : texts[last_step]],
        "sentences": columns.sentences[first_step:last_step],
        "columns": names,
        **(extra or {}),
    }
    try:
        encoded = msgspec.json.encode(header)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_without_surrogates(header))
    encoded += b" " * (-(len(encoded) + 4) % 8)
    return struct.pack("<I", len(encoded)) + encoded + b"".join(parts)


def decode_packet(packet: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the columns of a packet: the reference for the decoder in ``js/store.js``."""
    (length,) = struct.unpack_from("<I", packet)
    header = msgspec.json.decode(packet[4 : 4 + length])
    offset = 4 + length
    arrays = {}
    for name, code, count in header["columns"]:
        dtype = np.dtype(code)
        arrays[name] = np.frombuffer(packet, dtype, count, offset)
        offset += -(-count * dtype.itemsize // 8) * 8
    return header, arrays


def trace_facts(trace: Any) -> dict[str, Any]:
    """The facts of a trace as a whole: its source, configuration, model and the codes of the columns."""
    layout = Layout.of(trace.kv_cache_groups, trace.block_size)
    return {
        "source": trace.meta.source,
        "is_simulated": is_simulated(trace),
        "config": dict(trace.meta.config),
        "model": dict(trace.meta.model),
        "versions": dict(trace.meta.versions),
        "created": trace.meta.created,
        "block_size": layout.block_size,
        "groups": [_describe_group(group) for group in trace.kv_cache_groups],
        "layout_group": layout.group or 0,
        "num_blocks": trace.num_blocks or 0,
        "first_step": trace[0].step if len(trace) else 0,
        "zero": kept_zero(trace) if trace.whole is trace else run_zero(trace),
        "part": _part(trace),
        "start": _start(trace),
        "end": trace.end,
        "incident": trace.meta.is_of_server,
        "codes": {
            "events": EVENT_KINDS,
            "limits": LIMITS,
            "partial": FLAG_PARTIAL,
            "first_token": FLAG_FIRST_TOKEN,
            "limit_shift": LIMIT_SHIFT,
        },
    }


def _part(trace: Any) -> dict[str, Any] | None:
    """Of a part of a longer recording: the steps of the whole, and its first and last moment since the run's zero."""
    if len(trace) == len(trace.whole) or not len(trace):
        return None
    zero = run_zero(trace)
    return {"num_steps": len(trace.whole), "begin": trace[0].time - zero, "end": trace[-1].end - zero}


def _start(trace: Any) -> dict[str, Any] | None:
    """The state of requests before the first step of a trace that begins in the middle of a run, such as a slice."""
    if not len(trace) or trace[0].step == 0:
        return None
    first = trace[0]
    tables = trace.keyframe.block_tables if trace.keyframe else {}
    here = {*first.arrived, *first.waiting, *first.admitted, *first.resumed, *first.aborted}
    waiting = [request_id for request_id in trace.requests if request_id in here and request_id not in first.arrived]
    others = trace.keyframe.other_tables if trace.keyframe else {}
    return {
        "tables": tables,
        "other_tables": others,
        "waiting": [rid for rid in waiting if rid not in tables],
        "num_outputs": outputs_before(trace),
        "last_tokens": {name: token.step - first.step for name, token in last_tokens_before(trace).items()},
        "num_computed": dict(trace.keyframe.num_kv_computed) if trace.keyframe else {},
        "ever_computed": computed_before(trace),
    }


def _describe_group(group: KVCacheGroup) -> dict[str, Any]:
    return {"kind": group.kind, "block_size": group.block_size, "window": group.sliding_window}


def _without_surrogates(value: Any) -> Any:
    """A copy in which lone surrogates, which UTF-8 cannot encode, are question marks."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def _describe(info: Any) -> dict[str, Any]:
    return {
        "id": info.request_id,
        "num_prompt_tokens": info.num_prompt_tokens,
        "max_tokens": info.max_tokens,
        "arrival_step": info.arrival_step,
        "arrival_time": info.arrival_time,
        "priority": info.priority,
        "prompt": info.prompt[:PROMPT_PREVIEW],
        "prompt_length": len(info.prompt),
        "sampling": info.sampling,
        **({"adapter": info.adapter} if info.adapter else {}),
    }
