"""A trace as columns: the data every live view draws, each step encoded once however many views are open.

The columns are in the units of the trace (steps, tokens, KV positions, block ids), so a bar, a chunk, a ribbon
segment and a causal trapezoid are all read off the same few numbers; a renderer only turns units into pixels. A
view holds the columns of all steps it has seen, which is why moving its cursor asks nothing of the engine.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary, ref

import msgspec

from workbench.trace.records import Arm, Chunk, LimitedBy, RequestInfo, StepRecord
from workbench.viz.layout.pool_changes import PoolChanges
from workbench.viz.layout.shadow_launch import shadow_facts

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

ARMS = get_args(Arm)
LIMITS = get_args(LimitedBy)
EVENT_KINDS = ("arrive", "admit", "resume", "preempt", "finish", "abort")
PHASES = ("schedule", "prepare", "forward", "sample", "update")

FLAG_PARTIAL = 1 << 2
FLAG_FIRST_TOKEN = 1 << 6
LIMIT_SHIFT = 3

PROMPT_PREVIEW = 4000
"""Characters of a prompt that are sent to a view; the rest stays in the trace."""

STEP_COLUMNS: dict[str, str] = {
    "time": "d",
    **{f"seconds_{phase}": "f" for phase in PHASES},
    "decode_tokens": "i",
    "prefill_tokens": "i",
    "recomputed_tokens": "i",
    "token_budget": "i",
    "prefill_cap": "i",
    "free_blocks": "i",
    "free_blocks_end": "i",
    "cached_blocks": "i",
    "unused_slots": "i",
    "num_running": "i",
    "num_waiting": "i",
    "waiting_reason": "i",
    "kernel": "i",
    "num_chunks": "i",
    "num_events": "i",
    "num_passed_over": "i",
    "num_pool_changes": "i",
    "num_work_items": "i",
}
"""One value per step. ``waiting_reason`` and ``kernel`` are indices into a packet's string tables, -1 for none."""

CHILD_COLUMNS: dict[str, dict[str, str]] = {
    "chunk": {
        "request": "i",
        "start": "i",
        "num_tokens": "i",
        "flags": "B",
        "sampled": "i",
        "num_cached": "i",
        "num_recomputed": "i",
        "num_new_blocks": "i",
        "latency": "f",
    },
    "event": {"kind": "B", "request": "i", "reason": "i"},
    "passed_over": {"request": "i", "reason": "i"},
    "pool": {"block": "i", "state": "B", "owner": "i", "references": "H"},
    "work": {name: "i" for name in ("seq", "q_start", "num_rows", "kv_start", "kv_end", "split", "num_splits")},
    "new_block": {"id": "i"},
}
"""Several values per step (``new_block``: per chunk), in the order of the steps.

``chunk.latency`` is the time to first token or the inter-token latency in seconds (in steps where the trace has
no times), NaN where nothing was sampled; ``FLAG_FIRST_TOKEN`` tells the two apart. ``pool`` holds the blocks
whose state, first owner or reference count differs from the step before, after scheduling.
"""


class TraceColumns:
    """The columns of one trace, extended as the trace grows. Safe to use from several threads.

    Attributes:
        num_steps: Steps encoded so far.
        requests: Request ids in order of arrival; a ``request`` column holds indices into this list.
    """

    def __init__(self, trace: Trace) -> None:
        # Weak, so that the table of all columns does not keep its own keys alive.
        self._trace = ref(trace)
        self.num_steps = 0
        self.requests: list[str] = []
        self.request_infos: list[RequestInfo] = []
        self.steps = {name: array(code) for name, code in STEP_COLUMNS.items()}
        self.children = {
            kind: {name: array(code) for name, code in columns.items()} for kind, columns in CHILD_COLUMNS.items()
        }
        self.bounds: dict[str, list[int]] = {kind: [0] for kind in [*CHILD_COLUMNS, "text"]}
        self.texts: list[str] = []
        self.strings: list[str] = []
        self.kernels: list[str] = []
        self.shadows: list[tuple[int, dict[str, Any]]] = []
        """Index of a step and what a shadow launch of the Metal kernel found, in the order in which they came in."""
        self._index: dict[str, int] = {}
        self._string_index: dict[str, int] = {"": -1}
        self._kernel_index: dict[str, int] = {}
        self._last_token_time: dict[int, float] = {}
        # Made with the first step: a trace that begins in the middle of a run is given its keyframe before that.
        self._pool: PoolChanges | None = None
        self._shadows_pending: list[tuple[int, dict[str, Any]]] = []
        self._lock = threading.Lock()

    @property
    def trace(self) -> Trace:
        """The trace that is encoded."""
        trace = self._trace()
        if trace is None:
            raise ReferenceError("the trace of these columns is gone; keep a reference to it while it is shown")
        return trace

    def update(self) -> int:
        """Encode the steps appended since the last call; returns the number of steps that are encoded now."""
        with self._lock:
            trace = self.trace
            for request_id in list(trace.requests):
                self._request(request_id)
            if self._pool is None and len(trace):
                self._pool = PoolChanges(trace)
            for step in range(self.num_steps, len(trace)):
                self._append(trace[step], self._pool)
                self.num_steps = step + 1
            # A shadow launch takes longer than its step and is filled in when it is done.
            done = [item for item in self._shadows_pending if not item[1].get("pending")]
            if done:
                self.shadows.extend(
                    (step, facts)
                    for step, found in done
                    if (facts := shadow_facts(found, self.steps["num_chunks"][step])) is not None
                )
                self._shadows_pending = [item for item in self._shadows_pending if item not in done]
            return self.num_steps

    # -- encoding one step -----------------------------------------------------------------------------------

    def _request(self, request_id: str) -> int:
        """Index of a request, added at its first mention."""
        index = self._index.get(request_id)
        if index is None:
            index = self._index[request_id] = len(self.requests)
            self.requests.append(request_id)
            info = self.trace.requests.get(request_id) or RequestInfo(request_id, 0)
            self.request_infos.append(info)
        return index

    def _string(self, text: str) -> int:
        """Index of a reason in the string table, -1 for no reason."""
        index = self._string_index.get(text)
        if index is None:
            index = self._string_index[text] = len(self.strings)
            self.strings.append(text)
        return index

    def _extend(self, kind: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Append rows to the columns of one kind and return how many there were."""
        columns = list(self.children[kind].values())
        values = list(zip(*rows))
        for column, part in zip(columns, values):
            column.extend(part)
        self.bounds[kind].append(len(columns[0]))
        return self.bounds[kind][-1] - self.bounds[kind][-2]

    def _append(self, record: StepRecord, pool: PoolChanges) -> None:
        now = record.time + sum(record.timings.values()) if record.timings else float(record.step + 1)
        rows = [self._chunk_row(chunk, now, bool(record.timings)) for chunk in record.chunks]
        self.bounds["text"].append(len(self.texts))
        num_chunks = self._extend("chunk", rows)
        self._extend("new_block", ((block,) for chunk in record.chunks for block in chunk.new_block_ids))
        num_events = self._extend(
            "event",
            ((EVENT_KINDS.index(e.kind), self._request(e.request_id), self._string(e.reason)) for e in record.events),
        )
        passed_over = self._extend(
            "passed_over", ((self._request(rid), self._string(why)) for rid, why in record.passed_over.items())
        )
        changes = pool.advance(record)
        num_pool_changes = self._extend(
            "pool",
            (
                (block, state, -1 if owner is None else self._request(owner), min(references, 65535))
                for block, state, owner, references in changes
            ),
        )
        items = record.kernel.work_items if record.kernel else ()
        num_work_items = self._extend("work", (msgspec.structs.astuple(item) for item in items))
        values = {
            "time": record.time,
            **{f"seconds_{phase}": record.timings.get(phase, 0.0) for phase in PHASES},
            "decode_tokens": record.num_decode_tokens,
            "prefill_tokens": record.num_prefill_tokens,
            "recomputed_tokens": sum(chunk.num_recomputed_tokens for chunk in record.chunks),
            "token_budget": record.token_budget,
            "prefill_cap": record.long_prefill_cap,
            "free_blocks": record.free_blocks,
            "free_blocks_end": record.free_blocks_end,
            "cached_blocks": pool.num_cached,
            "unused_slots": pool.num_unused_slots,
            "num_running": len(record.running),
            "num_waiting": len(record.waiting),
            "waiting_reason": self._string(record.waiting_reason),
            "kernel": self._kernel(record),
            "num_chunks": num_chunks,
            "num_events": num_events,
            "num_passed_over": passed_over,
            "num_pool_changes": num_pool_changes,
            "num_work_items": num_work_items,
        }
        for name, value in values.items():
            self.steps[name].append(value)

    def _chunk_row(self, chunk: Chunk, now: float, timed: bool) -> tuple[Any, ...]:
        request = self._request(chunk.request_id)
        flags = ARMS.index(chunk.arm) | LIMITS.index(chunk.limited_by) << LIMIT_SHIFT
        if chunk.is_partial_prefill:
            flags |= FLAG_PARTIAL
        latency = float("nan")
        if chunk.sampled is not None:
            self.texts.append(chunk.text)
            before = self._last_token_time.get(request)
            if before is None:
                flags |= FLAG_FIRST_TOKEN
                info = self.request_infos[request]
                before = info.arrival_time if timed else float(info.arrival_step)
            latency = now - before
            self._last_token_time[request] = now
        return (
            request,
            chunk.start,
            chunk.num_tokens,
            flags,
            -1 if chunk.sampled is None else chunk.sampled,
            chunk.num_cached_tokens,
            chunk.num_recomputed_tokens,
            len(chunk.new_block_ids),
            latency,
        )

    def _kernel(self, record: StepRecord) -> int:
        """Index of the launch facts of a step (without work items and shadow launch), -1 in a simulation."""
        if record.kernel is None:
            return -1
        details = dict(record.kernel.details)
        shadow = details.pop("shadow", None)
        if isinstance(shadow, dict):
            self._shadows_pending.append((self.num_steps, shadow))
        facts = msgspec.to_builtins(msgspec.structs.replace(record.kernel, work_items=(), details=details))
        text = msgspec.json.encode(facts).decode()
        index = self._kernel_index.get(text)
        if index is None:
            index = self._kernel_index[text] = len(self.kernels)
            self.kernels.append(text)
        return index


_COLUMNS: WeakKeyDictionary[Trace, TraceColumns] = WeakKeyDictionary()
_COLUMNS_LOCK = threading.Lock()


def columns_of(trace: Trace) -> TraceColumns:
    """The columns of a trace, shared by every view of it and extended up to its last step."""
    with _COLUMNS_LOCK:
        columns = _COLUMNS.get(trace)
        if columns is None:
            columns = _COLUMNS[trace] = TraceColumns(trace)
    columns.update()
    return columns
