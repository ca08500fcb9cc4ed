"""From sampled tokens to the outputs of requests: text, stop strings, log-probabilities, errors."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from workbench.config import SamplingParams
from workbench.engine.sampler import SampledToken
from workbench.models.load import LoadedModel
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.request import FinishReason, Request
from workbench.trace import RequestInfo
from workbench.trace.readings.top_tokens import TopTokens

if TYPE_CHECKING:
    from workbench.engine.prompt_logprobs import PromptLogprobs

log = logging.getLogger("workbench")


@dataclass(frozen=True)
class RequestOutput:
    """The output of one request, finished or so far.

    Attributes:
        request_id: The request.
        prompt: The prompt as text, "" when it was given as token ids.
        prompt_token_ids: The prompt.
        token_ids: Sampled tokens, an end-of-sequence token included.
        text: Their text, without the end-of-sequence token and without a stop string that ended it.
        finish_reason: "length", "stop", "error" or "abort"; None while the request runs.
        logprobs: One {token_id: log-probability} per token when SamplingParams(logprobs=k) asked, else None.
        prompt_logprobs: The same for the prompt with SamplingParams(prompt_logprobs=k): None for its first token, which
            nothing predicts; as far as it has been computed.
        prompt_ranks: For each token of the prompt its rank among all tokens by probability, from 1; None for the first.
        error: The error message if finish_reason is "error".
    """

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[dict[int, float], ...] | None = field(default=None, repr=False)
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = field(default=None, repr=False)
    prompt_ranks: tuple[int | None, ...] | None = field(default=None, repr=False)
    error: str = ""

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.finish_reason is not None


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens."""
        ...


class IncrementalDetokenizer:
    """Turns tokens into text one at a time.

    A token may hold half of a character, and a word's first token may decode differently at the start of a text.
    So a short window of tokens is decoded with and without the new one, and the difference is the new text; a text
    that ends in the replacement character waits for the token that completes it. (The two-offset scheme of
    Hugging Face text-generation-inference, also used by vLLM.)

    Args:
        tokenizer: Anything with ``decode(ids)``.
        prompt_token_ids: The prompt, whose last tokens give the first output token its context.
        stop: Stop strings; the text ends before the first one found.
        hidden: Token ids that end the output and are not part of its text.
        skipped: Other token ids that are not part of its text; what is around them is as if they were not there.
        joined: Special token ids between which there are no spaces.

    Attributes:
        text: The output so far; without the stop string once one was found.
        stopped_by: The stop string that was found, else "".
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        hidden: frozenset[int] = frozenset(),
        skipped: frozenset[int] = frozenset(),
        joined: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-6:])
        self._window = 0
        self._read = len(self._ids)
        self._stop = tuple(stop)
        self._left_out, self._skipped = hidden | skipped, skipped - hidden
        self._joined, self._is_joined = joined, False
        self.text = ""
        self.stopped_by = ""

    def append(self, token_id: int) -> str:
        """Add a token and return the text it adds, "" while a character is incomplete."""
        if token_id in self._left_out:
            return "" if token_id in self._skipped else self.flush()
        self._ids.append(token_id)
        return self._append_joined(token_id) if self._joined else self._advance(final=False)

    def _append_joined(self, token_id: int) -> str:
        """Add the text of a token without the spaces between special tokens."""
        behind_joined, self._is_joined = self._is_joined, token_id in self._joined
        if not (behind_joined and self._is_joined):
            return self._advance(final=False)
        self._window, self._read = self._read, len(self._ids)
        self.text += (new := self._tokenizer.decode([token_id]))
        return self._cut_at_stop(len(self.text) - len(new)) if self._stop else new

    def flush(self) -> str:
        """Return what an incomplete character has held back, at the end of the output."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._window : self._read])
        whole = self._tokenizer.decode(self._ids[self._window :])
        if len(whole) <= len(known) or (whole.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        self._window, self._read = self._read, len(self._ids)
        self.text += (new := whole[len(known) :])
        return self._cut_at_stop(len(self.text) - len(new)) if self._stop else new

    def _cut_at_stop(self, start: int) -> str:
        """End the text before the first stop string, if there is one, and return what is new since ``start``."""
        found = [
            (position, stop)
            for stop in self._stop
            if (position := self.text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if found:
            position, self.stopped_by = min(found)
            self.text = self.text[:position]
        return self.text[start:]


class RequestState:
    """A request and its output so far.

    Attributes:
        request: The scheduler's request.
        info: The request's parameters, as its trace keeps them.
        detokenizer: Its text; None when the model has no tokenizer.
        logprobs: Log-probabilities of each token, when asked for.
        prompt_logprobs: Those of the prompt's tokens from the second on and their ranks, when asked for.
        finish_reason: None while the request runs.
        error: The error message if the reason is "error".
        returned: ``Engine.run`` has returned its output.
    """

    def __init__(self, request: Request, prompt: str, detokenizer: IncrementalDetokenizer | None) -> None:
        self.request = request
        self.info: RequestInfo = request.info(prompt)
        self.detokenizer = detokenizer
        self.logprobs: list[dict[int, float]] = []
        self.prompt_logprobs: list[tuple[dict[int, float], int]] = []
        self.finish_reason: str | None = None
        self.error = ""
        self.returned = False

    def extend(self, results: Sequence[SampledToken]) -> tuple[Sequence[SampledToken], str, FinishReason | None]:
        """Append the tokens of a step, up to the one that ends the request.

        Returns:
            The tokens that were appended, the text that they added, and why the request ends with the last of them, if
            the scheduler cannot see the reason.
        """
        text, detokenizer = "", self.detokenizer
        for number, result in enumerate(results, 1):
            if result.token_id is None:
                self.error = result.error
                return results[:number], text, "error"
            try:
                text += detokenizer.append(result.token_id) if detokenizer is not None else ""
            except Exception as problem:
                log.exception("request %r ends with 'error': its text cannot be decoded", self.request.request_id)
                self.error = f"the tokenizer failed: {type(problem).__name__}: {problem}"
                return results[:number], text, "error"
            if result.logprobs is not None:
                self.logprobs.append(result.logprobs)
            is_stopped = detokenizer is not None and detokenizer.stopped_by
            if is_stopped or result.token_id in self.request.stop_token_ids:
                return results[:number], text, "stop" if is_stopped else None
        return results, text, None

    def finish(self, reason: str) -> None:
        """Complete the output of a request that has ended."""
        if self.detokenizer is not None and not self.detokenizer.stopped_by and not self.error:
            try:
                self.detokenizer.flush()
            except Exception:
                log.exception("the text of request %r lacks its last characters", self.request.request_id)
        self.finish_reason = reason

    def output(self) -> RequestOutput:
        """The output so far.

        An output with a ``finish_reason`` is whole, whichever thread asks for it: the reason is set last (``finish``)
        and read first.
        """
        request, finish_reason = self.request, self.finish_reason
        tokens = tuple(request.token_ids)
        of_prompt = list(self.prompt_logprobs) if request.sampling.prompt_logprobs is not None else None
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.info.prompt,
            prompt_token_ids=tokens[: request.num_prompt_tokens],
            token_ids=tokens[request.num_prompt_tokens :],
            text=self.detokenizer.text if self.detokenizer else "",
            finish_reason=finish_reason,
            logprobs=tuple(self.logprobs) if request.sampling.logprobs is not None else None,
            prompt_logprobs=(None, *(near for near, _ in of_prompt)) if of_prompt is not None else None,
            prompt_ranks=(None, *(rank for _, rank in of_prompt)) if of_prompt is not None else None,
            error=self.error,
        )


class OutputProcessor:
    """Keeps the state of every request of an engine, in order of arrival, and adds the tokens of each step to it.

    Args:
        model: The model that the requests are for.

    Attributes:
        states: State by request id.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # requests may be added from any thread
        self.states: dict[str, RequestState] = {}

    def __getitem__(self, request_id: str) -> RequestState:
        """The state of a request.

        Raises:
            ValueError: There is no such request.
        """
        try:
            return self.states[request_id]
        except KeyError:
            known = ", ".join(itertools.islice(self.states, 20)) or "none yet"
            raise ValueError(f"request_id {request_id!r} is unknown; known are {known}") from None

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended.

        Raises:
            ValueError: There is no such request, or it has not ended.
        """
        if self[request_id].finish_reason is None:
            raise ValueError(f"request_id {request_id!r} has not ended: abort it first")
        with self._lock:
            del self.states[request_id]

    def add_request(
        self,
        prompt: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None,
        priority: int,
        arrival_time: float,
        cache_salt: str,
        adapter: str = "",
    ) -> RequestState:
        """Make a request of a prompt that has been checked.

        Args:
            prompt: The prompt as text, "" when it was given as token ids.
            token_ids: The prompt.
            sampling: Sampling and stop parameters.
            request_id: Its name; None for the next free one of "r0", "r1", ...
            priority: Smaller is served first under policy "priority".
            arrival_time: Seconds since the start of the trace.
            cache_salt: Only requests with the same salt find each other's blocks in the prefix cache.
            adapter: Name of the adapter that it is computed with; "" for the model alone.

        Raises:
            ValueError: The id is in use.
        """
        tokenizer, eos = self._model.tokenizer, self._model.eos_token_ids
        with self._lock:
            if request_id is None:
                request_id = next(name for n in self._numbers if (name := f"r{n}") not in self.states)
            elif request_id in self.states:
                raise ValueError(f"request_id {request_id!r} is in use: every request of an engine needs another")
            request = Request(
                request_id,
                token_ids,
                sampling,
                priority=priority,
                arrival_time=arrival_time,
                eos_token_ids=eos,
                cache_salt=cache_salt,
                adapter=adapter,
            )
            detokenizer = _detokenizer(tokenizer, token_ids, sampling, eos) if tokenizer else None
            self.states[request_id] = state = RequestState(request, prompt, detokenizer)
        return state

    def append_tokens(
        self, batch: ScheduledBatch, sampled: Sequence[Sequence[SampledToken]], max_model_len: int
    ) -> tuple[list[int | list[int] | None], dict[str, FinishReason]]:
        """Append each request's new tokens to its text, and note the new text in each chunk.

        Tokens behind the end of a request add no text: behind a stop string, a stop token, or the last one it may have.

        Args:
            batch: The step's batch.
            sampled: One token or more for each chunk that samples, in order.
            max_model_len: Longest sequence in tokens.

        Returns:
            For each chunk its token or its tokens (None if it samples nothing), and the requests that end for a reason
            the scheduler cannot see: {request id: "stop" | "error"}.
        """
        results = iter(sampled)
        tokens: list[int | list[int] | None] = []
        finish: dict[str, FinishReason] = {}
        for chunk in batch.chunks:
            made = next(results) if chunk.samples else ()
            request = chunk.request
            if made and request.status != "finished":
                room = min(request.max_num_tokens, max_model_len) - len(request.token_ids)
                appended, chunk.text, reason = self.states[request.request_id].extend(made[:room])
                if reason is not None:  # else the scheduler finds the end by itself
                    finish[request.request_id], made = reason, appended
            ids = [result.token_id for result in made if result.token_id is not None]
            tokens.append(ids[0] if len(ids) == 1 else ids or None)
        return tokens, finish

    def add_prompt_logprobs(self, found: Mapping[str, PromptLogprobs]) -> None:
        """Keep what a step found out about prompts; after a preemption it is found out again."""
        for request_id, (first, logprobs) in found.items():
            if (state := self.states.get(request_id)) is not None:
                state.prompt_logprobs[first - 1 : first - 1 + len(logprobs)] = logprobs

    def with_texts(self, top: TopTokens) -> TopTokens:
        """The most likely tokens with their texts, if the model has a tokenizer."""
        return top.with_texts(self._model.tokenizer.decode) if self._model.tokenizer is not None else top

    def finish(self, reasons: Mapping[str, str]) -> None:
        """Complete the outputs of the requests that ended with a step, given their reasons."""
        for request_id, reason in reasons.items():
            self.states[request_id].finish(reason)

    def num_tokens_left(self) -> int:
        """Maximum number of tokens to compute for the unfinished requests; the last token of each is never computed."""
        left = 0
        for state in list(self.states.values()):
            if state.finish_reason is None:
                request = state.request
                left += request.max_num_tokens - 1 - request.num_kv_computed
        return left

    def take_ended(self) -> list[RequestOutput]:
        """Outputs of the requests that ended and have not been taken before, in order of arrival."""
        ended = [s for s in list(self.states.values()) if s.finish_reason is not None and not s.returned]
        for state in ended:
            state.returned = True
        return [state.output() for state in ended]


def _detokenizer(
    tokenizer: Decoder, token_ids: Sequence[int], sampling: SamplingParams, eos: frozenset[int]
) -> IncrementalDetokenizer:
    """The text of a request, with or without special tokens."""
    special: frozenset[int] = getattr(tokenizer, "special_token_ids", frozenset())
    hidden = frozenset() if sampling.ignore_eos else frozenset(eos)
    skipped = special - {*sampling.visible_token_ids} if sampling.skip_special_tokens else frozenset()
    joined = frozenset() if sampling.spaces_between_special_tokens else special
    return IncrementalDetokenizer(tokenizer, token_ids, sampling.stop, hidden, skipped, joined)
