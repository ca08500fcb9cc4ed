"""What a trace must satisfy, checked while block tables are rebuilt from a file.

A trace file may come from anywhere, so nothing in it is believed before it was seen to fit: views index block
tables and allocate arrays by these numbers without looking again.
"""

from __future__ import annotations

from typing import Any

from workbench.trace.bounds import MAX_BLOCKS, MAX_TOKENS
from workbench.trace.records import Keyframe, RequestInfo, StepRecord, TraceMeta

DEFAULT_BLOCK_SIZE = 16
"""Tokens per KV block where a trace's configuration does not say: vLLM's default."""


class TraceError(ValueError):
    """A trace that cannot be read or used, with the reason."""


def config_number(config: dict[str, Any], name: str, high: int, default: int | None) -> int | None:
    """A positive integer of a trace's configuration.

    Raises:
        TraceError: It is something else.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise TraceError(f"config {name} must be an integer from 1 to {high}, the trace has {_short(value)}")
    return value


def block_size_of(meta: TraceMeta) -> int:
    """Tokens per KV block of the engine that was traced."""
    return config_number(meta.config, "block_size", MAX_TOKENS, DEFAULT_BLOCK_SIZE)


def num_blocks_of(meta: TraceMeta) -> int | None:
    """KV blocks of the engine that was traced, block 0 included; None where the configuration does not say."""
    return config_number(meta.config, "num_blocks", MAX_BLOCKS, None)


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


class BlockTableReplay:
    """Follows the records of a file in order: checks each one and gives it its full block tables.

    A request's table is one append-only list from its admission to its end or preemption; the records share it.
    """

    def __init__(self, meta: TraceMeta) -> None:
        self.block_size = block_size_of(meta)
        self.num_blocks = num_blocks_of(meta) or MAX_BLOCKS
        self._requests: set[str] = set()
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._next_step: int | None = None

    def add_request(self, info: RequestInfo) -> None:
        """Check a request line.

        Raises:
            TraceError: The request came before, or its prompt is not as long as it says.
        """
        if info.request_id in self._requests:
            raise TraceError(f"request {_short(info.request_id)} arrives twice")
        if info.prompt_token_ids and len(info.prompt_token_ids) != info.num_prompt_tokens:
            raise TraceError(
                f"request {_short(info.request_id)} has num_prompt_tokens {info.num_prompt_tokens} "
                f"and {len(info.prompt_token_ids)} prompt_token_ids"
            )
        self._requests.add(info.request_id)

    def start_from(self, keyframe: Keyframe) -> None:
        """Take over the block tables of a run that began before the trace.

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
            self._check_block_ids(f"block table of {_short(request_id)}", table)
            if request_id not in self._requests:
                raise TraceError(f"request {_short(request_id)} holds blocks but has no request line before it")
            computed = keyframe.num_kv_computed.get(request_id, 0)
            if computed > len(table) * self.block_size:
                raise TraceError(
                    f"request {_short(request_id)} has {computed} tokens computed, its {len(table)} blocks "
                    f"hold {len(table) * self.block_size}"
                )
            self._tables[request_id] = list(table)
            self._computed[request_id] = computed
        self._next_step = keyframe.step

    def follow(self, record: StepRecord) -> None:
        """Check the next record and attach its block tables.

        Raises:
            TraceError: The record does not follow from those before it.
        """
        if self._next_step is not None and record.step != self._next_step:
            raise TraceError(f"step {record.step} follows step {self._next_step - 1}: steps must be contiguous")
        self._next_step = record.step + 1
        self._check_names(record)
        self._check_block_ids("cached_block_ids", record.cached_block_ids)
        for block_ids in record.unscheduled_block_ids.values():
            self._check_block_ids("unscheduled_block_ids", block_ids)
        tables, computed = self._tables, self._computed
        for request_id in (*record.aborted, *record.preempted):
            tables.pop(request_id, None)
        for request_id in (*record.admitted, *record.resumed):
            if request_id in tables:
                raise TraceError(f"request {_short(request_id)} is admitted in step {record.step} but runs already")
            tables[request_id] = []
            computed.pop(request_id, None)
        scheduled = []
        num_tokens = 0
        for chunk in record.chunks:
            request_id = chunk.request_id
            table = tables.get(request_id)
            if table is None:
                raise TraceError(f"request {_short(request_id)} is scheduled in step {record.step} but not admitted")
            if chunk.new_block_ids:
                self._check_block_ids("new_block_ids", chunk.new_block_ids)
                table.extend(chunk.new_block_ids)
            end = chunk.start + chunk.num_tokens
            if chunk.start > computed.get(request_id, MAX_TOKENS):
                raise TraceError(
                    f"request {_short(request_id)} in step {record.step} starts at {chunk.start}, "
                    f"computed so far are {computed[request_id]} tokens"
                )
            if end > len(table) * self.block_size or chunk.num_cached_tokens > chunk.start:
                raise TraceError(self._misfit(record.step, chunk, len(table)))
            computed[request_id] = end
            num_tokens += chunk.num_tokens
            scheduled.append(table)
        if record.chunks:
            if len({chunk.request_id for chunk in record.chunks}) != len(record.chunks):
                raise TraceError(f"step {record.step} schedules a request twice")
            if num_tokens > (record.token_budget or MAX_TOKENS):
                raise TraceError(
                    f"step {record.step} schedules {num_tokens} tokens, its token_budget is {record.token_budget}"
                )
            if record.kernel is not None:
                self._check_work_items(record, num_tokens)
        if max(record.free_blocks, record.free_blocks_end) >= self.num_blocks:
            raise TraceError(f"step {record.step} has more free blocks than the pool's {self.num_blocks - 1}")
        record.attach_block_tables(self.block_size, scheduled)
        for request_id in record.finished:
            tables.pop(request_id, None)

    def _check_names(self, record: StepRecord) -> None:
        known = self._requests
        for field in ("arrived", "admitted", "resumed", "preempted", "finished", "aborted", "running", "waiting"):
            names = getattr(record, field)
            if names and not known.issuperset(names):
                unknown = next(name for name in names if name not in known)
                raise TraceError(f"{field} of step {record.step} names {_short(unknown)}, which has no request line")

    def _check_block_ids(self, field: str, ids: tuple[int, ...]) -> None:
        if ids and max(ids) >= self.num_blocks:
            raise TraceError(f"{field} holds block {max(ids)}, the pool has blocks 0 to {self.num_blocks - 1}")

    def _misfit(self, step: int, chunk: Any, num_blocks: int) -> str:
        who = f"request {_short(chunk.request_id)} in step {step}"
        if chunk.num_cached_tokens > chunk.start:
            return f"{who} has {chunk.num_cached_tokens} cached tokens but starts at {chunk.start}"
        return (
            f"{who} computes tokens [{chunk.start}, {chunk.end}), its {num_blocks} blocks hold "
            f"{num_blocks * self.block_size}"
        )

    @staticmethod
    def _check_work_items(record: StepRecord, num_tokens: int) -> None:
        ends = [chunk.start + chunk.num_tokens for chunk in record.chunks]
        for item in record.kernel.work_items:
            if (
                item.seq >= len(ends)
                or item.q_start + item.num_rows > num_tokens
                or not item.kv_start <= item.kv_end <= ends[item.seq]
                or item.split >= item.num_splits
            ):
                raise TraceError(f"work item {item} does not fit the chunks of step {record.step}")
