"""The endpoints, except completions: models, tokenize, health, metrics, the trace as it grows."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from tornado.iostream import StreamClosedError
from tornado.web import HTTPError, RequestHandler

from workbench.serve.bridge import EngineBridge
from workbench.serve.errors import ApiError, internal_error
from workbench.serve.guard import DASHBOARD
from workbench.serve.openapi import describe
from workbench.serve.prometheus import CONTENT_TYPE
from workbench.serve.protocol import TokenizeRequest, decode_body
from workbench.trace import RequestInfo, StepRecord
from workbench.trace.file import encode_line
from workbench.trace.records import TraceLine

log = logging.getLogger("workbench")

MAX_RECORDS_BEHIND = 1000
"""Records a reader of /trace/stream may lag behind before it is cut off."""

POLL_SECONDS = 0.5
"""Time between two looks at whether a reader of /trace/stream is still there while no step is taken."""


class ApiHandler(RequestHandler):
    """What all endpoints share: JSON, errors in OpenAI's shape, and a client that may go away."""

    def initialize(self, bridge: EngineBridge) -> None:
        """Keep the way to the engine."""
        self.bridge = bridge
        self.gone = asyncio.Event()

    def on_connection_close(self) -> None:
        """Note that the client went away."""
        self.gone.set()

    def answer(self, value: Any) -> None:
        """End with JSON."""
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(msgspec.json.encode(value))

    async def start_events(self) -> None:
        """Begin an answer of server-sent events; the client is told at once."""
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Accel-Buffering", "no")
        await self._flush()

    async def send_event(self, data: bytes) -> None:
        """Send one event, and wait while the client is slow to take it."""
        self.write(b"data: " + data + b"\n\n")
        await self._flush()

    async def _flush(self) -> None:
        try:
            await self.flush()
        except StreamClosedError:
            self.gone.set()

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not the one served.

        Raises:
            ApiError: Status 404.
        """
        if model is not None and model != self.bridge.engine.name:
            raise ApiError(
                404, f"model {model[:100]!r} is not served here: use {self.bridge.engine.name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """An error in OpenAI's shape; whatever was not meant for the client stays in the log."""
        problem = kwargs.get("exc_info", (None, None, None))[1]
        if not isinstance(problem, ApiError):
            wording = {404: "there is no such address here", 405: "this method is not served at this address"}
            problem = (
                ApiError(status_code, wording.get(status_code, "the request is refused"))
                if status_code < 500
                else internal_error()
            )
        self.set_status(problem.status)
        for name, value in problem.headers.items():
            self.set_header(name, value)
        self.answer(problem.body())

    def log_exception(self, kind: Any, problem: Any, trace: Any) -> None:
        """Log what is a fault of the server; refusals are not."""
        if not isinstance(problem, ApiError | HTTPError):
            log.error("%s %s failed", self.request.method, self.request.path, exc_info=(kind, problem, trace))


class NotFound(ApiHandler):
    """Every address that is not served."""

    async def prepare(self) -> None:
        """Refuse."""
        raise ApiError(404, "there is no such address here", code="not_found")


class Root(ApiHandler):
    """/: the dashboard."""

    def get(self) -> None:
        """Redirect."""
        self.redirect(DASHBOARD)


class Models(ApiHandler):
    """/v1/models: the one model."""

    def get(self, name: str | None = None) -> None:
        """The list, or the model by name."""
        engine = self.bridge.engine
        card = {
            "id": engine.name,
            "object": "model",
            "created": int(engine.trace.meta.created or 0),
            "owned_by": "workbench",
            "max_model_len": engine.config.max_model_len,
        }
        if name is None:
            self.answer({"object": "list", "data": [card]})
        else:
            self.check_model(name)
            self.answer(card)


class Embeddings(ApiHandler):
    """/v1/embeddings: refused."""

    def post(self) -> None:
        """Say that and why."""
        raise ApiError(400, "embeddings are not served: the engine generates text", code="unsupported_endpoint")


class Tokenize(ApiHandler):
    """/tokenize, as vLLM has it."""

    async def post(self) -> None:
        """Token ids of a prompt, or of messages under the chat template."""
        body = decode_body(self.request.body, TokenizeRequest)
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        tokenizer = self.bridge.engine.tokenizer

        def encode() -> list[int]:
            if body.prompt is not None:
                return tokenizer.encode(body.prompt)
            return tokenizer.encode(tokenizer.apply_chat_template([m.as_dict() for m in body.messages or ()]))

        tokens = await self.bridge.preparation.run(encode)
        self.answer({"tokens": tokens, "count": len(tokens), "max_model_len": self.bridge.engine.config.max_model_len})


class Health(ApiHandler):
    """/health: 200 while the server takes requests."""

    def get(self) -> None:
        """Say how it is."""
        self.set_status(503 if self.bridge.draining else 200)
        self.answer({"status": "draining" if self.bridge.draining else "ok"})


class OpenApi(ApiHandler):
    """/openapi.json: the API described."""

    def get(self) -> None:
        """The description."""
        self.answer(describe(needs_key=self.bridge.settings.api_key is not None))


class Metrics(ApiHandler):
    """/metrics in Prometheus' format."""

    def get(self) -> None:
        """All metrics."""
        self.set_header("Content-Type", CONTENT_TYPE)
        self.finish(self.bridge.metrics.render())


class TraceStream(ApiHandler):
    """/trace/stream: the lines of a trace file as server-sent events, from the next step on."""

    async def get(self) -> None:
        """What has to be known before the next step, then every step as it is taken."""
        steps: asyncio.Queue[tuple[StepRecord, list[RequestInfo]]] = asyncio.Queue()

        def take(record: StepRecord, arrivals: list[RequestInfo]) -> None:
            steps.put_nowait((record, arrivals))

        await self.start_events()
        await self._send(self.bridge.engine.trace.meta)
        open_requests, keyframe = await self.bridge.follow_steps(take)
        try:
            for info in open_requests:
                await self._send(info)
            await self._send(keyframe)
            sent = {info.request_id for info in open_requests}
            while not self.gone.is_set() and steps.qsize() <= MAX_RECORDS_BEHIND:
                try:
                    record, arrivals = await asyncio.wait_for(steps.get(), POLL_SECONDS)
                except TimeoutError:
                    continue
                for info in arrivals:
                    if info.request_id not in sent:
                        await self._send(info)
                sent.difference_update(record.arrived)
                await self._send(record)
        finally:
            self.bridge.step_listeners.remove(take)

    async def _send(self, line: TraceLine) -> None:
        await self.send_event(encode_line(line).rstrip(b"\n"))
