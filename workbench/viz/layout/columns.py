"""A trace as columns: the data that every live view draws. A step is encoded once for all open views.

The columns are in the units of the trace (steps, tokens, KV positions, block ids), so a bar, a chunk, a ribbon
segment and a causal trapezoid are drawn from the same few numbers; a renderer only converts units into pixels. A view
keeps the columns of all steps it has received, so its cursor moves without a request to the engine.
"""

from __future__ import annotations

import operator
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary, ref

import msgspec

from workbench.trace.lines import RequestInfo
from workbench.trace.readings import top_tokens
from workbench.trace.readings.last_tokens import last_tokens_before
from workbench.trace.readings.latency import LatencyAccumulator, RequestTimes, Timestamp
from workbench.trace.readings.narrate import narrate, shown
from workbench.trace.reasons import Reason
from workbench.trace.records import Arm, Chunk, Event, LimitedBy, StepRecord, TableChange
from workbench.viz.layout.miss_texts import MissTexts
from workbench.viz.layout.pool_changes import PoolChanges
from workbench.viz.layout.shadow_launch import shadow_facts

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

ARMS = get_args(Arm)
LIMITS = get_args(LimitedBy)
EVENT_KINDS = ("arrive", "admit", "resume", "preempt", "finish", "abort")

FLAG_PARTIAL = 1 << 2
FLAG_FIRST_TOKEN = 1 << 3
LIMIT_SHIFT = 4

FLAGS = {
    (arm, limit, partial): ARMS.index(arm) | LIMITS.index(limit) << LIMIT_SHIFT | (FLAG_PARTIAL if partial else 0)
    for arm in ARMS
    for limit in LIMITS
    for partial in (False, True)
}
"""``chunk.flags`` for a role, a limit (all bits from LIMIT_SHIFT on), and whether it is a partial prefill."""

NO_LATENCY = float("nan")

PROMPT_PREVIEW = 12_000
"""Maximum number of characters of a prompt that are sent to a view."""

STEP_COLUMNS: dict[str, str] = {
    "time": "d",
    "end": "d",
    "decode_tokens": "i",
    "prefill_tokens": "i",
    "recomputed_tokens": "i",
    "token_budget": "i",
    "prefill_cap": "i",
    "free_blocks": "i",
    "cached_blocks": "i",
    "unused_slots": "i",
    "num_running": "i",
    "num_waiting": "i",
    "waiting_reason": "i",
    "kernel": "i",
    "num_chunks": "i",
    "num_phases": "i",
    "num_events": "i",
    "num_passed_over": "i",
    "num_pool_changes": "i",
    "num_earlier_changes": "i",
    "num_work_items": "i",
}
"""One value per step. ``waiting_reason`` and ``kernel`` are indices into a packet's tables, -1 for none."""

CHILD_COLUMNS: dict[str, dict[str, str]] = {
    "chunk": {
        "request": "i",
        "start": "i",
        "num_tokens": "i",
        "flags": "H",
        "sampled": "i",
        "num_cached": "i",
        "num_recomputed": "i",
        "num_new_blocks": "i",
        "num_drafts": "i",
        "num_accepted": "i",
        "num_sampled_before": "i",
        "num_table_changes": "i",
        "miss": "i",
        "latency": "f",
    },
    "phase": {"name": "i", "begin": "f", "seconds": "f"},
    "event": {"kind": "B", "request": "i", "reason": "i"},
    "passed_over": {"request": "i", "reason": "i"},
    "pool": {"block": "i", "state": "B", "owner": "i", "references": "H"},
    "work": {name: "i" for name in ("seq", "q_start", "num_rows", "kv_start", "kv_end", "split", "num_splits")},
    "new_block": {"id": "i"},
    "sampled_before": {"id": "i"},
    "table_change": {"group": "B", "is_removed": "B", "value": "i"},
}
"""Several values per step (``new_block``, ``sampled_before``, ``table_change``: per chunk), in the order of the steps.

``new_block`` holds what a chunk appended to the first KV cache group's block table. ``table_change`` holds the places
of the tables that became 0, and what was appended to the tables of the other groups. ``chunk.miss`` is an index into
the strings: why an admission found no more in the prefix cache; -1 for other chunks. ``phase.name`` is one, too, and
``phase.begin`` is in seconds after the beginning of the step, negative for a phase before it. ``passed_over.reason``
and, for a preemption, ``event.reason`` are indices into the table of reasons; for other events ``event.reason`` is a
string.

``chunk.start`` is the position of the first row that ran. ``sampled_before`` holds the accepted drafts that a chunk
appended before the token it ``sampled``.

``chunk.latency`` is the time to first token or the inter-token latency in seconds (in steps if the trace has no
clock), NaN if the chunk gave no token or the token before is not known; ``FLAG_FIRST_TOKEN`` tells the two
apart. ``pool`` holds the blocks whose state, first owner or reference count has changed: the first
``num_earlier_changes`` of a step at the end of the step before, the others in its scheduling.
"""


SUPPLEMENTS: dict[str, Callable[[Mapping[str, Any], int], Any]] = {
    "shadow": shadow_facts,
    top_tokens.NAME: lambda facts, num_chunks: msgspec.to_builtins(top_tokens.read_top_tokens(facts)),
}
"""For each supplement that the views show a function of its facts and the number of sequences of its step: the facts
in the form that the views know, None if they have another."""


TABLES = ("request", "string", "reason", "kernel", "supplement")


class TraceColumns:
    """The columns of one trace, extended as the trace grows. Safe to use from several threads.

    Attributes:
        num_steps: Steps encoded so far.
        tables: The rows that columns refer to by their index, by kind: "request" in order of arrival, "string",
            "reason", "kernel" (the facts of a launch), and "supplement": index of a step, and name and checked facts of
            a supplement that the views show.
    """

    def __init__(self, trace: Trace) -> None:
        # Weak, so that the table of all columns does not keep its own keys alive.
        self._trace = ref(trace)
        self.num_steps = 0
        self.steps: dict[str, array[Any]] = {name: array(code) for name, code in STEP_COLUMNS.items()}
        self.children: dict[str, dict[str, array[Any]]] = {
            kind: {name: array(code) for name, code in columns.items()} for kind, columns in CHILD_COLUMNS.items()
        }
        self.bounds: dict[str, list[int]] = {kind: [0] for kind in [*CHILD_COLUMNS, "text"]}
        self.texts: list[str] = []
        self.sentences: list[str] = []
        self.tables: dict[str, list[Any]] = {name: [] for name in TABLES}
        self.supplements: list[tuple[int, str, Any]] = self.tables["supplement"]
        self._index: dict[str, int] = {}
        self._indices: dict[str, dict[Any, int]] = {"string": {"": -1}, "reason": {None: -1}, "kernel": {None: -1}}
        self._latencies = LatencyAccumulator()
        self._times: list[RequestTimes] = []
        # Made with the first step, because a trace that begins in the middle of a run gets its keyframe before that.
        self._pool: PoolChanges | None = None
        self._num_supplements = 0
        self._miss_texts = MissTexts()
        self._lock = threading.Lock()

    @property
    def trace(self) -> Trace:
        """The trace that is encoded."""
        trace = self._trace()
        if trace is None:
            raise ReferenceError("the trace of these columns is gone; keep a reference to it while it is shown")
        return trace

    def sizes(self) -> dict[str, int]:
        """Number of steps, as "step", and of the rows of each table."""
        return {"step": self.num_steps, **{name: len(rows) for name, rows in self.tables.items()}}

    def update(self) -> int:
        """Encode the steps appended since the last call; returns the number of steps that are encoded now."""
        with self._lock:
            trace = self.trace
            for request_id in list(trace.requests):
                self._request(request_id)
            supplements = trace.supplements  # before the steps: each of them names a step that is encoded below
            for step in range(self.num_steps, len(trace)):
                if self._pool is None:
                    self._pool = PoolChanges(trace)
                    self._latencies.start_from(last_tokens_before(trace))
                self._append(trace[step], self._pool)
                self.num_steps = step + 1
            for supplement in supplements[self._num_supplements :]:
                step = supplement.step - trace[0].step
                check = SUPPLEMENTS.get(supplement.name)
                if check and (facts := check(supplement.facts, self.steps["num_chunks"][step])) is not None:
                    self.supplements.append((step, supplement.name, facts))
            self._num_supplements = len(supplements)
            return self.num_steps

    # -- encoding one step -----------------------------------------------------------------------------------

    def _request(self, request_id: str) -> int:
        """Index of a request, added at its first mention."""
        index = self._index.get(request_id)
        if index is None:
            index = self._index[request_id] = len(self._index)
            info = self.trace.requests.get(request_id) or RequestInfo(request_id, 0, max_tokens=0)
            self.tables["request"].append(info)
            self._miss_texts.arrive(info)
            self._times.append(self._latencies.arrive(info))
        return index

    def _row(self, table: str, key: Any, make: Callable[[Any], Any] = lambda key: key) -> int:
        """Index of a row of a table, made from its key at its first mention; -1 for the key that stands for none."""
        indices, rows = self._indices[table], self.tables[table]
        if (index := indices.get(key)) is None:
            index = indices[key] = len(rows)
            rows.append(make(key))
        return index

    def _string(self, text: str) -> int:
        return self._row("string", text)

    def _reason(self, reason: Reason | None) -> int:
        return self._row("reason", reason, self._describe_reason)

    def _describe_reason(self, reason: Reason) -> dict[str, Any]:
        """A reason as plain data. Its requests are indices of requests."""
        return {
            "kind": reason.kind,
            "root": reason.root,
            "limit": reason.limit,
            "value": reason.value,
            "needed": reason.needed,
            "available": reason.available,
            "behind": self._index.get(reason.behind, -1),
            "requests": [self._index[rid] for rid in reason.requests if rid in self._index],
            "sentence": shown(reason),
        }

    def _event_reason(self, event: Event, record: StepRecord) -> int:
        if event.kind == "preempt":
            return self._reason(record.preempt_reasons.get(event.request_id))
        return self._string(event.reason)

    def _extend(self, kind: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Append rows to the columns of one kind and return their number."""
        return self._extend_by_column(kind, tuple(zip(*rows)))

    def _extend_by_column(self, kind: str, values: Sequence[Iterable[Any]]) -> int:
        """The same for the values of each column; without any for no rows, as most steps have of most kinds."""
        columns, bounds = self.children[kind], self.bounds[kind]
        if not values:
            bounds.append(bounds[-1])
            return 0
        for column, part in zip(columns.values(), values):
            column.extend(part)
        bounds.append(len(next(iter(columns.values()))))
        return bounds[-1] - bounds[-2]

    def _append(self, record: StepRecord, pool: PoolChanges) -> None:
        chunks = dict(zip(Chunk.__struct_fields__, zip(*map(msgspec.structs.astuple, record.chunks)))) or _NO_CHUNKS
        num_chunks = self._append_chunks(record, chunks)
        for kind, field in (("new_block", "new_block_ids"), ("sampled_before", "sampled_before")):
            values = (chain.from_iterable(chunks[field]),) if any(chunks[field]) else ()
            self._extend_by_column(kind, values)
        has_changes = any(chunks["removed"]) or any(chunks["other_groups"])
        self._extend("table_change", chain.from_iterable(map(_table_changes, record.chunks)) if has_changes else ())
        num_phases = self._extend(
            "phase", ((self._string(p.name), p.begin - record.time, p.end - p.begin) for p in record.phases)
        )
        num_events = self._extend(
            "event",
            (
                (EVENT_KINDS.index(event.kind), self._request(event.request_id), self._event_reason(event, record))
                for event in record.events
            ),
        )
        passed_over = self._extend(
            "passed_over", ((self._request(rid), self._reason(why)) for rid, why in record.passed_over.items())
        )
        num_decode_tokens = sum([n for n, arm in zip(chunks["num_tokens"], chunks["arm"]) if arm == "decode"])
        earlier, changes = pool.advance(record)
        num_pool_changes = self._extend(
            "pool",
            (
                (block, state, -1 if owner is None else self._request(owner), min(references, 65535))
                for block, state, owner, references in (*earlier, *changes)
            ),
        )
        items = record.kernel.work_items if record.kernel else ()
        num_work_items = self._extend("work", (msgspec.structs.astuple(item) for item in items))
        of_step = {
            "time": record.time,
            "end": record.end,
            "decode_tokens": num_decode_tokens,
            "prefill_tokens": sum(chunks["num_tokens"]) - num_decode_tokens,
            "recomputed_tokens": sum(chunks["num_recomputed_tokens"]),
            "token_budget": record.token_budget,
            "prefill_cap": record.long_prefill_cap,
            "free_blocks": record.free_blocks,
            "cached_blocks": pool.num_cached,
            "unused_slots": pool.num_unused_slots,
            "num_running": len(record.running),
            "num_waiting": len(record.waiting),
            "waiting_reason": self._reason(record.waiting_reason),
            "kernel": self._kernel(record),
            "num_chunks": num_chunks,
            "num_phases": num_phases,
            "num_events": num_events,
            "num_passed_over": passed_over,
            "num_pool_changes": num_pool_changes,
            "num_earlier_changes": len(earlier),
            "num_work_items": num_work_items,
        }
        for name, value in of_step.items():
            self.steps[name].append(value)
        self.sentences.append(narrate(record, self.trace.requests))

    def _append_chunks(self, record: StepRecord, chunks: Mapping[str, Sequence[Any]]) -> int:
        """Append the chunks of a step, given field by field, and return their number."""
        end, sampled = self._latencies.add(record).end, chunks["sampled"]
        self.texts += [text for text, token in zip(chunks["text"], sampled) if token is not None]
        self.bounds["text"].append(len(self.texts))
        requests = [self._request(request_id) for request_id in chunks["request_id"]]
        latencies, first_tokens = self._latencies_of(requests, end)
        flags = map(FLAGS.__getitem__, zip(chunks["arm"], chunks["limited_by"], chunks["is_partial_prefill"]))
        removed, others, misses = chunks["removed"], chunks["other_groups"], self._miss_texts.of(self.trace, record)
        return self._extend_by_column(
            "chunk",
            (
                requests,
                map(operator.sub, chunks["start"], chunks["ahead"]),
                chunks["num_tokens"],
                map(operator.or_, flags, first_tokens),
                [-1 if token is None else token for token in sampled] if None in sampled else sampled,
                chunks["num_cached_tokens"],
                chunks["num_recomputed_tokens"],
                map(len, chunks["new_block_ids"]),
                map(len, chunks["drafts"]),
                chunks["num_accepted"],
                map(len, chunks["sampled_before"]),
                map(_num_table_changes, removed, others) if any(others) else map(len, removed),
                [self._string(misses.get(request_id, "")) for request_id in chunks["request_id"]]
                if misses
                else repeat(-1, len(requests)),
                latencies,
            ),
        )

    def _latencies_of(self, requests: Sequence[int], end: Timestamp) -> tuple[list[float], list[int]]:
        """``chunk.latency`` and the flag of a first token, for each chunk of a step that ended at ``end``."""
        latencies, first_tokens, timed, all_times = [], [], self._latencies.timed, self._times
        for request in requests:
            times = all_times[request]
            latency, first_token = NO_LATENCY, 0
            if times.last_token is end:
                if times.first_token is end:
                    first_token = FLAG_FIRST_TOKEN
                if (since := times.since) is not None:
                    latency = end.seconds - since.seconds if timed else end.steps - since.steps
            latencies.append(latency)
            first_tokens.append(first_token)
        return latencies, first_tokens

    def _kernel(self, record: StepRecord) -> int:
        """Index of the launch facts of a step (without work items); -1 in a simulation."""
        launch = record.kernel and msgspec.json.encode(msgspec.structs.replace(record.kernel, work_items=()))
        return self._row("kernel", launch, msgspec.Raw)


_NO_CHUNKS: dict[str, tuple[Any, ...]] = dict.fromkeys(Chunk.__struct_fields__, ())


def _num_table_changes(removed: Sequence[int], other_groups: Sequence[TableChange]) -> int:
    """Number of rows of ``table_change`` of a chunk."""
    return len(removed) + sum(len(change.removed) + len(change.new_block_ids) for change in other_groups)


def _table_changes(chunk: Chunk) -> Iterator[tuple[int, bool, int]]:
    """Rows of ``table_change``."""
    for place in chunk.removed:
        yield 0, True, place
    for group, change in enumerate(chunk.other_groups, 1):
        for place in change.removed:
            yield group, True, place
        for block in change.new_block_ids:
            yield group, False, block


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
