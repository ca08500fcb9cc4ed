"""What runs inside the engine's process: a few microseconds a step, and never an exception."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from workbench.integrations.recorder.messages import (
    Admission,
    Arrival,
    End,
    Message,
    Preemption,
    Schedule,
    Setup,
    Update,
    encode,
    pack,
)
from workbench.integrations.recorder.writer_process import WriterProcess

QUEUE_STEPS = 128
"""Steps after which the engine's own queues are sent: an engine may know ways between them that have no message,
such as a request's wait for KV from another machine."""


SEND_SECONDS = 0.05
"""Messages are collected for this long while the engine is busy: waking the writer costs more than a message."""

SEND_BYTES = 2**16
"""Steps of this size together are sent at once, while they are in the processor's cache."""


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Whatever goes wrong ends the recording; the engine does not notice."""

    @functools.wraps(method)
    def guarded(self: SchedulerRecorder, *args: Any, **kwargs: Any) -> None:
        if self.writer is not None:
            try:
                method(self, *args, **kwargs)
            except Exception as problem:
                self._stop(problem)

    return guarded


class SchedulerRecorder:
    """Records the steps of a scheduler that has the interface of vLLM's V1 scheduler.

    Args:
        scheduler: The scheduler; its queues, requests and KV cache manager are read, never changed.
        make_setup: Makes the first message. May raise: there is no recording then.
        log: Told once that the recording runs, and once why it does not any more.

    Attributes:
        writer: The writer's process; None when nothing is recorded, or not any more.
        in_schedule: The scheduler is in its ``schedule``; the caller says so.
        in_update: The scheduler is in its ``update_from_output``; the caller says so.
    """

    def __init__(self, scheduler: Any, make_setup: Callable[[], Setup], log: logging.Logger) -> None:
        self._scheduler = scheduler
        self._log = log
        self._messages: list[Message | msgspec.Raw] = []
        self._num_bytes = 0
        self._sent_at = 0.0
        self._num_steps = 0
        self._in_flight: dict[int, int] = {}
        """Steps whose output is still to come, by the id() of their SchedulerOutput, which lives as long."""
        self._wall_start, self._start = time.time(), time.perf_counter()
        self._has_news = False
        self.in_schedule = self.in_update = False
        self.writer: WriterProcess | None = None
        try:
            setup = make_setup()
            self._token_ids = setup.settings.token_ids
            self._block_pool = scheduler.kv_cache_manager.block_pool
            self._group = setup.kv_cache_group
            self._several_tokens = bool(getattr(scheduler, "num_spec_tokens", 0))
            self._messages.append(setup)
            self.writer = WriterProcess()
            log.info("recording to %s/%s-*", setup.settings.folder, setup.file_prefix)
        except Exception as problem:
            self._stop(problem)

    # -- what happens to requests ----------------------------------------------------------------------------

    @_never_raises
    def request_added(self, request: Any) -> None:
        """A request has joined the waiting queue."""
        self._note(
            Arrival(
                request.request_id,
                request.num_prompt_tokens,
                request.max_tokens,
                request.priority,
                request.arrival_time - self._wall_start,
                request.arrival_time,
                request.prompt_token_ids or [] if self._token_ids else [],
            )
        )

    @_never_raises
    def request_ended(self, request: Any) -> None:
        """A request has its final status and is about to give its blocks back."""
        had_news = self._has_news
        self._note(End(request.request_id, str(request.get_finished_reason()), self.in_update))
        if self.in_update:  # told by the record of a step that was scheduled already
            self._has_news = had_news

    @_never_raises
    def request_preempted(self, request: Any) -> None:
        """A request is about to lose its blocks."""
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._group]
        reason = "the KV blocks ran out" if self.in_schedule else "the prefix cache was reset"
        self._note(Preemption(request.request_id, blocks, reason))

    def _note(self, message: Message) -> None:
        self._has_news = True
        self._messages.append(message)

    # -- steps -----------------------------------------------------------------------------------------------

    def scheduled(self, output: Any, started: float, ended: float) -> None:
        """A step was scheduled.

        Args:
            output: The SchedulerOutput.
            started: When ``schedule`` was called, by ``time.perf_counter``.
            ended: When it returned.
        """
        try:
            if self.writer is not None:  # it may have stopped during the step
                self._scheduled(output, started, ended)
        except Exception as problem:
            self._stop(problem)

    def _scheduled(self, output: Any, started: float, ended: float) -> None:
        num_scheduled_tokens = output.num_scheduled_tokens
        if not num_scheduled_tokens and not self._has_news:
            return  # an engine that waits for something asks again and again
        self._has_news = False
        cached, group, step = output.scheduled_cached_reqs, self._group, self._num_steps
        scheduler = self._scheduler
        num_computed_tokens, new_block_ids = cached.num_computed_tokens, cached.new_block_ids
        admissions = [
            Admission(
                new.req_id, new.num_computed_tokens, scheduler.requests[new.req_id].num_tokens, new.block_ids[group]
            )
            for new in output.scheduled_new_reqs
        ]
        if cached.resumed_req_ids:
            num_computed_tokens, new_block_ids = num_computed_tokens.copy(), new_block_ids.copy()
            for index in reversed(range(len(cached.req_ids))):
                request_id = cached.req_ids[index]
                if request_id in cached.resumed_req_ids:
                    start, blocks = num_computed_tokens.pop(index), new_block_ids.pop(index)
                    num_tokens = scheduler.requests[request_id].num_tokens
                    admissions.append(Admission(request_id, start, num_tokens, blocks[group]))
        message = Schedule(
            step,
            started - self._start,
            ended - started,
            num_scheduled_tokens,
            admissions,
            num_computed_tokens,
            new_block_ids,
            self._block_pool.get_num_free_blocks(),
        )
        if step % QUEUE_STEPS == QUEUE_STEPS - 1:
            message.running, message.waiting = self._queues()
        # At once: the workers may be of this process, and add to these very lists.
        encoded = encode(message)
        self._messages.append(encoded)
        self._num_bytes += len(memoryview(encoded))
        self._in_flight[id(output)] = step
        self._num_steps = step + 1

    def _queues(self) -> tuple[list[str], list[str]]:
        scheduler = self._scheduler
        waiting = [*getattr(scheduler, "kv_holding_waiting", ()), *scheduler.waiting]
        return [request.request_id for request in scheduler.running], [request.request_id for request in waiting]

    def updated(self, scheduler_output: Any, model_runner_output: Any, started: float, ended: float) -> None:
        """The output of a step was processed.

        Args:
            scheduler_output: What ``scheduled`` was given for the step.
            model_runner_output: The ModelRunnerOutput.
            started: When ``update_from_output`` was called, by ``time.perf_counter``.
            ended: When it returned.
        """
        try:
            if self.writer is not None:
                self._updated(scheduler_output, model_runner_output, started, ended)
        except Exception as problem:
            self._stop(problem)

    def _updated(self, scheduler_output: Any, model_runner_output: Any, started: float, ended: float) -> None:
        step = self._in_flight.pop(id(scheduler_output), None)
        if step is None:
            return
        message = Update(step, started - self._start, ended - started, self._block_pool.get_num_free_blocks())
        if self._token_ids or self._several_tokens:
            message.request_ids = model_runner_output.req_ids
            # Cut where a request has ended: the engine does it in these very lists.
            given = model_runner_output.sampled_token_ids
            message.token_ids = given if self._token_ids else [[0] * len(tokens) for tokens in given]
        self._messages.append(message)
        is_due = ended - self._sent_at > SEND_SECONDS or self._num_bytes > SEND_BYTES
        if is_due or not self._scheduler.running:
            self._sent_at = ended
            self._send()

    def _send(self) -> None:
        self.writer.send(pack(self._messages))
        self._messages.clear()
        self._num_bytes = 0

    # -- the end ---------------------------------------------------------------------------------------------

    @_never_raises
    def close(self) -> None:
        """End the recording: everything is in the files when this returns."""
        self._send()
        writer, self.writer = self.writer, None
        try:
            writer.close()
            self._log.info("recorded %d steps", self._num_steps)
        except Exception as problem:
            self._log.warning("the recording could not be ended in order: %s", problem)

    def _stop(self, problem: Exception) -> None:
        """Give up, and say so once."""
        writer, self.writer = self.writer, None
        self._messages = []
        reason = str(problem) or type(problem).__name__
        self._log.warning("nothing is recorded any more: %s. The server goes on without a recording.", reason)
        if writer is not None:
            try:
                writer.close(wait=False)
            except Exception as again:
                self._log.debug("closing the writer: %s", again)
