"""All endpoints but completions and the trace: models, tokenizer, version, health, metrics."""

from __future__ import annotations

import asyncio
import logging
from functools import cache, partial
from typing import Any

import msgspec
from tornado.iostream import StreamClosedError
from tornado.web import HTTPError, RequestHandler

from workbench import __version__
from workbench.apps.serve.bridge import EngineBridge
from workbench.apps.serve.dashboard import DASHBOARD
from workbench.apps.serve.errors import ApiError, internal_error
from workbench.apps.serve.guard import stream_of
from workbench.apps.serve.openapi import describe
from workbench.apps.serve.prometheus import CONTENT_TYPE
from workbench.apps.serve.protocol import DetokenizeRequest, TokenizeRequest, decode_body, field_of

log = logging.getLogger("workbench")

MAX_GRAMMARS_SHOWN = 20
"""Maximum number of grammars in the answer of /health."""


class ApiHandler(RequestHandler):
    """Base of all endpoints: JSON, errors in OpenAI's shape, and clients that disconnect."""

    def initialize(self, bridge: EngineBridge) -> None:
        """Keep the bridge to the engine."""
        self.bridge = bridge
        self.gone = asyncio.Event()

    def on_connection_close(self) -> None:
        """Note that the client has disconnected."""
        self.gone.set()

    def answer(self, value: Any) -> None:
        """Finish with JSON."""
        self.answer_encoded(msgspec.json.encode(value))

    def answer_encoded(self, value: bytes) -> None:
        """Finish with JSON that is encoded already."""
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(value)

    def start_events(self) -> None:
        """Begin an answer of server-sent events; its headers are sent at once."""
        self.set_header("Content-Type", "text/event-stream; charset=utf-8")
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Accel-Buffering", "no")
        self.flush()
        stream_of(self.request).farewell = partial(_farewell, self.request.version)

    def send_event(self, data: bytes) -> None:
        """Send one event without waiting for the reader, who is cut off when it falls too far behind."""
        if not self.gone.is_set():
            self.write(b"data: " + data + b"\n\n")
            self.flush()

    def flush(self, include_footers: bool = False) -> asyncio.Future[None]:
        """Send what has been written, or nothing on a closed connection.

        There Tornado would replace the future of a write that has not ended, and fail when that write is given up.
        """
        if not stream_of(self.request).closed():
            return super().flush(include_footers)
        self.gone.set()
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        closed.set_exception(StreamClosedError())
        closed.exception()  # it is expected, so nobody has to ask for it
        return closed

    def check_model(self, model: str | None) -> None:
        """Reject requests for another model.

        Raises:
            ApiError: Status 404.
        """
        served = [self.bridge.engine.name, *self.bridge.engine.adapters]
        if model is not None and model not in served:
            raise ApiError(
                404, f"model {model[:100]!r} is not served here: use {' or '.join(map(repr, served))}",
                param="model", code="model_not_found",
            )  # fmt: skip

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with an error in OpenAI's shape; details that are not for the client stay in the log."""
        problem = kwargs.get("exc_info", (None, None, None))[1]
        if not isinstance(problem, ApiError):
            messages = {404: "this address is not served", 405: "this method is not served at this address"}
            problem = (
                ApiError(status_code, messages.get(status_code, "the request is not valid"))
                if status_code < 500
                else internal_error()
            )
        self.set_status(problem.status)
        for name, value in problem.headers.items():
            self.set_header(name, value)
        self.answer(problem.body())

    def log_exception(self, kind: Any, problem: Any, trace: Any) -> None:
        """Log failures of the server, but not the errors of clients."""
        if not isinstance(problem, ApiError | HTTPError):
            log.error("%s %s failed", self.request.method, self.request.path, exc_info=(kind, problem, trace))


def _farewell(version: str, reason: str) -> bytes:
    """The last event of a reader that is cut off.

    A function that does not hold the handler: the stream keeps it, and the handler holds the stream.
    """
    event = b"data: " + msgspec.json.encode(ApiError(503, reason, kind="server_error", code="cut_off").body())
    if version == "HTTP/1.0":  # its answers have no chunks
        return event + b"\n\n"
    return b"%x\r\n%b\n\n\r\n0\r\n\r\n" % (len(event) + 2, event)


class NotFound(ApiHandler):
    """Every address that is not served."""

    async def prepare(self) -> None:
        """Answer with status 404."""
        raise ApiError(404, "this address is not served", code="not_found")


class Root(ApiHandler):
    """/: the dashboard."""

    def get(self) -> None:
        """Redirect."""
        self.redirect(DASHBOARD)


class NoIcon(ApiHandler):
    """/favicon.ico, which every browser asks for."""

    def get(self) -> None:
        """Answer that there is none, so that the browser reports no error."""
        self.set_status(204)


class Models(ApiHandler):
    """/v1/models: the model and its adapters."""

    def get(self, name: str | None = None) -> None:
        """The list of models, or one model by name."""
        engine = self.bridge.engine
        base = {
            "object": "model",
            "created": int(engine.trace.meta.created or 0),
            "owned_by": "workbench",
            "max_model_len": engine.config.max_model_len,
        }
        cards = {engine.name: {"id": engine.name, **base}}
        cards |= {adapter: {"id": adapter, **base, "parent": engine.name} for adapter in engine.adapters}
        if name is None:
            self.answer({"object": "list", "data": [*cards.values()]})
        else:
            self.check_model(name)
            self.answer(cards[name])


class Embeddings(ApiHandler):
    """/v1/embeddings: not served."""

    def post(self) -> None:
        """Answer with status 400 and the reason."""
        raise ApiError(400, "embeddings are not served: the engine generates text", code="unsupported_endpoint")


class Tokenize(ApiHandler):
    """/tokenize, vLLM's endpoint."""

    kind: type[TokenizeRequest | DetokenizeRequest] = TokenizeRequest

    async def post(self) -> None:
        """Decode the body and answer it beside the event loop."""
        self.answer_encoded(await self.bridge.preparation.run(self._encode, len(self.request.body), self.gone))

    def _encode(self) -> bytes:
        body = decode_body(self.request.body, self.kind)
        self.check_model(body.model)
        try:
            return msgspec.json.encode(self.result(body))
        except ValueError as problem:
            raise ApiError(400, str(problem), param=field_of(str(problem), self.kind)) from None

    def result(self, body: Any) -> dict[str, Any]:
        """Token ids of a prompt, or of messages under the chat template."""
        engine = self.bridge.engine
        tokens = body.token_ids(engine.tokenizer)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": engine.config.max_model_len}


class Detokenize(Tokenize):
    """/detokenize, vLLM's endpoint."""

    kind = DetokenizeRequest

    def result(self, body: Any) -> dict[str, Any]:
        """Text of token ids."""
        return {"prompt": body.text(self.bridge.engine.tokenizer)}


class Version(ApiHandler):
    """/version, vLLM's endpoint."""

    def get(self) -> None:
        """The version of this package."""
        self.answer({"version": __version__})


class Health(ApiHandler):
    """/health: 200 while the server accepts requests, and its steps do not all raise."""

    def get(self) -> None:
        """The status, the error of a failing engine, and the grammars that are being compiled."""
        failure = self.bridge.failure
        status = "draining" if self.bridge.draining else "failing" if failure else "ok"
        self.set_status(200 if status == "ok" else 503)
        answer: dict[str, Any] = {"status": status}
        if failure:
            answer["error"] = failure
        if grammars := self.bridge.engine.grammars_at_work():
            answer["grammars"] = grammars[:MAX_GRAMMARS_SHOWN]
        self.answer(answer)


class OpenApi(ApiHandler):
    """/openapi.json: the description of the API."""

    def get(self) -> None:
        """The description."""
        self.answer_encoded(description(needs_key=bool(self.bridge.settings.keys)))


@cache
def description(*, needs_key: bool) -> bytes:
    """The description of the API as JSON, made once: that takes the event loop several milliseconds."""
    return msgspec.json.encode(describe(needs_key=needs_key))


class Metrics(ApiHandler):
    """/metrics, in Prometheus' format."""

    def get(self) -> None:
        """All metrics."""
        self.set_header("Content-Type", CONTENT_TYPE)
        self.finish(self.bridge.metrics.render())
