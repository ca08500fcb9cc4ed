"""Checks of a trace's consistency, made while its block tables are rebuilt from a file.

A trace file may come from anywhere, so every number in it is checked when it is read: views index block tables and
allocate arrays by these numbers without another check.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import astuple, force_setattr

from workbench.base.text import shown
from workbench.trace.errors import TraceError
from workbench.trace.fields import MAX_BLOCKS, MAX_TOKENS
from workbench.trace.kv_groups import KVCacheGroup, read_groups
from workbench.trace.lines import Keyframe, TraceMeta
from workbench.trace.pool_change import NO_CHANGE, PoolChange, length_of
from workbench.trace.records import Chunk, KernelLaunch, Layout, StepRecord

DEFAULT_BLOCK_SIZE = 16
"""Tokens per KV block if a trace's configuration does not say: vLLM's default."""


def config_number(config: Mapping[str, Any], name: str, high: int) -> int | None:
    """A positive integer of a trace's configuration, None if the configuration does not contain it.

    Raises:
        TraceError: It is something else.
    """
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise TraceError(f"config {name} must be an integer from 1 to {high}, the trace has {shown(value)}")
    return value


def block_size_of(meta: TraceMeta) -> int:
    """Tokens per KV block of the engine that was traced."""
    return config_number(meta.config, "block_size", MAX_TOKENS) or DEFAULT_BLOCK_SIZE


def num_blocks_of(meta: TraceMeta) -> int | None:
    """KV blocks of the engine that was traced, block 0 included; None if the configuration does not say."""
    return config_number(meta.config, "num_blocks", MAX_BLOCKS)


def groups_of(meta: TraceMeta) -> tuple[KVCacheGroup, ...]:
    """The KV cache groups of the engine that was traced.

    Raises:
        TraceError: The configuration's groups are not sensible.
    """
    block_size_of(meta)
    try:
        return read_groups(meta.config)
    except (ValueError, TypeError) as problem:
        raise TraceError(f"config {problem}") from None


_NAMES = ("arrived", "admitted", "resumed", "preempted", "finished", "aborted", "running", "waiting")
"""Fields of a record that hold the names of requests."""

_NUMBERS = ("free_blocks", "free_blocks_end", "token_budget")
"""Fields of a record whose numbers are kept once, like positions and the ids of blocks."""

_names_of, _numbers_of = attrgetter(*_NAMES), attrgetter(*_NUMBERS)


class _Held:
    """A request that holds blocks: its id, its block tables, and the tokens that are computed so far."""

    __slots__ = ("computed", "request_id", "tables")

    def __init__(self, request_id: str, tables: list[list[int]], computed: int = MAX_TOKENS) -> None:
        self.request_id = request_id
        self.tables = tables
        self.computed = computed


class TraceChecker:
    """Checks the lines of a file in order, and gives each record its full block tables.

    Ids and numbers that many records have are kept once: a decoder makes new objects for each, a third of a record.
    A request's table is one append-only list from its admission to its end or preemption; the records share it.
    ``BlockReplay``, which follows the whole pool, trusts records that have passed. Tables are built here without it:
    loading must not wait for a pool, nor allocate one of the size that a file claims.

    Args:
        meta: First line of the file.
        requests: The requests of the lines so far, by id.
    """

    def __init__(self, meta: TraceMeta, requests: Container[str]) -> None:
        self.block_size = block_size_of(meta)
        self.groups = groups_of(meta)
        self.layout = Layout.of(self.groups, self.block_size)
        self.num_blocks = num_blocks_of(meta) or MAX_BLOCKS
        self._requests = requests
        self._held: dict[str, _Held] = {}
        self._ids: dict[str, str] = {}
        self._numbers: dict[int, int] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._tables: tuple[list[int], ...] = ()
        self._before: StepRecord | None = None
        self._next_step: int | None = None
        first = self.groups[0]
        self._tokens_per_place = first.block_size if first.is_attention else MAX_TOKENS

    def start_from(self, keyframe: Keyframe) -> None:
        """Adopt the block tables of a run that began before the trace.

        Raises:
            TraceError: The keyframe is not the beginning, or contradicts itself.
        """
        if self._next_step is not None:
            raise TraceError("a keyframe must come before the first step")
        self._check_block_ids("free_block_ids", keyframe.free_block_ids)
        self._check_block_ids("cached_block_ids", keyframe.cached_block_ids)
        if len(set(keyframe.free_block_ids)) != len(keyframe.free_block_ids):
            raise TraceError("free_block_ids names a block twice")
        for request_id, table in keyframe.block_tables.items():
            self._check_block_ids(f"block table of {shown(request_id)}", table)
            if request_id not in self._requests:
                raise TraceError(f"request {shown(request_id)} holds blocks but has no request line before it")
            computed = keyframe.num_kv_computed.get(request_id, 0)
            if self.groups[0].is_attention and computed > len(table) * self.groups[0].block_size:
                raise TraceError(
                    f"request {shown(request_id)} has {computed} tokens computed, its {len(table)} blocks "
                    f"hold {len(table) * self.groups[0].block_size}"
                )
            others = keyframe.other_tables.get(request_id, ())
            for other in others:
                self._check_block_ids(f"block table of {shown(request_id)}", other)
            self._held[request_id] = _Held(request_id, [list(table), *map(list, others)], computed)
        self._next_step = keyframe.step

    def check(self, record: StepRecord) -> None:
        """Check the next record and attach its block tables.

        Raises:
            TraceError: The record does not follow from those before it.
        """
        if self._next_step is not None and record.step != self._next_step:
            raise TraceError(f"step {record.step} follows step {self._next_step - 1}: steps must be contiguous")
        self._next_step = record.step + 1
        if record.end < record.time:
            raise TraceError(f"step {record.step} begins at {record.time} s and ends before that, at {record.end} s")
        if record.phase_starts and not record.phase_starts.keys() <= record.timings.keys():
            phase = next(name for name in record.phase_starts if name not in record.timings)
            raise TraceError(f"phase_starts of step {record.step} names {shown(phase)}, which has no timings")
        self._check_names(record)
        self._check_block_ids("cached_block_ids", record.cached_block_ids)
        self._check_block_ids("withdrawn_block_ids", record.withdrawn_block_ids)
        for load in record.loads:
            self._check_block_ids("loads", load.hit_ids + load.block_ids)
        self._check_pool("pool", record.pool)
        self._check_pool("pool_end", record.pool_end)
        if record.num_cached_end > len(record.cached_block_ids):
            raise TraceError(
                f"step {record.step} has num_cached_end {record.num_cached_end} and {len(record.cached_block_ids)} "
                "cached_block_ids"
            )
        for block_ids in record.unscheduled_block_ids.values():
            self._check_block_ids("unscheduled_block_ids", block_ids)
        running, tokens_per_place = self._held, self._tokens_per_place
        for request_id in (*record.aborted, *record.preempted):
            running.pop(request_id, None)
        for request_id in (*record.admitted, *record.resumed):
            if request_id in running:
                raise TraceError(f"request {shown(request_id)} is admitted in step {record.step} but runs already")
            running[request_id] = _Held(self._ids.setdefault(request_id, request_id), [[] for _ in self.groups])
        self._keep_numbers_once(record)
        scheduled, numbers, has_others = [], self._numbers, len(self.groups) > 1
        num_tokens = 0
        chunks = record.chunks
        for chunk in chunks:
            request = running.get(chunk.request_id)
            if request is None:
                name = shown(chunk.request_id)
                raise TraceError(f"request {name} is scheduled in step {record.step} but not admitted")
            start, count, held = chunk.start, chunk.num_tokens, request.tables
            force_setattr(chunk, "request_id", request.request_id)
            force_setattr(chunk, "start", numbers.setdefault(start, start))
            if chunk.removed:
                self._remove(held, 0, chunk.removed)
            table = held[0]
            if new_block_ids := chunk.new_block_ids:
                self._check_block_ids("new_block_ids", new_block_ids)
                force_setattr(chunk, "new_block_ids", new_block_ids := self._kept_once(new_block_ids))
                table.extend(new_block_ids)
            if has_others:
                self._change_others(record.step, chunk, held)
            end = start + count
            if (
                start > request.computed
                or end > len(table) * tokens_per_place
                or chunk.num_cached_tokens > start
                or chunk.ahead > start
                or (chunk.drafts and len(chunk.drafts) >= count)
            ):
                raise TraceError(self._misfit(record.step, chunk, request.computed, len(table)))
            request.computed = end
            num_tokens += count
            scheduled.append(held)
        if chunks:
            if len(set(map(id, scheduled))) != len(scheduled):
                raise TraceError(f"step {record.step} schedules a request twice")
            if num_tokens > (record.token_budget or MAX_TOKENS):
                raise TraceError(
                    f"step {record.step} schedules {num_tokens} tokens, its token_budget is {record.token_budget}"
                )
            if record.kernel is not None:
                self._check_work_items(record, record.kernel, num_tokens)
        if max(record.free_blocks, record.free_blocks_end) >= self.num_blocks:
            raise TraceError(f"step {record.step} has more free blocks than the pool's {self.num_blocks - 1}")
        if len(self.groups) == 1 and self.groups[0].kind == "full_attention":
            if (tables := tuple([held[0] for held in scheduled])) != self._tables:
                self._tables = tables  # equal ones may stand for each other: a table only grows
            record.attach_block_tables(self.layout, self._tables)
            if self._before is not None:
                record.share_table_lengths(self._before)
            self._before = record
        else:
            record.attach_tables_of_groups(self.layout, [[(table, len(table)) for table in held] for held in scheduled])
        for request_id in record.finished:
            running.pop(request_id, None)

    def _change_others(self, step: int, chunk: Chunk, held: list[list[int]]) -> None:
        """Apply a chunk's changes to the block tables of the groups after the first."""
        if len(chunk.other_groups) != len(held) - 1:
            raise TraceError(
                f"request {shown(chunk.request_id)} in step {step} changes {len(chunk.other_groups)} block tables "
                f"beside the first, the configuration has {len(held) - 1}"
            )
        for group, change in enumerate(chunk.other_groups, 1):
            self._remove(held, group, change.removed)
            self._check_block_ids("new_block_ids", change.new_block_ids)
            held[group].extend(change.new_block_ids)

    @staticmethod
    def _remove(held: list[list[int]], group: int, places: Sequence[int]) -> None:
        """Set places of a table to 0, in a copy: records refer to the table as it was."""
        if not places:
            return
        table = held[group] = held[group].copy()
        if max(places) >= len(table):
            raise TraceError(f"place {max(places)} of a block table is removed, which has {len(table)}")
        for place in places:
            table[place] = 0

    def _check_names(self, record: StepRecord) -> None:
        for field, names in zip(_NAMES, _names_of(record)):
            if not names:
                continue
            if (kept := self._names.get(field)) != names:
                if not all(map(self._requests.__contains__, names)):
                    name = next(name for name in names if name not in self._requests)
                    raise TraceError(f"{field} of step {record.step} names {shown(name)}, which has no request line")
                kept = self._names[field] = tuple(map(self._ids.setdefault, names, names))
            force_setattr(record, field, kept)

    def _kept_once(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The same numbers, as objects that other records have already."""
        return tuple(map(self._numbers.setdefault, numbers, numbers))

    def _keep_numbers_once(self, record: StepRecord) -> None:
        for field, number in zip(_NUMBERS, _numbers_of(record)):
            force_setattr(record, field, self._numbers.setdefault(number, number))
        if record.cached_block_ids:
            force_setattr(record, "cached_block_ids", self._kept_once(record.cached_block_ids))

    def _check_block_ids(self, field: str, ids: tuple[int, ...]) -> None:
        if ids and max(ids) >= self.num_blocks:
            raise TraceError(f"{field} holds block {max(ids)}, the pool has blocks 0 to {self.num_blocks - 1}")

    def _check_pool(self, field: str, change: PoolChange | None) -> None:
        if change is not None and change is not NO_CHANGE:
            for name, runs in zip(change.__struct_encode_fields__, astuple(change)):
                if not runs:
                    continue
                self._check_block_ids(f"{field}.{name}", tuple(map(abs, runs)))
                if length_of(runs) >= self.num_blocks:
                    raise TraceError(f"{field}.{name} names more blocks than the pool's {self.num_blocks - 1}")

    def _misfit(self, step: int, chunk: Chunk, computed: int, num_blocks: int) -> str:
        """Describe the fault of a chunk that does not follow from the state of its request."""
        who = f"request {shown(chunk.request_id)} in step {step}"
        if chunk.start > computed:
            return f"{who} starts at {chunk.start}, computed so far are {computed} tokens"
        if chunk.num_cached_tokens > chunk.start:
            return f"{who} has {chunk.num_cached_tokens} cached tokens but starts at {chunk.start}"
        if chunk.end > num_blocks * self._tokens_per_place:
            return (
                f"{who} computes tokens [{chunk.start}, {chunk.end}), its {num_blocks} blocks hold "
                f"{num_blocks * self._tokens_per_place}"
            )
        return (
            f"{who} has {len(chunk.drafts)} drafts among {chunk.num_tokens} tokens, and starts at {chunk.start}, "
            f"{chunk.ahead} ahead"
        )

    @staticmethod
    def _check_work_items(record: StepRecord, kernel: KernelLaunch, num_tokens: int) -> None:
        ends = [chunk.num_kv for chunk in record.chunks]
        for item in kernel.work_items:
            if (
                item.seq >= len(ends)
                or item.q_start + item.num_rows > num_tokens
                or not item.kv_start <= item.kv_end <= ends[item.seq]
                or item.split >= item.num_splits
            ):
                raise TraceError(f"work item {item} does not fit the chunks of step {record.step}")
