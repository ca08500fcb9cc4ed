"""/v1/completions and /v1/chat/completions, streamed or as one answer."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from tornado.iostream import StreamClosedError

from workbench.apps.serve.call_forms import CallForm
from workbench.apps.serve.channels import ChannelForm, ChannelParser, has_channels
from workbench.apps.serve.conversation import render_conversation
from workbench.apps.serve.errors import ApiError, internal_error
from workbench.apps.serve.guard import stream_of
from workbench.apps.serve.handlers import ApiHandler
from workbench.apps.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    decode_body,
    field_of,
    tool_dicts,
)
from workbench.apps.serve.responses import Answer, joined
from workbench.apps.serve.stream import Delta, Stream
from workbench.apps.serve.tools import THINK_MARKS, CallGrammar, MessageParser, opens_reasoning
from workbench.config import SamplingParams
from workbench.engine.input_processor import TokensPrompt, tokenize_prompt
from workbench.models.tokenizer import Tokenizer


class CompletionsHandler(ApiHandler):
    """/v1/completions, and the base of chat completions."""

    chat = False
    new_parser: Callable[[], MessageParser | ChannelParser] = MessageParser
    calls: CallGrammar | None = None
    kind: type[CompletionRequest | ChatRequest] = CompletionRequest

    def parts(self, body: Any) -> tuple[list[Any], list[SamplingParams]]:
        """The prompts of a body, and the sampling of each choice of a prompt."""
        prompts: list[Any] = body.prompts()
        tokenizer = self.bridge.engine.model.tokenizer
        if body.add_special_tokens is False and tokenizer is not None:
            prompts = [
                {"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt)} if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
        return prompts, body.sampling()

    def read(self) -> tuple[SamplingFields, list[TokensPrompt], list[SamplingParams]]:
        """The body, its prompts and the sampling of each choice, checked; called beside the event loop."""
        body = decode_body(self.request.body, self.kind)
        self.check_model(body.model)
        tokenizer = self.bridge.engine.model.tokenizer
        try:
            prompts, sampling = self.parts(body)
            # Once for all choices; vLLM's TokensPrompt.
            tokenized = [tokenize_prompt(prompt, tokenizer) for prompt in prompts]
            if body.contains != "output" and tokenizer is not None:
                tokenized = [(text or tokenizer.decode(ids), ids) for text, ids in tokenized]
            return body, [{"prompt": text, "prompt_token_ids": ids} for text, ids in tokenized], sampling
        except ValueError as problem:
            raise ApiError(400, str(problem), param=field_of(str(problem), self.kind)) from None

    async def post(self) -> None:
        """Answer; if the client disconnects, its requests are aborted."""
        body, prompts, sampling = await self.bridge.read(self.read, len(self.request.body), self.gone)
        # The name of the key is part of the request's id, which every view of the trace shows.
        parts = "chatcmpl" if self.chat else "cmpl", stream_of(self.request).user, uuid.uuid4().hex[:24]
        name = "-".join(filter(None, parts))
        streams = await self._submit(name, body, prompts, sampling)
        engine = self.bridge.engine
        parsers = [self.new_parser() for _ in streams]
        answer = Answer(
            name,
            body.model or engine.name,
            self.chat,
            engine.model.tokenizer,
            streams,
            parsers,
            bool(body.return_token_ids),
        )
        work = asyncio.ensure_future(
            self._stream(answer, body, len(prompts)) if body.stream else self._whole(answer, len(prompts))
        )
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            for stream in streams:
                self.bridge.abort(stream)

    async def _submit(
        self, name: str, body: SamplingFields, prompts: list[TokensPrompt], sampling: list[SamplingParams]
    ) -> list[Stream]:
        """Queue the requests of a body; tools whose schemas cannot be compiled may be left free meanwhile."""
        while True:
            choices = [(prompt, params) for prompt in prompts for params in sampling]
            try:
                streams = await self.bridge.submit(
                    [(f"{name}-{i}", prompt, params) for i, (prompt, params) in enumerate(choices)],
                    len(self.request.body),
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    adapter=body.model if body.model in self.bridge.engine.adapters else "",
                    gone=self.gone,
                    client=stream_of(self.request).user or self.request.remote_ip or "",
                    echo=body.contains,
                )
            except ApiError as problem:
                if self.calls is None or problem.status != 400:
                    problem.param = problem.param or field_of(problem.message, self.kind)
                    raise
                try:
                    self.calls.relax(problem.message)
                except ValueError as refused:
                    raise ApiError(400, str(refused), param="tools") from None
                constraint = self.calls.constraint()
                sampling = [params.replace(structured_outputs=constraint) for params in sampling]
                continue
            for header, value in (self.calls.schemas.headers if self.calls is not None else {}).items():
                self.set_header(header, value)
            return streams

    async def _whole(self, answer: Answer, num_prompts: int) -> None:
        async def collect(stream: Stream) -> Delta:
            return joined([delta async for delta in stream])

        results = await asyncio.gather(*(collect(stream) for stream in answer.streams))
        for result in results:
            _check_end(result, answer.model)
        count = sum(len(result.token_ids) - result.num_echoed for result in results)
        usage = answer.usage(count, num_prompts)

        def encode() -> bytes:
            choices = [answer.choice(i, result, chunk=False) for i, result in enumerate(results)]
            of_prompt = answer.prompt_logprobs(0) if self.chat else {}
            return msgspec.json.encode({**answer.head(chunk=False), "choices": choices, "usage": usage, **of_prompt})

        # The tokens at thousands of positions would hold up the event loop.
        has_logprobs = any(result.logprobs for result in results) or any(
            stream.sampling.prompt_logprobs is not None for stream in answer.streams
        )
        encoded = await asyncio.get_running_loop().run_in_executor(None, encode) if has_logprobs else encode()
        self.answer_encoded(encoded)

    async def _stream(self, answer: Answer, body: SamplingFields, num_prompts: int) -> None:
        options = body.stream_options
        merged: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()

        async def forward(index: int, stream: Stream) -> None:
            async for delta in stream:
                merged.put_nowait((index, delta))

        readers = [asyncio.ensure_future(forward(i, stream)) for i, stream in enumerate(answer.streams)]
        self.start_events()
        head, left, count = answer.head(chunk=True), len(answer.streams), 0
        offsets = [0] * left
        try:
            if self.chat:
                for i in range(left):
                    first = {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    self._send_json({**head, "choices": [first]})
            while left:
                index, delta = await merged.get()
                left -= delta.finish_reason is not None
                count += len(delta.token_ids) - delta.num_echoed
                try:
                    _check_end(delta, answer.model)
                except ApiError as problem:  # the status has been sent, so the error is an event
                    self._send_json(problem.body())
                    break
                event = {**head, "choices": [answer.choice(index, delta, chunk=True, offset=offsets[index])]}
                offsets[index] += len(delta.text)
                if options is not None and options.continuous_usage_stats:
                    event["usage"] = answer.usage(count, num_prompts)
                self._send_json(event)
            if options is not None and options.include_usage:
                self._send_json({**head, "choices": [], "usage": answer.usage(count, num_prompts)})
            self.send_event(b"[DONE]")
            with contextlib.suppress(StreamClosedError):  # the reader was cut off
                await self.finish()
        finally:
            for reader in readers:
                reader.cancel()

    def _send_json(self, event: dict[str, Any]) -> None:
        self.send_event(msgspec.json.encode(event))


class ChatCompletionsHandler(CompletionsHandler):
    """/v1/chat/completions."""

    chat = True
    kind = ChatRequest

    def parts(self, body: Any) -> tuple[list[Any], list[SamplingParams]]:
        """The one prompt, and the sampling of each choice; an answer fills at most half of the context."""
        default = max(1, (self.bridge.engine.config.max_model_len or 1024) // 2)
        tokenizer = self.bridge.engine.model.tokenizer
        text, token_ids = render_conversation(body.messages, body, tokenizer, tool_dicts(body.tools))
        form = body.call_form(tokenizer, text)
        sampling = body.sampling(default)
        if form is not None and tokenizer is not None:
            if sampling[0].structured_outputs:
                raise ValueError("tools do not work with response_format or structured_outputs: give one of them")
            parallel = body.parallel_tool_calls is not False
            reasons = opens_reasoning(text)
            self.calls = CallGrammar.of(
                body.tools, body.tool_choice, form, tokenizer, parallel=parallel, reasons=reasons
            )
            constraint = self.calls.constraint()
            sampling = [params.replace(structured_outputs=constraint) for params in sampling]
        in_channels = tokenizer is not None and has_channels(tokenizer)
        if visible := _marks(ChannelForm() if in_channels else form, tokenizer):
            sampling = [params.replace(visible_token_ids=visible) for params in sampling]
        functions = [tool.function for tool in body.tools or ()]
        self.new_parser = partial(MessageParser, form, opens_reasoning(text), functions=functions)
        if in_channels and not body.continue_final_message and body.add_generation_prompt is not False:
            self.new_parser = ChannelParser
        return [{"prompt": text, "prompt_token_ids": token_ids}], sampling


def _marks(form: CallForm | None, tokenizer: Tokenizer | None) -> list[int]:
    """The special tokens of the marks that separate reasoning and calls; the parser needs their text."""
    special: frozenset[int] = getattr(tokenizer, "special_token_ids", frozenset())
    if not special or tokenizer is None:
        return []
    return sorted(special.intersection(tokenizer.encode(THINK_MARKS + (form.marks if form is not None else ""))))


def _check_end(delta: Delta, model: str) -> None:
    """Raise an error if a request ended without an answer.

    Raises:
        ApiError: The request failed, or the server aborted it.
    """
    if delta.error.startswith("structured_outputs"):  # a grammar that looked valid, and allows nothing
        raise ApiError(400, delta.error, param="structured_outputs")
    if delta.error.startswith(f"AdapterError: adapter {model!r}"):  # its files have changed since the server began
        raise ApiError(400, f"the files of adapter {model!r} cannot be read: see the server's log", param="model")
    if delta.finish_reason == "error":
        raise internal_error()
    if delta.finish_reason == "abort":
        raise ApiError(503, "the server aborted the request", kind="server_error", code="aborted")
