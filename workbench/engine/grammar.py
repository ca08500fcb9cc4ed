"""Structured output: grammars that llguidance compiles, and the tokens that they allow at each position.

A request's grammar is compiled on a thread beside the engine, and the scheduler lets the request wait until then, as in
vLLM. From there on the grammar follows the tokens that are known: a step masks the rows of a chunk with the tokens that
may come after the output so far, and after each of its drafts. Drafts are taken back at once, so a rejected one never
counts. In asynchronous steps a batch is masked when the output of the batch before it is known.

Grammars come from clients. Their size is limited, and so are the memory and the time that llguidance may take. Its
stack is large enough for any nesting within that size.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from workbench.config import SamplingParams
from workbench.engine.sampler import Logits
from workbench.models.load import LoadedModel
from workbench.models.tokenizer import Tokenizer
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.request import Request

T = TypeVar("T")

MAX_GRAMMAR_BYTES = 1 << 16
"""Maximum size of a grammar or schema."""

COMPILE_STACK = 256 << 20
"""Stack of the compiling thread in bytes, of which a grammar uses what it needs: llguidance recurses into references,
and ends the process if its stack is too small. Half of this is enough for the worst grammar of MAX_GRAMMAR_BYTES."""

LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Limits of llguidance: about a tenth of its defaults, which are seconds and hundreds of megabytes."""


class Grammar:
    """The grammar of one request.

    Args:
        matcher: Its compiled form, when it is there.
        num_prompt_tokens: Tokens of the request that it does not apply to.
        vocab_size: Number of logits in a row.
        end_tokens: Tokens that end an output.
    """

    def __init__(
        self, matcher: Future[LLMatcher], num_prompt_tokens: int, vocab_size: int, end_tokens: frozenset[int]
    ) -> None:
        self._compiling = matcher
        self._num_consumed = num_prompt_tokens
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens

    @property
    def is_ready(self) -> bool:
        """Whether it has been compiled."""
        return self._compiling.done() and self._compiling.exception() is None

    @property
    def error(self) -> str:
        """Why it cannot be compiled; "" if nothing is wrong."""
        problem = self._compiling.exception() if self._compiling.done() else None
        return str(problem) if problem is not None else ""

    def wait(self) -> None:
        """Wait until it is ready, or cannot be compiled."""
        self._compiling.exception()

    @cached_property
    def _matcher(self) -> LLMatcher:
        return self._compiling.result()

    def masks(self, token_ids: Sequence[int], drafts: Sequence[int]) -> list[np.ndarray]:
        """The tokens that are allowed after a request's tokens, and after each of its drafts.

        Args:
            token_ids: Prompt and output.
            drafts: The drafts that the step verifies.

        Returns:
            bool [vocab_size] for the last token and for each draft, up to the first draft that is not allowed: what
            comes after that one is thrown away.

        Raises:
            ValueError: The output is not what the grammar allows, or has become too complex for it.
        """
        self._follow(token_ids)
        found = [self._allowed()]
        num_ahead = 0
        for draft in drafts:
            if not 0 <= draft < self._vocab_size or not found[-1][draft] or draft in self._end_tokens:
                break
            self._matcher.consume_token(draft)
            num_ahead += 1
            found.append(self._allowed())
        self._matcher.rollback(num_ahead)
        return found

    def num_valid(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Number of leading drafts that the grammar allows after a request's tokens."""
        self._follow(token_ids)
        return self._matcher.validate_tokens(list(drafts))

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that have become known."""
        if len(token_ids) > self._num_consumed:
            if not self._matcher.consume_tokens(list(token_ids[self._num_consumed :])):
                raise ValueError(f"structured_outputs: the grammar cannot continue: {self._problem()}")
            self._num_consumed = len(token_ids)

    def _allowed(self) -> np.ndarray:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ValueError(f"structured_outputs: the grammar cannot continue: {self._problem()}")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(bool)

    def _problem(self) -> str:
        return first_line(self._matcher.get_error())


class GrammarCompiler:
    """Compiles the grammars of one model's requests.

    Args:
        model: The model, whose tokens a grammar allows or not.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def compile(self, sampling: SamplingParams, num_prompt_tokens: int) -> Grammar | None:
        """The grammar of a request, checked here and compiled meanwhile; None if its output is free.

        Raises:
            ValueError: It is not valid, or too large; or the model has no tokenizer, or no token that ends an output.
        """
        wanted = sampling.structured_outputs
        if not wanted:
            return None
        ends = self._model.eos_token_ids
        if self._model.tokenizer is None or not ends:
            raise ValueError("structured_outputs needs a model with a tokenizer and an end-of-sequence token")
        text = grammar_text(wanted)
        if problem := self._submit(lambda: LLMatcher.validate_grammar(text, limits=LIMITS)).result():
            raise ValueError(f"structured_outputs[{next(iter(wanted))!r}] is not valid: {first_line(problem)}")
        matcher = self._submit(lambda: self._matcher(text))
        return Grammar(matcher, num_prompt_tokens, self._model.vocab_size, frozenset(ends))

    def _matcher(self, text: str) -> LLMatcher:
        """A compiled grammar. Its first mask takes the longest, and finds out whether there is any output at all."""
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"structured_outputs: the grammar cannot be used: {first_line(matcher.get_error())}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer, size, ends = self._model.tokenizer, self._model.vocab_size, sorted(self._model.eos_token_ids)
        assert tokenizer is not None
        serialized = getattr(tokenizer, "serialized", None)
        if serialized is not None and (content := serialized()) is not None:
            return LLTokenizer(content, n_vocab=size, eos_token=ends)
        return LLTokenizer(_TokenTexts(tokenizer, size, ends), n_vocab=size, eos_token=ends)  # type: ignore[arg-type]

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="workbench-grammar")
                usual = threading.stack_size(COMPILE_STACK)
                try:
                    self._thread.submit(int).result()  # starts the thread
                finally:
                    threading.stack_size(usual)
            return self._thread.submit(work)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def grammar_text(wanted: Mapping[str, Any]) -> str:
    """The grammar that llguidance compiles for ``SamplingParams.structured_outputs``.

    Raises:
        ValueError: It is too large, or cannot be read.
    """
    ((kind, value),) = wanted.items()
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"structured_outputs[{kind!r}] is not JSON: {problem}") from None
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"structured_outputs[{kind!r}] holds {size:,} bytes: allowed are up to {MAX_GRAMMAR_BYTES:,}")
    try:
        match kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(text)
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}')
            case "regex":
                return LLMatcher.grammar_from_regex(text)
            case "choice":
                words = " | ".join(json.dumps(word, ensure_ascii=False) for word in value)
                return LLMatcher.grammar_from_lark(f"start: {words}")
        return grammar_from("grammar", text)
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"structured_outputs[{kind!r}] is not valid: {first_line(str(problem))}") from None


def constrain(logits: Logits, batch: ScheduledBatch) -> Logits:
    """The logits of a step with the masks of the requests that have grammars."""
    best, masks, errors = list(logits.best), {}, {}
    row = 0
    for chunk in batch.chunks:
        request, grammar = chunk.request, chunk.request.grammar
        if not chunk.samples:
            continue
        if isinstance(grammar, Grammar) and request.status != "finished":
            try:
                for index, allowed in enumerate(grammar.masks(request.token_ids, chunk.drafts), row):
                    masks[index] = allowed
                    if best[index] >= 0 and not allowed[best[index]]:
                        best[index] = int(np.where(allowed, logits.rows[index], -np.inf).argmax())
            except ValueError as problem:
                best[row], errors[row] = -1, str(problem)
        row += 1 + len(chunk.drafts)
    return Logits(logits.values, best, masks, errors)


def allowed_drafts(request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts of a request up to the first that its grammar does not allow."""
    grammar = request.grammar
    return drafts[: grammar.num_valid(request.token_ids, drafts)] if isinstance(grammar, Grammar) else drafts


def first_line(message: str) -> str:
    """The first line of an error message, shortened."""
    return message.strip().partition("\n")[0][:300]


class _TokenTexts:
    """A vocabulary as LLTokenizer takes it, for a tokenizer that is known by its texts alone.

    A token that is no whole character counts as special, which no grammar allows.

    Args:
        tokenizer: The tokenizer.
        vocab_size: Number of logits in a row.
        ends: Tokens that end an output.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        anchor = next((token for token in range(tokenizer.vocab_size) if tokenizer.decode([token])), 0)
        length = len(tokenizer.decode([anchor]))  # behind another token, a word keeps the space before it
        texts = [tokenizer.decode([anchor, token])[length:] for token in range(tokenizer.vocab_size)]
        self.tokens = [
            b"" if token in ends or "\N{REPLACEMENT CHARACTER}" in text else text.encode("utf-8", "replace")
            for token, text in enumerate(texts)
        ]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self.eos_token_id = ends[0]
        self._ids = {text: token for token, text in reversed(list(enumerate(self.tokens))) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that a grammar prescribes, the longest first; up to a byte that no token has."""
        rest, found = text.encode() if isinstance(text, str) else bytes(text), []
        while rest:
            lengths = range(min(len(rest), self._longest), 0, -1)
            length = next((length for length in lengths if rest[:length] in self._ids), 0)
            if not length:
                break
            found.append(self._ids[rest[:length]])
            rest = rest[length:]
        return found
