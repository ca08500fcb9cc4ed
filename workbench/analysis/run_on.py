"""The scheduler in the state at the end of a trace, and what becomes of it: progress, or a repeated state.

A trace holds all that schedules: block tables, the free queue, the content of cached blocks, queues and progress. So
the scheduler can be put where the recorded one was, under the recorded configuration or a changed one, and run on.
Block ids are names: two states that differ in them alone are the same state, and a scheduler that comes to one twice
stays in the circle forever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.analysis.fork import recorded_config
from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.outputs import expect_drafts
from workbench.scheduler.request import FinishReason, Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.workload import made_up_token
from workbench.trace import Trace
from workbench.trace.readings.block_replay import BlockReplay
from workbench.trace.readings.contents import Contents
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.reasons import Reason
from workbench.trace.records import Chunk

Place = tuple[str, int, int]
"""A place in a block table: request, KV cache group, index."""


class LastState:
    """The state of a trace's scheduler after its last step.

    Args:
        trace: The trace; its configuration has ``num_blocks``.

    Attributes:
        config: The recorded configuration.
        running: Unfinished running requests in the order of their admission.
        waiting: Waiting requests in queue order; those that arrived since the last step are the last.
        num_lost_blocks: Blocks that are neither free nor in a block table of the record: a transfer may hold them.

    Raises:
        ValueError: The configuration is not one that EngineConfig accepts, or has no ``num_blocks``.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.contents = Contents(trace)
        self.config = recorded_config(trace)
        if trace.num_blocks is None:
            raise ValueError("the trace's config has no num_blocks: the state of its scheduler cannot be rebuilt")
        self._chunks: dict[str, Chunk] = {}
        self._outputs: dict[str, list[int]] = {}
        self._origins: dict[int, Place] = {}
        self._was_admitted: set[str] = set()
        self._requests: dict[str, Request] = {}  # as they are, with the hashes of their blocks
        self._hashing: tuple[object, ...] = ()
        self._outputs_before = outputs_before(trace)
        self._replay = replay = BlockReplay.at_start_of(trace)
        for request_id, table in replay.tables.items():
            self._note_origins(request_id, 0, 0, table)
        ended: set[str] = set()
        for record in trace:
            replay.schedule(record)
            for chunk in record.chunks:
                if chunk.new_block_ids or chunk.other_groups:
                    self._note_blocks(chunk)
            replay.finish(record)
            ended.update(record.finished, record.aborted)
        last = trace[-1] if len(trace) else None
        running, waiting = (last.running, last.waiting) if last is not None else ((), ())
        self.running = [request_id for request_id in running if request_id not in ended]
        known = {*self.running, *waiting}
        later = [request_id for request_id in trace.requests if request_id not in known and request_id not in ended]
        self.waiting = [request_id for request_id in (*waiting, *later) if request_id not in ended]
        owners = {self._origins[block][0] for block in replay.cached if block in self._origins}
        self._note_chunks({*self.running, *self.waiting, *owners})
        held = set(replay.holders)
        self._lost = [block for block in range(1, trace.num_blocks) if block not in replay.free and block not in held]
        self.num_lost_blocks = len(self._lost)

    def _note_chunks(self, request_ids: Collection[str]) -> None:
        """Note the outputs of these requests, and their last chunks since a preemption."""
        for record in self.trace:
            for request_id in record.preempted:
                self._chunks.pop(request_id, None)
            for chunk in record.chunks:
                if (request_id := chunk.request_id) in request_ids:
                    self._chunks[request_id] = chunk
                    self._was_admitted.add(request_id)
                    if chunk.sampled is not None:
                        self._outputs.setdefault(request_id, []).extend(chunk.accepted)

    def _note_blocks(self, chunk: Chunk) -> None:
        request_id, replay = chunk.request_id, self._replay
        for group, blocks in enumerate((chunk.new_block_ids, *[change.new_block_ids for change in chunk.other_groups])):
            table = replay.other_tables[request_id][group - 1] if group else replay.tables[request_id]
            self._note_origins(request_id, group, len(table) - len(blocks), blocks)

    def _note_origins(self, request_id: str, group: int, first: int, blocks: Sequence[int]) -> None:
        # Also those of a hit: without token ids only the request's own made-up tokens find the block again.
        self._origins.update({block: (request_id, group, place) for place, block in enumerate(blocks, first) if block})

    def num_computed(self, request_id: str) -> int:
        """KV progress of a running request, without rejected drafts."""
        chunk = self._chunks.get(request_id)
        if chunk is None:
            return self._replay.num_computed.get(request_id, 0)
        is_verified = chunk.drafts and chunk.sampled is not None
        return chunk.end - (len(chunk.drafts) - chunk.num_accepted if is_verified else 0)

    def _request(self, request_id: str) -> Request:
        """A request as it is, to be copied before it changes."""
        if (known := self._requests.get(request_id)) is not None:
            return known
        request = self._requests[request_id] = self._made(request_id)
        return request

    def _made(self, request_id: str) -> Request:
        """A request with its known tokens; made-up ones if the trace has none."""
        info = self.trace.requests[request_id]
        prompt = self.contents.prompt(info)
        sampling = SamplingParams(max_tokens=max(1, info.max_tokens))
        request = Request(
            request_id,
            prompt,
            sampling,
            priority=info.priority,
            arrival_time=info.arrival_time,
            arrival_step=info.arrival_step,
            cache_salt=info.cache_salt,
            adapter=info.adapter,
        )
        request.token_ids += [0] * self._num_before(request_id)
        outputs: Sequence[int] = self._outputs.get(request_id, ())
        if not info.prompt_token_ids:
            outputs = self.contents.tokens(request_id, request.num_tokens, request.num_tokens + len(outputs))
        request.token_ids += outputs
        return request

    def _num_before(self, request_id: str) -> int:
        """Number of output tokens before the trace, which are not in it; of a running request its progress tells it."""
        keyframe, before = self.trace.keyframe, self._outputs_before.get(request_id)
        if before is None and keyframe is not None and request_id in keyframe.num_kv_computed:
            chunk, num_prompt_tokens = self._chunks.get(request_id), self.trace.requests[request_id].num_prompt_tokens
            known = num_prompt_tokens + len(self._outputs.get(request_id, ()))
            return max(0, self.num_computed(request_id) + (chunk is not None and chunk.arm == "decode") - known)
        return before or 0

    def scheduler(
        self,
        config: EngineConfig | None = None,
        *,
        without: Collection[str] = (),
        frees_lost: bool = False,
        restarted: bool = False,
        as_vllm: bool = True,
    ) -> Scheduler:
        """A scheduler in this state.

        Args:
            config: Another configuration, with the same KV cache groups and no fewer blocks; None for the recorded.
            without: Waiting requests to leave out.
            frees_lost: Give the blocks back that nobody is recorded to hold.
            restarted: Let all requests wait, in the order that they have, before an empty pool.
            as_vllm: Let requests wait forever where vLLM 0.33.0 does.
        """
        config = config or self.config
        scheduler = Scheduler(config, clock=lambda: 0.0, as_vllm=as_vllm)
        scheduler.step = self.trace[-1].step + 1 if len(self.trace) else 0
        replay, queues, kv_cache = self._replay, scheduler.queues, scheduler.kv_cache
        num_groups = len(kv_cache.groups)
        hashing = (config.cache_groups, config.speculation.num_hash_lookahead_tokens)
        if hashing != self._hashing:
            self._requests, self._hashing = {}, hashing

        def request_of(request_id: str) -> Request:
            request = self._request(request_id).copy()
            request.token_ids, request.block_hashes = request.token_ids.copy(), request.block_hashes.copy()
            kv_cache.begin_tables(request)
            queues.requests[request_id] = request
            scheduler.prepare_for(request)
            return request

        for request_id in () if restarted else self.running:
            request = request_of(request_id)
            tables = [replay.tables.get(request_id, []), *replay.other_tables.get(request_id, [])]
            request.block_tables = [list(table) for table in tables] or request.block_tables
            request.num_kv_computed = self.num_computed(request_id)
            chunk = self._chunks.get(request_id)
            request.is_prefill = chunk is None or chunk.is_partial_prefill
            request.status = "running"
            for group, table in zip(kv_cache.groups, request.block_tables):
                request.num_cached_blocks[group.index] = min(len(table), request.num_kv_computed // group.block_size)
                zeros = next((place for place, block in enumerate(table) if block), len(table))
                request.num_removed_blocks[group.index] = zeros
            if kv_cache.rests_inside_blocks:
                request.block_boundary = len(request.block_tables[0]) * kv_cache.block_size
            if config.num_speculative_tokens and not request.is_prefill:
                expect_drafts(request, (-1,) * config.num_speculative_tokens)
            queues.running.append(request)
        for request_id in (*self.running, *self.waiting) if restarted else self.waiting:
            if request_id not in without:
                request = request_of(request_id)
                request.status = "preempted" if request_id in self._was_admitted else "waiting"
                queues.waiting.append(request)
        if restarted:
            return scheduler
        held = [block for request_id in replay.tables for block in replay.held(request_id)]
        free = [
            *replay.free,
            *(self._lost if frees_lost else ()),
            *range(self.config.num_pool_blocks, config.num_pool_blocks),
        ]
        origins = {
            block: (self._request(origin[0]), *origin[1:])
            for block in sorted(replay.cached)
            if (origin := self._origins.get(block)) is not None and origin[1] < num_groups
        }
        kv_cache.restore(held, free, origins)
        return scheduler


@dataclass(frozen=True)
class Outcome:
    """The end of a scheduler that ran on.

    Attributes:
        kind: "ends" if every request ended, "repeats" if a state came back, "dies" if vLLM's engine ends with an
            assertion, "open" if time was up before.
        num_steps: Number of steps that it ran.
        period: After how many steps the state came back; 0 if it did not.
        ended: Requests that ended.
        running: Those that still run.
        reasons: Those that still wait, with their reasons in the last step, in queue order.
        error: The assertion.
    """

    kind: Literal["ends", "repeats", "dies", "open"]
    num_steps: int
    period: int = 0
    ended: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    reasons: Mapping[str, Reason] | None = None
    error: str = ""


def run_on(scheduler: Scheduler, *, ends_early: bool, seconds: float) -> Outcome:
    """Run a scheduler to the end of its requests, or to a state that it has been in.

    Args:
        scheduler: The scheduler; it is used up.
        ends_early: Let every request end with its next token instead of at its ``max_tokens``.
        seconds: Processor time to give up after.
    """
    deadline = time.thread_time() + seconds
    depth = 2 if scheduler.config.async_scheduling else 1
    drafts = (-1,) * scheduler.config.num_speculative_tokens
    in_flight: deque[ScheduledBatch] = deque()
    seen: dict[Any, tuple[Any, int]] = {}
    ended: list[str] = []
    first, batch, kind, period, error = scheduler.step, None, "ends", 0, ""
    while scheduler.has_unfinished_requests():
        rough = _rough_key(scheduler)
        if rough in seen:  # only then is the whole state of interest
            before, step = seen[rough]
            key = _key(scheduler, in_flight)
            if key == before:
                kind, period = "repeats", scheduler.step - step
                break
            seen[rough] = key, scheduler.step
        else:
            seen[rough] = None, scheduler.step
        if time.thread_time() > deadline:
            kind = "open"
            break
        try:
            batch = scheduler.schedule()
        except RuntimeError as assertion:
            kind, error = "dies", str(assertion)
            break
        in_flight.append(batch)
        if len(in_flight) < depth:
            continue
        done = in_flight.popleft()
        sampled = [made_up_token(c.request_id) if c.samples else None for c in done.chunks]
        finish: dict[str, FinishReason] = {}
        if ends_early:
            finish = {c.request_id: "stop" for c in done.chunks if c.samples and c.request.status != "finished"}
        scheduler.update(done, sampled, finish=finish)
        gone = [c.request_id for c in done.chunks if c.request.status == "finished"]
        if gone or any(token is not None for token in sampled):
            seen.clear()  # that is progress: no state before it comes back
        ended += gone
        if drafts and depth == 1:
            scheduler.set_drafts({c.request_id: drafts for c in done.chunks if c.samples})
    reasons: dict[str, Reason] = {}
    if batch is not None and kind != "ends":
        reasons = dict(batch.to_record().not_scheduled)
    return Outcome(
        kind,  # type: ignore[arg-type]
        scheduler.step - first,
        period,
        tuple(dict.fromkeys(ended)),
        tuple([request.request_id for request in scheduler.running if request.status == "running"]),
        reasons,
        error,
    )


def _rough_key(scheduler: Scheduler) -> Any:
    """A part of the state that differs between most states."""
    running = tuple([(request.request_id, request.num_kv_computed) for request in scheduler.running])
    return running, scheduler.num_waiting, scheduler.num_free_blocks


def _key(scheduler: Scheduler, in_flight: Sequence[ScheduledBatch]) -> Any:
    """A state without the names of its blocks."""
    names: dict[int, int] = {}
    requests = []
    for request in (*scheduler.running, *scheduler.waiting):
        tables = tuple([tuple([names.setdefault(b, len(names)) if b else -1 for b in t]) for t in request.block_tables])
        requests.append(
            (
                request.request_id,
                request.status,
                request.num_kv_computed,
                request.num_tokens,
                request.is_prefill,
                len(request.draft_token_ids),
                request.num_output_placeholders,
                request.num_in_flight_tokens,
                request.num_stale_output_tokens,
                request.shared_prefix_boundary,
                tables,
            )
        )
    pool = scheduler.kv_cache.block_pool
    content = tuple([pool.hash_of(block) for block in (*names, *pool.free_queue)])
    flying = tuple([tuple([(c.request_id, c.start, c.num_tokens) for c in batch.chunks]) for batch in in_flight])
    return tuple(requests), content, flying
