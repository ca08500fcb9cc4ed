"""Between the server's event loop and the engine's thread.

The engine calls back on its own thread after every step; one message per step crosses to the event loop, however many
requests it is about. Requests go the other way through ``Engine.add_request`` and ``Engine.abort``, which may be
called from any thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.engine.config import SamplingParams
from workbench.engine.trace_window import keyframe_of
from workbench.serve.errors import ApiError, too_many_requests, unavailable
from workbench.serve.preparation import Preparation
from workbench.serve.prometheus import ServerMetrics
from workbench.serve.settings import ServeSettings
from workbench.serve.stream import Delta, Stream
from workbench.trace import Keyframe, RequestInfo, StepRecord

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.outputs import RequestOutput

log = logging.getLogger("workbench")

WATCH_SECONDS = 1.0
"""Time between two looks at whether the engine still runs while requests are open."""

StepListener = Callable[[StepRecord, list[RequestInfo]], None]
"""Called on the event loop with each step and the requests that arrived before it."""


class EngineBridge:
    """Starts, follows and ends requests of an engine for the event loop it is made on.

    Args:
        engine: The engine; the bridge keeps it running while requests are open.
        settings: Limits.
        loop: The server's event loop.
    """

    def __init__(self, engine: Engine, settings: ServeSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = ServerMetrics(engine)
        self.draining = False
        self.step_listeners: list[StepListener] = []
        self._loop = loop
        self._streams: dict[str, Stream] = {}
        self._preparing = 0
        self.preparation = Preparation(settings.prepare_seconds)
        self._last_step = -1
        self._remove_listener = engine.on_step(self._after_step)

    @property
    def limit(self) -> int:
        """Requests that may be open at once."""
        return self.engine.config.max_num_seqs + self.settings.max_queue

    @property
    def num_open(self) -> int:
        """Requests that run, wait or are being prepared."""
        return len(self._streams) + self._preparing

    async def submit(self, requests: list[tuple[str, Any, SamplingParams, int]]) -> list[Stream]:
        """Queue requests, all of them or none.

        Args:
            requests: For each its id, prompt (text, token ids or messages), sampling and priority.

        Raises:
            ApiError: The queue is full or too short, the server is ending, or a request is refused.
        """
        if self.draining:
            raise unavailable("the server is shutting down and takes no more requests")
        if len(requests) > self.limit:
            raise ApiError(400, f"{len(requests)} answers at once are more than the server's limit of {self.limit}")
        if self.num_open + len(requests) > self.limit:
            raise too_many_requests(self.limit)
        self._preparing += len(requests)
        streams: list[Stream] = []
        try:
            for request_id, prompt, sampling, priority in requests:
                stream = Stream(request_id, sampling)
                await self.preparation.run(lambda p=prompt, s=stream, n=priority: self._add(p, s, n))
                streams.append(stream)
        except BaseException:
            for stream in streams:
                self.abort(stream)
            raise
        finally:
            self._preparing -= len(requests)
        self.engine.start()
        return streams

    def _add(self, prompt: Any, stream: Stream, priority: int) -> None:
        """Hand a request to the engine; on the preparing thread. The stream is known before its first step."""
        self._streams[stream.request_id] = stream
        try:
            self.engine.add_request(prompt, stream.sampling, request_id=stream.request_id, priority=priority)
        except BaseException:
            self._streams.pop(stream.request_id, None)
            raise

    async def follow_steps(self, listener: StepListener) -> tuple[list[RequestInfo], Keyframe]:
        """Call a function with every step from now on, until it is taken from ``step_listeners``.

        Returns:
            What has to be known before the first of these steps: the requests that are open, and the KV blocks.
        """
        opening: asyncio.Future[tuple[list[RequestInfo], Keyframe]] = self._loop.create_future()

        def look() -> None:
            scheduler, requests = self.engine.scheduler, self.engine.trace.requests
            open_requests = [requests[name] for name in (*scheduler.running_ids(), *scheduler.waiting_ids())]
            self._loop.call_soon_threadsafe(begin, open_requests, keyframe_of(scheduler))

        def begin(open_requests: list[RequestInfo], keyframe: Keyframe) -> None:
            if not opening.cancelled():
                self.step_listeners.append(listener)
                opening.set_result((open_requests, keyframe))

        self.engine.before_step(look)
        self.engine.start()
        return await opening

    def abort(self, stream: Stream) -> None:
        """End a request whose client is gone, before the next step. A request that ended stays as it is."""
        if stream.request_id not in self._streams:
            return
        try:
            self.engine.abort(stream.request_id)
        except ValueError:  # it was never entered
            self._streams.pop(stream.request_id, None)
            return
        self.engine.start()

    # -- the engine's thread -----------------------------------------------------------------------------------

    def _after_step(self, record: StepRecord) -> None:
        try:
            requests = self.engine.trace.requests
            arrivals = [requests[request_id] for request_id in record.arrived]
            messages = self._messages(record, arrivals)
            for request_id in {*record.finished, *record.aborted}:
                self.engine.forget(request_id)
            self._loop.call_soon_threadsafe(self._deliver, record, arrivals, messages)
        except Exception:  # the engine goes on, whatever becomes of the server
            log.exception("step %d could not be delivered", record.step)

    def _messages(self, record: StepRecord, arrivals: list[RequestInfo]) -> list[tuple[Stream, Delta]]:
        for info in arrivals:
            if (stream := self._streams.get(info.request_id)) is not None:
                stream.num_prompt_tokens = info.num_prompt_tokens
        ended = dict.fromkeys(record.aborted, "abort") | dict(record.finish_reasons)
        messages = []
        for chunk in record.chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None or chunk.request_id in record.aborted:
                continue
            stream.num_cached_tokens = max(stream.num_cached_tokens, chunk.num_cached_tokens)
            reason = ended.pop(chunk.request_id, None)
            if chunk.sampled is not None or reason is not None:
                output = self._output_of(chunk.request_id)
                messages.append((stream, stream.advance(chunk.sampled, chunk.text, output, reason)))
        for request_id, reason in ended.items():
            if (stream := self._streams.get(request_id)) is not None:
                messages.append((stream, stream.advance(None, "", self._output_of(request_id), reason)))
        return messages

    def _output_of(self, request_id: str) -> Callable[[], RequestOutput]:
        return lambda: self.engine.output(request_id)

    # -- the event loop ----------------------------------------------------------------------------------------

    def _deliver(self, record: StepRecord, arrivals: list[RequestInfo], messages: list[tuple[Stream, Delta]]) -> None:
        self.metrics.add_step(record, arrivals)
        for stream, delta in messages:
            if delta.finish_reason is not None:
                self._streams.pop(stream.request_id, None)
            stream.deltas.put_nowait(delta)
        for listener in list(self.step_listeners):
            listener(record, arrivals)

    async def watch(self) -> None:
        """End every open request with an error when the engine stands still and cannot be started again."""
        stuck = 0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            step = self.engine.scheduler.step
            alive = not self._streams or step != self._last_step or self.engine.state == "running"
            stuck, self._last_step = (0 if alive else stuck + 1), step
            if stuck:
                self.engine.start()
            if stuck > 5:
                log.error("the engine stands still at step %d; open requests end with an error", step)
                for stream in list(self._streams.values()):
                    self.abort(stream)
                    stream.deltas.put_nowait(Delta(finish_reason="error"))
                self._streams.clear()

    async def drain(self) -> None:
        """Take no more requests, let the open ones end within the time-out, and abort the rest."""
        self.draining = True
        deadline = self._loop.time() + self.settings.drain_seconds
        while self.num_open and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        for stream in list(self._streams.values()):
            self.abort(stream)
            stream.deltas.put_nowait(Delta(finish_reason="abort"))
        self._remove_listener()
        self.preparation.close()
