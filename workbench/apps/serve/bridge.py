"""The bridge between the server's event loop and the engine's thread.

The engine calls back on its own thread after every step; one message per step, for all of its requests, crosses to the
event loop. Requests go the other way through ``Engine.add_request`` and ``Engine.abort``, which may be called from any
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.apps.serve.errors import ApiError, too_many_requests, unavailable
from workbench.apps.serve.preparation import Preparation
from workbench.apps.serve.prometheus import ServerMetrics
from workbench.apps.serve.settings import ServeSettings
from workbench.apps.serve.stream import Delta, Echo, Stream
from workbench.base.cache_salt import digest_of
from workbench.config import SamplingParams
from workbench.trace import Keyframe, RequestInfo, StepRecord
from workbench.trace.line_codec import encode_line
from workbench.trace.readings.last_tokens import with_times

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.grammar_texts import GrammarText
    from workbench.engine.input_processor import TokensPrompt
    from workbench.engine.output_processor import RequestOutput

log = logging.getLogger("workbench")

T = TypeVar("T")

WATCH_SECONDS = 1.0
"""Interval at which the server checks, while requests are open, that the engine still runs."""

MAX_FAILED_STEPS = 3
"""Number of steps in a row that all raised from which on /health says so."""

_DELIVERED_AT_ONCE = 2
_DELIVERED_SHARE = 32

StepListener = Callable[[StepRecord, list[RequestInfo]], None]
"""A function that is called on the event loop with each step and the requests that arrived before it."""


class EngineBridge:
    """Starts, follows and aborts requests of an engine for an event loop.

    Args:
        engine: The engine, which the bridge keeps running while requests are open.
        settings: Limits.
        loop: The server's event loop.
    """

    def __init__(self, engine: Engine, settings: ServeSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = ServerMetrics(engine)
        self.draining = False
        self.step_listeners: list[StepListener] = []
        self.num_readers = 0
        self._encoded: tuple[StepRecord | None, bytes] = None, b""
        self._loop = loop
        self._streams: dict[str, Stream] = {}
        self._undelivered: deque[tuple[Stream, Delta]] = deque()
        self._preparing = 0
        self.preparation = Preparation(settings.prepare_seconds)
        self._last_step = -1
        self._failed_before = 0  # steps that had raised when one succeeded
        self._remove_listener = engine.on_step(self._after_step)

    @property
    def limit(self) -> int:
        """Maximum number of open requests."""
        return self.engine.config.max_num_seqs + self.settings.max_queue

    @property
    def num_open(self) -> int:
        """Number of requests that run, wait or are being prepared."""
        return len(self._streams) + self._preparing

    @property
    def failure(self) -> str:
        """The last error, if the last ``MAX_FAILED_STEPS`` steps all raised; otherwise ""."""
        failed = self.engine.failed_steps
        return failed.error if failed.count - self._failed_before >= MAX_FAILED_STEPS else ""

    def check_room(self, num_requests: int = 1) -> None:
        """Check that the server accepts this number of requests now.

        Raises:
            ApiError: The queue is full or too short, or the server is shutting down.
        """
        if self.draining:
            raise unavailable("the server is shutting down and accepts no more requests")
        if num_requests > self.limit:
            raise ApiError(
                400, f"the request asks for {num_requests} answers, more than the server's limit of {self.limit}"
            )
        if self.num_open + num_requests > self.limit:
            raise too_many_requests(self.limit)

    async def read(self, work: Callable[[], T], length: int, gone: asyncio.Event) -> T:
        """Decode and tokenize a body, if there is room for a request; see `Preparation.run`."""
        self.check_room()
        self._preparing += 1
        try:
            return await self.preparation.run(work, length, gone)
        finally:
            self._preparing -= 1

    async def submit(
        self,
        requests: list[tuple[str, TokensPrompt, SamplingParams]],
        length: int,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        gone: asyncio.Event | None = None,
        client: str = "",
        echo: Echo = "output",
    ) -> list[Stream]:
        """Queue requests, all of them or none.

        Args:
            requests: Id, prompt and sampling of each.
            length: Number of bytes of the body that asked for them.
            priority: Priority of all.
            cache_salt: Cache salt of all. The engine gets a digest of it: the trace shows salts to all clients, and a
                client that knew another's salt could find out which prompts are cached.
            adapter: Adapter of all.
            gone: Set when the client has disconnected.
            client: The client, by key or address. Clients take turns when their grammars wait.
            echo: The contents of the answers.

        Raises:
            ApiError: The queue is full or too short, the server is shutting down, or a request is not valid.
        """
        self.check_room(len(requests))
        self._preparing += len(requests)
        streams: list[Stream] = []
        texts: list[GrammarText] = []
        try:
            if requests and (wanted := requests[0][2].structured_outputs):  # the same for all choices
                await self._read_grammar(wanted, length, gone or asyncio.Event(), client, texts)
            for request_id, prompt, sampling in requests:
                stream = Stream(request_id, sampling, echo)
                fields = {"priority": priority, "cache_salt": digest_of(cache_salt), "adapter": adapter}
                add = partial(self._add, prompt, stream, **fields)
                await self.preparation.run(add, length, gone)
                streams.append(stream)
        except BaseException:
            for stream in streams:
                self.abort(stream)
            raise
        finally:
            self._preparing -= len(requests)
            for text in texts:
                self.engine.grammars.leave(text)
        self.engine.start()
        return streams

    async def _read_grammar(
        self, wanted: Mapping[str, Any], length: int, gone: asyncio.Event, client: str, texts: list[GrammarText]
    ) -> None:
        """Wait until a grammar has been read, or is refused: that may take long, and no other request waits for it.

        Args:
            wanted: The form of the answer.
            length: Number of bytes of the body.
            gone: Set when the client has disconnected, which ends the wait.
            client: The client.
            texts: Gets the text, which has to be left.
        """
        grammars = self.engine.grammars
        await self.preparation.run(lambda: texts.append(grammars.join(wanted, client)), length, gone)
        over = asyncio.Event()

        def end(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(over.set)

        texts[0].validated.add_done_callback(end)
        waits = [asyncio.ensure_future(over.wait()), asyncio.ensure_future(gone.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if gone.is_set():
            raise ApiError(400, "the client has disconnected")
        if texts[0].failure:
            raise ApiError(400, texts[0].failure)

    def _add(self, prompt: TokensPrompt, stream: Stream, **fields: Any) -> None:
        """Add a request to the engine, on the preparing thread; its stream is registered before its first step."""
        self._streams[stream.request_id] = stream
        try:
            self.engine.add_request(prompt, stream.sampling, request_id=stream.request_id, **fields)
        except BaseException:
            self._streams.pop(stream.request_id, None)
            raise

    async def follow_steps(self, listener: StepListener) -> tuple[list[RequestInfo], Keyframe]:
        """Call a function with every step from now on, until it is removed from ``step_listeners``.

        Returns:
            The state before the first of these steps: the open requests, and a keyframe of the KV pool.
        """
        opening: asyncio.Future[tuple[list[RequestInfo], Keyframe]] = self._loop.create_future()

        def take_state() -> None:
            scheduler, trace = self.engine.scheduler, self.engine.trace
            open_requests = [trace.requests[request.request_id] for request in (*scheduler.running, *scheduler.waiting)]
            self._loop.call_soon_threadsafe(begin, open_requests, with_times(scheduler.keyframe(), trace))

        def begin(open_requests: list[RequestInfo], keyframe: Keyframe) -> None:
            if not opening.cancelled():
                self.step_listeners.append(listener)
                opening.set_result((open_requests, keyframe))

        self.engine.before_step(take_state)
        self.engine.start()
        return await opening

    def encoded(self, record: StepRecord) -> bytes:
        """A step as a line of a trace file, without its newline; all readers of the trace share it."""
        if self._encoded[0] is not record:
            self._encoded = record, encode_line(record).rstrip(b"\n")
        return self._encoded[1]

    def abort(self, stream: Stream) -> None:
        """Abort a request before the next step; without effect if it has ended."""
        if stream.request_id not in self._streams:
            return
        try:
            self.engine.abort(stream.request_id)
        except ValueError:  # it was never added
            self._streams.pop(stream.request_id, None)
            return
        self.engine.start()

    # -- the engine's thread -----------------------------------------------------------------------------------

    def _after_step(self, record: StepRecord) -> None:
        if record.kernel is not None:  # a step that raised has none, and so has one that computed nothing
            self._failed_before = self.engine.failed_steps.count
        requests = self.engine.trace.requests
        arrivals = [requests[request_id] for request_id in record.arrived]
        messages = self._messages(record, arrivals)
        for request_id in {*record.finished, *record.aborted}:
            self.engine.forget(request_id)
        self._loop.call_soon_threadsafe(self._deliver, record, arrivals, messages)

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
            if chunk.accepted or reason is not None:
                output = self._output_of(chunk.request_id)
                messages.append((stream, stream.advance(chunk.accepted, chunk.text, output, reason)))
        for request_id, reason in ended.items():
            if (stream := self._streams.get(request_id)) is not None:
                messages.append((stream, stream.advance((), "", self._output_of(request_id), reason)))
        return messages

    def _output_of(self, request_id: str) -> Callable[[], RequestOutput]:
        return lambda: self.engine.output(request_id)

    # -- the event loop ----------------------------------------------------------------------------------------

    def _deliver(self, record: StepRecord, arrivals: list[RequestInfo], messages: list[tuple[Stream, Delta]]) -> None:
        self.metrics.add_step(record, arrivals)
        if messages and not self._undelivered:
            self._loop.call_soon(self._deliver_some)
        self._undelivered.extend(messages)
        for listener in list(self.step_listeners):
            listener(record, arrivals)

    def _deliver_some(self) -> None:
        """Deliver to a few streams, and leave a turn of the event loop to others: each has an event to encode.

        A share of what waits, so that the event loop cannot fall ever further behind the engine.
        """
        num_waiting = len(self._undelivered)
        for _ in range(min(num_waiting, max(_DELIVERED_AT_ONCE, num_waiting // _DELIVERED_SHARE))):
            stream, delta = self._undelivered.popleft()
            if delta.finish_reason is not None:
                self._streams.pop(stream.request_id, None)
            stream.deltas.put_nowait(delta)
        if self._undelivered:
            self._loop.call_soon(self._deliver_some)

    async def watch(self) -> None:
        """End every open request with an error if the engine has stopped and cannot be restarted."""
        num_stuck = 0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            step = self.engine.scheduler.step
            # The engine owes nothing to requests that are being prepared: a tokenizer may take seconds.
            has_work = len(self._streams) > self._preparing
            alive = not has_work or step != self._last_step or self.engine.state == "running"
            num_stuck, self._last_step = (0 if alive else num_stuck + 1), step
            if num_stuck:
                self.engine.start()
            if num_stuck > 5:
                log.error("the engine has stopped at step %d: all open requests end with an error", step)
                for stream in list(self._streams.values()):
                    self.abort(stream)
                    stream.deltas.put_nowait(Delta(finish_reason="error"))
                self._streams.clear()

    async def drain(self) -> None:
        """Accept no more requests, let the open ones finish within ``drain_seconds``, and abort the rest."""
        self.draining = True
        deadline = self._loop.time() + self.settings.drain_seconds
        while self.num_open and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        for stream in list(self._streams.values()):
            self.abort(stream)
            stream.deltas.put_nowait(Delta(finish_reason="abort"))
        self._remove_listener()
        self.preparation.close()
