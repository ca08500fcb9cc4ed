"""Sampling: from logits to tokens, for all rows of a step at once.

Random numbers are keyed by (request, position). Each token that is drawn at random uses exactly one uniform number,
and that number depends on nothing but the request's key and the position of the token. So the text of a request
does not depend on chunk size, on its batch mates, or on having been preempted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np

from workbench.base.threads import num_threads
from workbench.engine.distribution import Row, draw_token, drawn_from, filter_probabilities, log_softmax
from workbench.kernels.cpu.threads import share, thread_pool
from workbench.trace.readings.top_tokens import Candidate, TopTokens

if TYPE_CHECKING:
    from workbench.config import SamplingParams
    from workbench.engine.speculation.proposer import TokenSequence

log = logging.getLogger("workbench")

_WORTH_THREADS = 2**20  # logits that take longer to compare than waking threads


class SampledToken(NamedTuple):
    """One sampled token.

    Attributes:
        token_id: The token; None when the row's logits were not numbers, see ``error``.
        logprobs: {token_id: log-probability} of the most likely tokens and the sampled one, over the whole
            vocabulary, before penalties and temperature; None when the request did not ask.
        error: Why no token could be sampled.
        top: The tokens that were most likely beside it; None when the sampler was not asked to keep them.
    """

    token_id: int | None
    logprobs: dict[int, float] | None = None
    error: str = ""
    top: TopTokens | None = None


def random_key(seed: int, request: TokenSequence) -> str:
    """The key of a request's random numbers: its own seed, or the engine's seed and the request id."""
    own_seed = request.sampling.seed
    return f"seed {own_seed}" if own_seed is not None else f"engine {seed} {request.request_id}"


def keyed_bits(key: str, position: int) -> int:
    """64 random bits that depend on the key and the position alone (BLAKE2b as a counter-based generator)."""
    return int.from_bytes(hashlib.blake2b(f"{key}:{position}".encode(), digest_size=8).digest(), "little")


def keyed_uniform(key: str, position: int) -> float:
    """A uniform number in [0, 1) that depends on the key and the position alone.

    Example:
        >>> keyed_uniform("seed 7", 3) == keyed_uniform("seed 7", 3) != keyed_uniform("seed 7", 4)
        True
    """
    return (keyed_bits(key, position) >> 11) * 2.0**-53


@dataclass(frozen=True, eq=False)
class Logits:
    """The logits of a step.

    Attributes:
        values: float32 [num_rows, vocab_size], evaluated.
        best: The token of each row's largest logit that is allowed, -1 for a row that cannot be sampled.
        masks: For rows of a request with a grammar the tokens that it allows, bool [vocab_size].
        errors: For rows that cannot be sampled the reason, if it is not their logits.
    """

    values: mx.array
    best: list[int]
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, values: mx.array) -> Logits:
        """Logits whose largest are found here; waits for them if they are not evaluated."""
        return cls(values, most_likely_tokens(np.asarray(values)).tolist())

    @cached_property
    def rows(self) -> np.ndarray:
        """The values as a NumPy array, without a copy."""
        return np.asarray(self.values)


class Sampler:
    """Samples the rows of a step that finished their prefill, or decode.

    Args:
        seed: The engine's seed, for requests that have none.
        num_top_tokens: Number of most likely tokens that are kept with each sampled token.
    """

    def __init__(self, seed: int = 0, num_top_tokens: int = 0) -> None:
        self.seed = seed
        self.num_top_tokens = num_top_tokens

    def sample(self, logits: Logits, requests: Sequence[TokenSequence]) -> list[SampledToken]:
        """Sample one token per row of logits; see `sample_row`."""
        return [self.sample_row(logits, row, request) for row, request in enumerate(requests)]

    def sample_row(self, all_logits: Logits, row: int, request: TokenSequence) -> SampledToken:
        """Sample the next token of a request from one row.

        If the row cannot be sampled, because of its logits or of a callable of the request, there is an error instead.
        """
        best, is_plain = all_logits.best[row], is_plain_greedy(request.sampling)
        if best < 0:
            error = all_logits.errors.get(row, "the model returned logits that are not finite numbers")
            return SampledToken(None, error=error)
        if is_plain and not self.num_top_tokens:
            return SampledToken(best)
        logits, allowed = all_logits.rows[row], all_logits.masks.get(row)
        if is_plain:
            return SampledToken(best, top=self.top_tokens(logits, None, request, best, allowed))
        try:
            return self._sample_adjusted(logits, request, allowed)
        except Exception as problem:  # in a callable that came with the request: no other request is affected
            log.exception("sampling for request %r failed; it ends with 'error'", request.request_id)
            return SampledToken(None, error=f"{type(problem).__name__}: {problem}")

    def distribution(self, logits: mx.array, request: TokenSequence) -> np.ndarray:
        """The distribution that a request's next token is drawn from, float64 [vocab_size]; it adds up to 1.

        Args:
            logits: The model's logits, float32 [vocab_size].
            request: The request, whose temperature is over 0.

        Raises:
            ValueError: The logits, or the request's processors, leave no token to draw.
        """
        return self.distribution_of(self.adjusted(np.array(logits, dtype=np.float64), request), request)

    def distribution_of(self, adjusted: np.ndarray, request: TokenSequence) -> np.ndarray:
        """`distribution`, given the adjusted logits, float64 [vocab_size]."""
        if np.isnan(adjusted).any() or not np.isfinite(adjusted.max()):
            raise ValueError("no token is left to sample from")
        probabilities = drawn_from(adjusted, request.sampling)
        return probabilities / probabilities.sum()

    def top_tokens(
        self,
        logits: np.ndarray,
        adjusted: np.ndarray | None,
        request: TokenSequence,
        token: int,
        allowed: np.ndarray | None = None,
    ) -> TopTokens:
        """The ``num_top_tokens`` most likely tokens beside a sampled one.

        Args:
            logits: The model's logits, [vocab_size].
            adjusted: The same after biases, penalties and processors; None when there are none.
            request: The request.
            token: The sampled token.
            allowed: The tokens that its grammar allows; None for all.
        """
        raw = np.asarray(logits, dtype=np.float64)
        changed = raw if adjusted is None else np.asarray(adjusted, dtype=np.float64)
        return most_likely(raw, changed, request, token, self.num_top_tokens, allowed)

    def adjusted(self, raw: np.ndarray, request: TokenSequence, allowed: np.ndarray | None = None) -> np.ndarray:
        """Logits after biases, penalties, the request's own processors (see `adjust_logits`) and the grammar's mask."""
        adjusted = self._processed(adjust_logits(raw, request), request)
        return adjusted if allowed is None else np.where(allowed, adjusted, -np.inf)

    def _processed(self, adjusted: np.ndarray, request: TokenSequence) -> np.ndarray:
        processors = request.sampling.logits_processors
        if not processors:
            return adjusted
        processed = mx.array(adjusted.astype(np.float32))[None]
        history = mx.array(request.token_ids, dtype=mx.int32)
        for index, processor in enumerate(processors):
            processed = processor(history, processed)
            if processed.shape != (1, len(adjusted)):
                raise ValueError(
                    f"logits_processors[{index}] returned shape {processed.shape}, it must keep {(1, len(adjusted))}"
                )
        return np.array(processed[0].astype(mx.float32), dtype=np.float64)

    def _sample_adjusted(self, logits: np.ndarray, request: TokenSequence, allowed: np.ndarray | None) -> SampledToken:
        params = request.sampling
        adjusted = self.adjusted(logits, request, allowed)
        if not np.isfinite(adjusted.max()):
            return SampledToken(None, error="no token is left to sample from after the logits were adjusted")
        key, position = random_key(self.seed, request), len(request.token_ids)
        if params.sampler is not None:
            # mlx-lm's samplers draw from MLX's global state: keying it first makes them independent of the batch.
            mx.random.seed(keyed_bits(key, position))
            token = int(
                params.sampler(mx.array(log_softmax(adjusted.astype(np.float64)).astype(np.float32))[None]).item()
            )
            if not 0 <= token < len(logits):  # the next step would read past the end of the embedding
                raise ValueError(f"the sampler returned token {token}, the vocabulary is 0 to {len(logits) - 1}")
            if allowed is not None and not allowed[token]:
                raise ValueError(f"the sampler returned token {token}, which the grammar does not allow")
        elif params.temperature == 0.0:
            token = int(adjusted.argmax())
        else:
            token = draw_token(adjusted, params, keyed_uniform(key, position))
        wanted = top_logprobs(logits, params.logprobs, token) if params.logprobs is not None else None
        top = self.top_tokens(logits, adjusted, request, token, allowed) if self.num_top_tokens else None
        return SampledToken(token, wanted, top=top)


def most_likely_rows(logits: mx.array) -> mx.array:
    """`most_likely_tokens` as operations of MLX, int32 [num_rows]: evaluated with the logits, a step waits once."""
    # A row with a NaN anywhere sums to NaN; a row of -inf alone cannot be sampled either.
    broken = mx.isnan(mx.sum(logits, axis=-1)) | ~mx.isfinite(mx.max(logits, axis=-1))
    return mx.where(broken, mx.array(-1, mx.int32), mx.argmax(logits, axis=-1).astype(mx.int32))


def most_likely_tokens(logits: np.ndarray) -> np.ndarray:
    """The token of each row's largest logit, -1 for a row that cannot be sampled; logits are [num_rows, vocab_size].

    NumPy finds a NaN first, whatever else is in the row, and is ten times faster than MLX's operations on a CPU.
    """
    best = np.empty(len(logits), np.int64)
    if logits.size < _WORTH_THREADS:
        logits.argmax(axis=-1, out=best)
    else:
        _find_largest(logits, best)
    return np.where(np.isfinite(logits[np.arange(len(logits)), best]), best, -1)


def _find_largest(logits: np.ndarray, best: np.ndarray) -> None:
    """The largest of each row, with all threads."""
    threads = num_threads()

    def work_of(thread: int) -> None:
        first, stop = share(len(logits), thread, threads)
        logits[first:stop].argmax(axis=-1, out=best[first:stop])

    thread_pool(threads).run(work_of)


def is_plain_greedy(params: SamplingParams) -> bool:
    """True when the token is the argmax of the model's own logits and nothing more is asked for."""
    return (
        params.temperature == 0.0
        and params.logprobs is None
        and params.sampler is None
        and not params.logits_processors
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
    )


def adjust_logits(logits: np.ndarray, request: TokenSequence) -> np.ndarray:
    """Apply logit_bias and the three penalties; vLLM's order and meaning.

    ``repetition_penalty`` (Keskar et al., 2019) divides positive and multiplies negative logits of every token in
    prompt or output; ``frequency_penalty`` and ``presence_penalty`` (OpenAI) subtract per occurrence, and once, for
    tokens of the output alone.

    Args:
        logits: float32 or float64 [vocab_size]; not changed.
        request: The parameters and tokens to use.

    Returns:
        float64 [vocab_size]; the logits themselves if nothing is to be applied.
    """
    params = request.sampling
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    if not params.logit_bias and penalties == (1.0, 0.0, 0.0):
        return logits
    adjusted = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        adjusted[token] += bias
    if params.repetition_penalty != 1.0:
        seen = np.array(request.token_ids)  # a token that occurs twice gets the same value twice
        values = adjusted[seen]
        adjusted[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        output = request.token_ids[request.num_prompt_tokens :]
        if output:
            tokens, counts = np.unique(output, return_counts=True)
            adjusted[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    return adjusted


def most_likely(
    logits: np.ndarray,
    adjusted: np.ndarray,
    request: TokenSequence,
    token: int,
    count: int,
    allowed: np.ndarray | None = None,
) -> TopTokens:
    """The ``count`` most likely tokens and the sampled one, and what the sampling parameters made of them.

    Args:
        logits: The model's logits, float64 [vocab_size].
        adjusted: The same after biases, penalties and processors.
        request: The request.
        token: The sampled token.
        count: Number of tokens.
        allowed: The tokens that its grammar allows, of which as many are added; None for all.
    """
    top = _most_likely(logits, adjusted, request, token, count, allowed)
    if allowed is None:
        return top
    removed = min(1.0, float(np.exp(log_softmax(logits))[~allowed].sum()))
    num_allowed = int(allowed.sum())
    how = f"{top.how}; its grammar allows {num_allowed:,} tokens and removed {removed:.2%} of the probability"
    return msgspec.structs.replace(top, how=how, num_allowed=num_allowed, removed=removed)


def _most_likely(
    logits: np.ndarray,
    adjusted: np.ndarray,
    request: TokenSequence,
    token: int,
    count: int,
    allowed: np.ndarray | None,
) -> TopTokens:
    params, request_id = request.sampling, request.request_id
    logprobs = top_logprobs(logits, count, token)
    by_grammar: dict[int, str] = {}
    kept: Any = slice(None)
    if allowed is not None:
        free = np.flatnonzero(allowed)
        free = free[np.argsort(-logits[free], kind="stable")][:count]
        logprobs |= dict(zip(free.tolist(), Row(logits, 1.0).log_probabilities(logits[free]).tolist()))
        by_grammar, kept = {i: "grammar" for i in logprobs if not allowed[i]}, allowed
    probabilities = {i: min(1.0, float(np.exp(value))) for i, value in logprobs.items()}
    changed = "" if np.array_equal(adjusted[kept], logits[kept]) else " after penalties and biases"
    if params.sampler is not None:
        candidates = tuple(Candidate(i, p, None, by_grammar.get(i, "")) for i, p in probabilities.items())
        return TopTokens(request_id, token, candidates, f"chosen by the request's sampler{changed}")
    if params.temperature == 0.0:
        candidates = tuple(
            Candidate(i, p, float(i == token), by_grammar.get(i, "" if i == token else "temperature"))
            for i, p in probabilities.items()
        )
        return TopTokens(request_id, token, candidates, f"temperature 0 takes the most likely token{changed}")
    drawn_from = log_softmax(adjusted / params.temperature)
    removed_by = {i: "logits_processors" for i in probabilities if adjusted[i] == -np.inf} | by_grammar
    limits: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    drawn, how = np.exp(drawn_from), []
    for name in ("temperature", "min_p", "top_k", "top_p"):  # the order in which they apply
        if name in limits and getattr(params, name) != limits[name]:
            limits[name] = getattr(params, name)
            drawn = filter_probabilities(drawn_from, **limits)
            how.append(f"{name} {limits[name]:g}")
        removed_by = {i: name for i in probabilities if not drawn[i]} | removed_by
    left = f"; {' and '.join(how)} left {np.count_nonzero(drawn):,} of {len(drawn):,} tokens" if how else ""
    drawn /= drawn.sum()
    candidates = tuple(
        Candidate(i, p, min(1.0, float(drawn[i])), removed_by.get(i, "")) for i, p in probabilities.items()
    )
    return TopTokens(request_id, token, candidates, f"drawn at temperature {params.temperature:g}{changed}{left}")


def top_logprobs(logits: np.ndarray, count: int, token: int) -> dict[int, float]:
    """The ``count`` most likely tokens, most likely first, and ``token`` if it is not among them."""
    row = Row(logits, 1.0)
    best = np.flatnonzero(logits >= row.reached_by(min(count, len(logits)))) if count else np.empty(0, np.int64)
    ranked = best[np.argsort(-logits[best], kind="stable")][:count].tolist()
    if token not in ranked:
        ranked.append(token)
    return dict(zip(ranked, row.log_probabilities(logits[ranked]).tolist()))
