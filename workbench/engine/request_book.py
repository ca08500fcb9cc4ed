"""Every request an engine has been given, with what the scheduler does not keep: text, log-probabilities, errors."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.engine.detokenizer import IncrementalDetokenizer
from workbench.engine.outputs import RequestOutput
from workbench.engine.request import Request
from workbench.engine.sampler import SampledToken
from workbench.engine.scheduled_batch import ScheduledBatch
from workbench.engine.validation import check_prompt, tokenize_prompt
from workbench.models.load import LoadedModel
from workbench.trace import StepRecord

log = logging.getLogger("workbench")


class Entry:
    """A request, and what became of it so far.

    Attributes:
        request: The scheduler's request.
        prompt: The prompt as text, "" when it was given as token ids.
        detokenizer: Its text; None when the model has no tokenizer.
        logprobs: Log-probabilities of each token, when asked for.
        finish_reason: None while the request runs.
        error: What went wrong, when the reason is "error".
        returned: ``Engine.run`` has returned its output.
    """

    def __init__(self, request: Request, prompt: str, detokenizer: IncrementalDetokenizer | None) -> None:
        self.request = request
        self.prompt = prompt
        self.detokenizer = detokenizer
        self.logprobs: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        self.error = ""
        self.returned = False

    def add_text(self, token_id: int) -> tuple[str, bool]:
        """Take a token into the text; returns what it added, and whether a stop string was found."""
        if self.detokenizer is None:
            return "", False
        return self.detokenizer.append(token_id), bool(self.detokenizer.stopped_by)

    def output(self) -> RequestOutput:
        """The output so far.

        What has a ``finish_reason`` is whole, from whichever thread it is asked for: the reason is set last
        (``RequestBook.settle``) and read first.
        """
        request, finish_reason = self.request, self.finish_reason
        tokens = tuple(request.token_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=tokens[: request.num_prompt_tokens],
            token_ids=tokens[request.num_prompt_tokens :],
            text=self.detokenizer.text if self.detokenizer else "",
            finish_reason=finish_reason,
            logprobs=tuple(self.logprobs) if request.sampling.logprobs is not None else None,
            error=self.error,
        )


class RequestBook:
    """Makes requests, and keeps an entry for each in order of arrival.

    Args:
        model: The model the requests are for.
        config: The engine's configuration, resolved against the model.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # requests may be added from any thread
        self.entries: dict[str, Entry] = {}

    def __getitem__(self, request_id: str) -> Entry:
        """The entry of a request.

        Raises:
            ValueError: There is no such request.
        """
        try:
            return self.entries[request_id]
        except KeyError:
            known = ", ".join(itertools.islice(self.entries, 20)) or "none yet"
            raise ValueError(f"request_id {request_id!r} is unknown; known are {known}") from None

    def forget(self, request_id: str) -> None:
        """Drop the entry of a request that has ended.

        Raises:
            ValueError: There is no such request, or it has not ended.
        """
        if self[request_id].finish_reason is None:
            raise ValueError(f"request_id {request_id!r} has not ended: abort it first")
        with self._lock:
            del self.entries[request_id]

    def num_tokens_left(self) -> int:
        """Tokens the open requests still need at most, prompt and output; the last one is never computed."""
        left = 0
        for entry in list(self.entries.values()):
            if entry.finish_reason is None:
                request = entry.request
                left += request.num_prompt_tokens + request.max_tokens - 1 - request.num_kv_computed
        return left

    def add(
        self, prompt: Any, sampling: SamplingParams, request_id: str | None, priority: int, arrival_time: float
    ) -> Entry:
        """Check a request and enter it.

        Raises:
            ValueError: See ``Engine.add_request``; nothing is entered then.
        """
        tokenizer = self._model.tokenizer
        text, token_ids = tokenize_prompt(prompt, tokenizer)
        check_prompt(token_ids, sampling, self._config, self._model)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise ValueError(f"request_id must be a string that is not empty, got {request_id!r}")
        with self._lock:
            if request_id is None:
                request_id = next(name for n in self._numbers if (name := f"r{n}") not in self.entries)
            elif request_id in self.entries:
                raise ValueError(f"request_id {request_id!r} is in use: every request of an engine needs its own")
            request = Request(
                request_id,
                token_ids,
                sampling,
                priority=priority,
                arrival_time=arrival_time,
                eos_token_ids=self._model.eos_token_ids,
            )
            hidden = frozenset() if sampling.ignore_eos else self._model.eos_token_ids
            detokenizer = IncrementalDetokenizer(tokenizer, token_ids, sampling.stop, hidden) if tokenizer else None
            self.entries[request_id] = entry = Entry(request, text, detokenizer)
        return entry

    def accept(
        self, batch: ScheduledBatch, sampled: Sequence[SampledToken]
    ) -> tuple[list[int | None], list[str], dict[str, str]]:
        """Take the sampled tokens of a step into the texts.

        Args:
            batch: The step's batch.
            sampled: One token for each chunk that samples, in order.

        Returns:
            For each chunk its token (None where it samples nothing) and the text that token added; and the requests
            that end for a reason the scheduler cannot see: {request id: "stop" | "error"}.
        """
        tokens: list[int | None] = []
        texts: list[str] = []
        finish: dict[str, str] = {}
        remaining = iter(sampled)
        for chunk in batch.chunks:
            result = next(remaining) if chunk.samples else SampledToken(None)
            request_id, text = chunk.request.request_id, ""
            entry = self.entries[request_id]
            if chunk.samples and result.token_id is None:
                finish[request_id], entry.error = "error", result.error
            elif chunk.samples:
                try:
                    text, stopped = entry.add_text(result.token_id)
                except Exception as problem:
                    log.exception("request %r ends with 'error': its text cannot be decoded", request_id)
                    finish[request_id] = "error"
                    entry.error = f"the tokenizer failed: {type(problem).__name__}: {problem}"
                else:
                    if result.logprobs is not None:
                        entry.logprobs.append(result.logprobs)
                    if stopped:
                        finish[request_id] = "stop"
            tokens.append(result.token_id)
            texts.append(text)
        return tokens, texts, finish

    def settle(self, record: StepRecord) -> None:
        """Complete the outputs of the requests that ended with a step."""
        for request_id, reason in record.finish_reasons.items():
            entry = self.entries[request_id]
            if entry.detokenizer is not None and not entry.detokenizer.stopped_by and not entry.error:
                try:
                    entry.detokenizer.flush()
                except Exception:
                    log.exception("the text of request %r lacks its last characters", request_id)
            entry.finish_reason = reason

    def take_ended(self) -> list[RequestOutput]:
        """Outputs of the requests that ended and have not been taken before, in order of arrival."""
        ended = [e for e in list(self.entries.values()) if e.finish_reason is not None and not e.returned]
        for entry in ended:
            entry.returned = True
        return [entry.output() for entry in ended]
