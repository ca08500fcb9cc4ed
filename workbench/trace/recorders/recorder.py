"""The recorder's part in the engine's process: it takes a few microseconds per step and never raises."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from workbench.trace.recorders.messages import (
    Admission,
    Arrival,
    End,
    Message,
    Packet,
    Pause,
    Preemption,
    Schedule,
    Setup,
    Update,
)
from workbench.trace.recorders.pool_watch import PoolWatch
from workbench.trace.recorders.profile_marks import ProfileMarks
from workbench.trace.recorders.tables import TableWatch
from workbench.trace.recorders.writer_process import WriterProcess
from workbench.trace.step_marks import OUTPUT, SCHEDULED

SEND_SECONDS = 0.1
"""Time between two sends while the engine is busy: a system call costs more than a step's message."""

PAUSE_SECONDS = 0.005
"""Garbage collections that take longer are recorded."""

QUEUE_SENDS = 8
"""Number of sends after which the engine's queues are recorded: requests may move between them in ways that have no
message, such as a wait for KV from another machine."""


def never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """End the recording on any exception, so that none reaches the engine."""

    @functools.wraps(method)
    def guarded(self: StepSender, *args: Any) -> None:
        if self.writer is not None:
            try:
                method(self, *args)
            except Exception as problem:
                self.stop(problem)

    return guarded


class StepSender:
    """Collects messages and sends them to the writer's process; the part of a recorder that is the same for any engine.

    Args:
        log: Receives one line when the recording begins, and one with the reason if it fails.

    Attributes:
        writer: The writer's process; None before and after the recording.
        messages: Messages that are not encoded yet, in order.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.messages: list[Message | tuple[Any, ...]] = []
        self._packet = Packet()
        self._send_at = 0.0
        self._num_sends = 0
        self._pauses, self._collecting_since = list[Pause](), 0.0
        self.writer: WriterProcess | None = None

    def _begin(self, setup: Setup) -> None:
        self.messages.append(setup)
        self.writer = WriterProcess()
        self._send()  # the writer makes the folder and the file now, before the first request
        self._num_sends = 0
        gc.callbacks.append(self._collected)
        self._log.info("recording to %s/%s-*", setup.settings.folder, setup.file_prefix)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        """Garbage is collected, or was, on any thread."""
        now = perf_counter()
        if phase == "start":
            self._collecting_since = now
        elif now - self._collecting_since > PAUSE_SECONDS:
            self._pauses.append(Pause(self._collecting_since, now))  # not to messages, which may be being encoded

    def _take_pauses(self) -> None:
        if self._pauses:
            self.messages += self._pauses
            self._pauses.clear()

    def _encode(self) -> None:
        """Encode the messages now: the lists in them belong to the engine and may change."""
        self._packet.add(self.messages)
        self.messages.clear()

    def _send(self) -> None:
        assert self.writer is not None  # see never_raises
        self._encode()
        self.writer.send(self._packet.take())
        self._num_sends += 1

    def _send_in_time(self, now: float, *, is_idle: bool) -> None:
        if now > self._send_at or is_idle:
            self._send_at = now + SEND_SECONDS
            self._send()

    @never_raises
    def close(self) -> None:
        """End the recording: everything is in the files when this returns."""
        self._send()
        writer = self._let_go()
        assert writer is not None  # see never_raises
        try:
            writer.close()
            self._log.info("the recording is complete")
        except Exception as problem:
            self._log.warning("the recording did not end properly: %s", problem)

    def _let_go(self) -> WriterProcess | None:
        """Remove the writer; without it every message ends in a guarded method, which then does nothing."""
        writer, self.writer = self.writer, None
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collected)
        self.messages.clear()
        return writer

    def stop(self, problem: Exception) -> None:
        """End the recording after a problem, with one warning."""
        writer = self._let_go()
        reason = str(problem) or type(problem).__name__
        self._log.warning("the recording has ended: %s. The server continues without a recording.", reason)
        if writer is not None:
            try:
                writer.close(wait=False)
            except Exception as again:
                self._log.debug("closing the writer: %s", again)


class SchedulerRecorder(StepSender):
    """Records the steps of a scheduler that has the interface of vLLM's V1 scheduler.

    The caller appends the most common messages to ``messages`` itself, as tuples that encode like the classes:

    - the Schedule of a step that gives the requests of ``last_ids`` one token each, ``last_num_requests`` in all,
    - the Update of a step with tokens, if it ends before ``quiet_until``,
    - before each of them the PoolNews that ``take_pool_news`` returns, if there are any.

    It counts each Schedule in ``num_steps``, and calls ``mark_scheduled`` and ``mark_output`` while a profiler runs.

    Args:
        scheduler: The scheduler; its queues, requests and KV cache manager are read, never changed.
        make_setup: Makes the first message. If it raises, nothing is recorded.
        log: Receives one line when the recording begins, and one with the reason if it fails.

    Attributes:
        last_ids: A copy of the requests of the last step, in order; None if the next step needs more than a message.
        last_num_requests: Number of these requests.
        quiet_until: Time (``time.perf_counter``) until which an Update needs no more than a message.
        num_free_blocks: Returns the number of free KV blocks.
        take_pool_news: Returns what the block pool did since the last call as a message; () for nothing.
        in_update: Whether the scheduler is in its ``update_from_output``; set by the caller.
        in_reset: Whether the scheduler is in its ``reset_prefix_cache``.
        num_steps: Number of steps so far; a step has the same number in the recording.
        profiler: Its ``_is_profiler_enabled`` says whether steps are marked in a profile.
    """

    def __init__(self, scheduler: Any, make_setup: Callable[[], Setup], log: logging.Logger) -> None:
        super().__init__(log)
        self._scheduler = scheduler
        self.last_ids: list[str] | None = None
        self.last_num_requests = 0
        self._still_scheduled: dict[str, None] = {}
        """Requests of the last step that have not ended or been preempted since, as the writer knows them too."""
        self.quiet_until = 0.0
        self._has_news = False
        self._output_to_come = False
        """Whether the next step is scheduled before the output of the one before it is there."""
        self._empty_steps: set[int] = set()
        """Recorded steps without tokens that have no output yet, by the id() of their SchedulerOutput."""
        self._tables: TableWatch | None = None
        self._pool: PoolWatch | None = None
        self.take_pool_news: Callable[[], Any] = tuple
        self._reasons: dict[Any, str] = {}
        """Reasons of ended requests by their final status: vLLM takes a while to look one up."""
        self.in_update = self.in_reset = False
        self.num_steps = 0
        self._marks = ProfileMarks()
        self.profiler = self._marks.switch
        self._marked: dict[int, int] = {}
        """Marked steps that have no output yet, by the id() of their SchedulerOutput."""
        try:
            setup = make_setup()
            self._created = setup.created
            self._token_ids = setup.settings.token_ids
            self._hashes = setup.settings.hashes
            self.num_free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
            self._group = setup.kv_cache_group
            self._is_async = bool(setup.config.get("async_scheduling"))
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers if setup.records_all_groups else ()
            self._tables = TableWatch(managers) if managers else None
            self._watch_pool(scheduler.kv_cache_manager.block_pool)
            setup.watches_pool = self._pool is not None
            self._has_tokens = self._token_ids or bool(getattr(scheduler, "num_spec_tokens", 0))
            self._begin(setup)
        except Exception as problem:
            self.stop(problem)

    def _watch_pool(self, pool: Any) -> None:
        try:
            self._pool = PoolWatch(pool)
        except AttributeError as problem:
            self._log.info("this vLLM's block pool cannot be watched, records say so: %s", problem)
        else:
            self.take_pool_news = self._pool.take

    def reset(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``reset_prefix_cache`` of the scheduler."""
        pool = self._pool
        cached = pool.cached_blocks() if pool is not None else []
        self.in_reset = True
        try:
            return method(*args, **kwargs)
        finally:
            self.in_reset = False
            if pool is not None:
                pool.was_reset(cached)

    # -- what happens to requests ----------------------------------------------------------------------------

    @never_raises
    def request_added(self, request: Any) -> None:
        """A request has joined the waiting queue."""
        self._record_next_step()
        self.messages.append(
            Arrival(
                request.request_id,
                request.num_prompt_tokens,
                request.max_tokens,
                request.priority,
                request.arrival_time - self._created,
                request.arrival_time,
                request.prompt_token_ids or [] if self._token_ids or self._hashes else [],
                getattr(request, "cache_salt", None) or "",
                *(_content_of(request) if self._hashes else ()),
            )
        )

    @never_raises
    def request_ended(self, request: Any) -> None:
        """A request has its final status and is about to give its blocks back."""
        status = request.status
        if status not in self._reasons:
            self._reasons[status] = str(request.get_finished_reason())
        if self._tables is not None:
            self._tables.forget(request.request_id)
        self._still_scheduled.pop(request.request_id, None)
        output = list(request.output_token_ids) if self._hashes else []
        self.messages.append(End(request.request_id, self._reasons[status], self.in_update, output))
        if self.in_update:
            self.quiet_until = 0.0  # it may have been the last request
        else:  # steps that are already scheduled do not contain it
            self._record_next_step()

    @never_raises
    def request_preempted(self, request: Any) -> None:
        """A request is about to lose its blocks."""
        tables = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        self._record_next_step()
        self._still_scheduled.pop(request.request_id, None)
        others = []
        if self._tables is not None:
            self._tables.forget(request.request_id)
            others = list(tables[1:])
        self.messages.append(Preemption(request.request_id, tables[self._group], self.in_reset, others))

    def _record_next_step(self) -> None:
        """Record the next step even if nothing is scheduled in it."""
        self._has_news, self.last_ids = True, None

    # -- steps -----------------------------------------------------------------------------------------------

    @never_raises
    def scheduled(self, output: Any, started: float, ended: float) -> None:
        """A step was scheduled.

        Args:
            output: The SchedulerOutput.
            started: Time of the call of ``schedule``, by ``time.perf_counter``.
            ended: Time of its return.
        """
        if not output.num_scheduled_tokens:
            # An engine that waits for something schedules again and again. The first time may be an iteration that
            # only takes in the output of the step before it.
            is_needless = not (self._has_news or self._output_to_come)
            self._output_to_come, self.last_ids = False, None
            if is_needless:
                return
            self._empty_steps.add(id(output))
        else:
            self._output_to_come = self._is_async
        self.num_steps += 1
        if self.profiler._is_profiler_enabled:
            self.mark_scheduled(output)
        if news := self.take_pool_news():
            self.messages.append(news)
        message, request_ids = self._schedule(output, started, ended), list(output.num_scheduled_tokens)
        self._has_news = False
        expected = [*self._still_scheduled, *[admission.request_id for admission in message.admissions]]
        if request_ids != expected:
            message.request_ids, self._still_scheduled = request_ids, dict.fromkeys(request_ids)
        elif message.admissions:
            self._still_scheduled = dict.fromkeys(expected)
        self.messages.append(message)
        self._encode()  # workers may run in this process and append to the block tables that admissions refer to
        if self._tables is None:  # otherwise a step may change tables without a word in its output
            self.last_ids, self.last_num_requests = request_ids or None, len(request_ids)

    @never_raises
    def mark_scheduled(self, output: Any) -> None:
        """Mark in a profile that the latest step was scheduled."""
        step = self.num_steps - 1
        if step - 1 not in self._marked.values():
            self._marked.clear()  # outputs that came while no profiler ran
        self._marked[id(output)] = step
        self._marks.mark(step, SCHEDULED)

    @never_raises
    def mark_output(self, output: Any) -> None:
        """Mark in a profile that the output of a step is about to be processed, if its scheduling is marked."""
        if (step := self._marked.pop(id(output), None)) is not None and self.profiler._is_profiler_enabled:
            self._marks.mark(step, OUTPUT)

    def _schedule(self, output: Any, started: float, ended: float) -> Schedule:
        """The message of any step."""
        group, requests, cached = self._group, self._scheduler.requests, output.scheduled_cached_reqs

        def admission(request_id: str, start: int, tables: Sequence[list[int]]) -> Admission:
            others: list[list[int]] = []
            if self._tables is not None:
                self._tables.admit(request_id, tables)
                others = list(tables[1:])
            return Admission(request_id, start, requests[request_id].num_tokens, tables[group], others)

        admissions = [
            admission(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs
        ]
        num_computed_tokens, new_block_ids = cached.num_computed_tokens, cached.new_block_ids
        if cached.resumed_req_ids:
            num_computed_tokens, new_block_ids = [], []
            for request_id, start, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids):
                if request_id in cached.resumed_req_ids:
                    admissions.append(admission(request_id, start, blocks))
                else:
                    num_computed_tokens.append(start)
                    new_block_ids.append(blocks)
        message = Schedule(
            id(output),
            started,
            ended,
            self.num_free_blocks(),
            None,
            num_computed_tokens,
            new_block_ids,
            list(output.num_scheduled_tokens.values()),
            admissions,
        )
        if self._tables is not None:
            admitted = {admission.request_id for admission in admissions}
            for request_id in output.num_scheduled_tokens:
                if request_id not in admitted and (changes := self._tables.changes(request_id)) is not None:
                    message.table_changes[request_id] = changes
        if drafts := getattr(output, "scheduled_spec_decode_tokens", None):
            message.drafts = drafts if self._token_ids else {rid: [-1] * len(ids) for rid, ids in drafts.items()}
        if self._num_sends >= QUEUE_SENDS:
            self._num_sends = 0
            message.running, message.waiting = self._queues()
        return message

    def _queues(self) -> tuple[list[str], list[str]]:
        scheduler = self._scheduler
        waiting = [*getattr(scheduler, "kv_holding_waiting", ()), *scheduler.waiting]
        return [request.request_id for request in scheduler.running], [request.request_id for request in waiting]

    def num_given(self, scheduler_output: Any, model_runner_output: Any) -> Sequence[int]:
        """Number of tokens that a step with drafts gave each request, before the engine cuts them; else empty."""
        if not getattr(scheduler_output, "scheduled_spec_decode_tokens", None):
            return ()
        try:
            return [len(tokens) for tokens in model_runner_output.sampled_token_ids]
        except Exception as problem:
            self.stop(problem)
            return ()

    @never_raises
    def updated(
        self,
        scheduler_output: Any,
        model_runner_output: Any,
        started: float,
        ended: float,
        num_given: Sequence[int] = (),
    ) -> None:
        """The output of a step was processed.

        Args:
            scheduler_output: The SchedulerOutput of the step.
            model_runner_output: The ModelRunnerOutput.
            started: Time of the call of ``update_from_output``, by ``time.perf_counter``.
            ended: Time of its return.
            num_given: From ``num_given()``, called before.
        """
        if not scheduler_output.total_num_scheduled_tokens:
            if id(scheduler_output) not in self._empty_steps:
                return
            self._empty_steps.remove(id(scheduler_output))
        self._take_pauses()
        if news := self.take_pool_news():
            self.messages.append(news)
        message = Update(id(scheduler_output), started, ended, self.num_free_blocks())
        if self._has_tokens:
            message.request_ids = model_runner_output.req_ids
            # The engine has already cut these lists at the end of a request.
            given = model_runner_output.sampled_token_ids
            message.token_ids = given if self._token_ids else [[0] * len(tokens) for tokens in given]
            message.num_given = list(num_given)
        self.messages.append(message)
        self._encode()  # the engine passes these token lists on, and they may change
        self._send_in_time(ended, is_idle=not self._scheduler.running)
        self.quiet_until = 0.0 if self._has_tokens else self._send_at

    def _send(self) -> None:
        super()._send()
        if self._num_sends >= QUEUE_SENDS:
            self.last_ids = None  # the next step records the queues

    def _let_go(self) -> WriterProcess | None:
        if self._pool is not None:
            self._pool.stop()
            self._pool, self.take_pool_news = None, tuple
        self.last_ids, self.quiet_until = None, 0.0
        return super()._let_go()


def _content_of(request: Any) -> tuple[str, list[tuple[str, int, int]]]:
    """A request's adapter and multimodal inputs, which are part of its blocks' hashes."""
    lora, inputs = getattr(request, "lora_request", None), getattr(request, "mm_features", None) or ()
    places = [(str(part.identifier), part.mm_position.offset, part.mm_position.length) for part in inputs]
    return getattr(lora, "lora_name", ""), places
