"""What runs inside the engine's process: a few microseconds a step, and never an exception."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from time import perf_counter
from typing import Any

from workbench.integrations.recorder.messages import (
    Admission,
    Arrival,
    End,
    Message,
    Packet,
    Preemption,
    Schedule,
    Setup,
    Update,
)
from workbench.integrations.recorder.writer_process import WriterProcess

QUEUE_STEPS = 128
"""Steps after which the engine's own queues are sent: an engine may know ways between them that have no message,
such as a request's wait for KV from another machine."""


SEND_SECONDS = 0.1
"""Messages are collected for this long while the engine is busy: a system call costs more than a step's message."""


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Whatever goes wrong ends the recording; the engine does not notice."""

    @functools.wraps(method)
    def guarded(self: SchedulerRecorder, *args: Any) -> None:
        if self.writer is not None:
            try:
                method(self, *args)
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
        self._messages: list[Message] = []
        """Since the last step was scheduled; encoded together when the next one is."""
        self._packet = Packet()
        self._sent_at = 0.0
        self._num_steps = 0
        self._last_ids: list[str] = []
        self._last_num_tokens = 0
        """Who else but the admitted was scheduled in the last step, in order (a copy), and the tokens of that step."""
        self._in_flight: dict[int, int] = {}
        """Steps whose output is still to come, by the id() of their SchedulerOutput, which lives as long."""
        self._wall_start, self._start = time.time(), perf_counter()
        self._has_news = False
        self._reasons: dict[Any, str] = {}
        """Why a request ended, by its final status: vLLM takes a while to say it."""
        self.in_schedule = self.in_update = False
        self.writer: WriterProcess | None = None
        try:
            setup = make_setup()
            self._token_ids = setup.settings.token_ids
            self._num_free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
            self._group = setup.kv_cache_group
            self._has_tokens = self._token_ids or bool(getattr(scheduler, "num_spec_tokens", 0))
            self._messages.append(setup)
            self.writer = WriterProcess()
            log.info("recording to %s/%s-*", setup.settings.folder, setup.file_prefix)
        except Exception as problem:
            self._stop(problem)

    # -- what happens to requests ----------------------------------------------------------------------------

    @_never_raises
    def request_added(self, request: Any) -> None:
        """A request has joined the waiting queue."""
        self._has_news = True
        self._messages.append(
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
        status = request.status
        if status not in self._reasons:
            self._reasons[status] = str(request.get_finished_reason())
        self._messages.append(End(request.request_id, self._reasons[status], self.in_update))
        if not self.in_update:  # else the record of a step that was scheduled already tells it
            self._has_news = True

    @_never_raises
    def request_preempted(self, request: Any) -> None:
        """A request is about to lose its blocks."""
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._group]
        reason = "the KV blocks ran out" if self.in_schedule else "the prefix cache was reset"
        self._has_news = True
        self._messages.append(Preemption(request.request_id, blocks, reason))

    # -- steps -----------------------------------------------------------------------------------------------

    def scheduled(self, output: Any, started: float) -> None:
        """A step was scheduled just now.

        Args:
            output: The SchedulerOutput.
            started: When ``schedule`` was called, by ``time.perf_counter``.
        """
        ended = perf_counter()
        if self.writer is None:  # it may have stopped during the step
            return
        try:
            num_scheduled_tokens = output.num_scheduled_tokens
            if not num_scheduled_tokens and not self._has_news:
                return  # an engine that waits for something asks again and again
            self._has_news = False
            cached, step = output.scheduled_cached_reqs, self._num_steps
            request_ids, num_tokens = cached.req_ids, output.total_num_scheduled_tokens
            if output.scheduled_new_reqs or cached.resumed_req_ids:
                admissions, num_computed_tokens, new_block_ids = self._admissions(output.scheduled_new_reqs, cached)
                is_like_last = False
            else:
                admissions, num_computed_tokens, new_block_ids = (), cached.num_computed_tokens, cached.new_block_ids
                # A token each, then and now, in the same order.
                is_like_last = num_tokens == self._last_num_tokens == len(request_ids) and request_ids == self._last_ids
            if not is_like_last:
                self._last_ids, self._last_num_tokens = request_ids.copy(), num_tokens
            message = Schedule(
                step,
                started - self._start,
                ended - started,
                None if is_like_last else num_scheduled_tokens,
                admissions,
                num_computed_tokens,
                new_block_ids,
                self._num_free_blocks(),
            )
            if step % QUEUE_STEPS == QUEUE_STEPS - 1:
                message.running, message.waiting = self._queues()
            # Encoded at once: the workers may be of this process, and add to these very lists.
            messages = self._messages
            messages.append(message)
            self._packet.add(messages)
            messages.clear()
            self._in_flight[id(output)] = step
            self._num_steps = step + 1
        except Exception as problem:
            self._stop(problem)

    def _admissions(self, new_requests: list[Any], cached: Any) -> tuple[list[Admission], list[int], list[Any]]:
        """Who was admitted, and the progress and new blocks of the others."""
        group, requests = self._group, self._scheduler.requests
        admissions = [
            Admission(new.req_id, new.num_computed_tokens, requests[new.req_id].num_tokens, new.block_ids[group])
            for new in new_requests
        ]
        num_computed_tokens, new_block_ids = [], []
        for request_id, start, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids):
            if request_id in cached.resumed_req_ids:
                admissions.append(Admission(request_id, start, requests[request_id].num_tokens, blocks[group]))
            else:
                num_computed_tokens.append(start)
                new_block_ids.append(blocks)
        return admissions, num_computed_tokens, new_block_ids

    def _queues(self) -> tuple[list[str], list[str]]:
        scheduler = self._scheduler
        waiting = [*getattr(scheduler, "kv_holding_waiting", ()), *scheduler.waiting]
        return [request.request_id for request in scheduler.running], [request.request_id for request in waiting]

    def updated(self, scheduler_output: Any, model_runner_output: Any, started: float) -> None:
        """The output of a step was processed just now.

        Args:
            scheduler_output: What ``scheduled`` was given for the step.
            model_runner_output: The ModelRunnerOutput.
            started: When ``update_from_output`` was called, by ``time.perf_counter``.
        """
        ended = perf_counter()
        if self.writer is None:
            return
        try:
            step = self._in_flight.pop(id(scheduler_output), None)
            if step is None:
                return
            message = Update(step, started - self._start, ended - started, self._num_free_blocks())
            if self._has_tokens:
                message.request_ids = model_runner_output.req_ids
                # Cut where a request has ended: the engine does it in these very lists.
                given = model_runner_output.sampled_token_ids
                message.token_ids = given if self._token_ids else [[0] * len(tokens) for tokens in given]
            self._messages.append(message)
            if ended - self._sent_at > SEND_SECONDS or not self._scheduler.running:
                self._sent_at = ended
                self._send()
        except Exception as problem:
            self._stop(problem)

    def _send(self) -> None:
        self._packet.add(self._messages)
        self._messages.clear()
        self.writer.send(self._packet.take())

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
