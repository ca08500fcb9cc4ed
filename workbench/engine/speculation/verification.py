"""Verification of drafts: which of them the model would have sampled itself.

Row j of a chunk with k drafts gives the model's logits after j accepted drafts. Rows are taken in order, and the first
one whose token is not the draft ends the chunk; its token is kept, and the rows behind it are thrown away. If all
drafts are accepted, the last row gives one token more. So a chunk yields from 1 to k + 1 tokens.

- A draft that was not drawn at random is accepted if it equals the token that the model samples at its position. With
  the same keyed random number as without drafts, that is the token of the plain engine: text and seed agree for any
  drafts whatever.
- A draft x that was drawn from a distribution q is accepted with probability min(1, p(x) / q(x)), p being the
  model's distribution; if it is rejected, its place is taken by a token drawn from max(0, p - q), normalised
  (Leviathan et al., 2023). Then every token follows p exactly, but the text is another than without drafts. Drawing
  the draft, accepting it and drawing the replacement use three different random numbers of the same position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.engine.distribution import draw
from workbench.engine.sampler import (
    Logits,
    SampledToken,
    Sampler,
    is_plain_greedy,
    keyed_uniform,
    random_key,
    top_logprobs,
)
from workbench.engine.speculation.proposer import Drafts, TokenSequence

if TYPE_CHECKING:
    from workbench.config import SamplingParams

__all__ = ["accept_or_resample", "accepted", "draw_draft", "rejection_rule", "sample_step", "verify"]

log = logging.getLogger("workbench")


class Continued:
    """A request as the next row sees it: with the drafts that have been accepted so far."""

    def __init__(self, request: TokenSequence) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sampling = request.sampling
        self.token_ids = list(request.token_ids)


def sample_step(
    sampler: Sampler, logits: Logits, requests: Sequence[TokenSequence], drafts: Sequence[Drafts]
) -> list[list[SampledToken]]:
    """Sample the tokens of all chunks of a step that reach the last known token.

    Args:
        sampler: Samples rows.
        logits: For each request its row and those of its drafts.
        requests: The requests, with their tokens before this step.
        drafts: The drafts of each of them.

    Returns:
        One token or more for each request, or one error.
    """
    first, results = 0, []
    for request, draft in zip(requests, drafts):
        end = first + 1 + len(draft.token_ids)
        if not draft.token_ids or is_plain_greedy(request.sampling):  # no row needs the token of the one before
            tokens = [sampler.sample_row(logits, row, request) for row in range(first, end)]
            results.append(accepted(tokens, draft))
        else:
            results.append(verify(sampler, logits, first, request, draft))
        first = end
    return results


def accepted(tokens: Sequence[SampledToken], drafts: Drafts) -> list[SampledToken]:
    """The tokens of a chunk, given those of all of its rows: up to the first that is not the draft after its row."""
    for row, (token, draft) in enumerate(zip(tokens, drafts.token_ids)):
        if token.token_id != draft:
            return without_late_error(list(tokens[: row + 1]))
    return without_late_error(list(tokens))


def without_late_error(tokens: list[SampledToken]) -> list[SampledToken]:
    """The tokens of a chunk without an error behind them: the next step meets it again, in its first row."""
    return tokens[:-1] if len(tokens) > 1 and tokens[-1].token_id is None else tokens


def verify(sampler: Sampler, logits: Logits, first: int, request: TokenSequence, drafts: Drafts) -> list[SampledToken]:
    """Sample the tokens of one chunk, row by row.

    A row is looked at only if all drafts before it were accepted, so that logits of rejected rows play no part, and a
    sampler or logits processor with a memory is called once for each token.

    Args:
        sampler: Samples rows.
        logits: The rows of the step.
        first: Row of the request's last known token; those of its drafts follow.
        request: The request with its tokens before this step.
        drafts: Its drafts; -1 stands for padding, which is never accepted.

    Returns:
        One token or more; an error alone.
    """
    state = Continued(request)
    tokens: list[SampledToken] = []
    probabilities = drafts.probabilities if draws_at_random(state.sampling) else None
    for index, draft in enumerate((*drafts.token_ids, -1)):
        if draft >= 0 and probabilities is not None:
            row = first + index
            distribution, allowed = probabilities[index], logits.masks.get(row)
            token = accept_or_resample(sampler, logits.rows[row], state, draft, distribution, allowed)
        else:
            token = sampler.sample_row(logits, first + index, state)
        tokens.append(token)
        if token.token_id is None or token.token_id != draft:
            break
        state.token_ids.append(token.token_id)
    return without_late_error(tokens)


def draws_at_random(params: SamplingParams) -> bool:
    """Whether tokens are drawn from a distribution, rather than taken by argmax or by a callable."""
    return params.temperature > 0.0 and params.sampler is None


def accept_or_resample(
    sampler: Sampler,
    logits: np.ndarray,
    request: TokenSequence,
    draft: int,
    drafted_from: np.ndarray,
    allowed: np.ndarray | None = None,
) -> SampledToken:
    """Accept a draft that was drawn at random, or draw the token that takes its place.

    Args:
        sampler: Gives the model's distribution.
        logits: float32 [vocab_size].
        request: The request with the tokens before the draft.
        draft: The draft.
        drafted_from: The distribution it was drawn from, float64 [vocab_size].
        allowed: The tokens that the request's grammar allows; None for all.
    """
    try:
        raw = np.array(logits, dtype=np.float64)
        adjusted = sampler.adjusted(raw, request, allowed)
        target = sampler.distribution_of(adjusted, request)
    except Exception as problem:  # the same problem as without drafts
        log.exception("sampling for request %r failed; it ends with 'error'", request.request_id)
        return SampledToken(None, error=f"{type(problem).__name__}: {problem}")
    key, position = random_key(sampler.seed, request), len(request.token_ids)
    token = rejection_rule(target, drafted_from, draft, key, position)
    count = request.sampling.logprobs
    wanted = top_logprobs(raw, count, token) if count is not None else None
    top = sampler.top_tokens(raw, adjusted, request, token, allowed) if sampler.num_top_tokens else None
    return SampledToken(token, wanted, top=top)


def rejection_rule(target: np.ndarray, drafted_from: np.ndarray, draft: int, key: str, position: int) -> int:
    """The draft if it is accepted, else the token that takes its place (Leviathan et al., 2023, algorithm 1).

    Args:
        target: The model's distribution p, float64 [vocab_size], adds up to 1.
        drafted_from: The draft's distribution q, likewise.
        draft: A token drawn from q.
        key: Key of the request's random numbers.
        position: Position of the token.
    """
    if keyed_uniform(f"accept {key}", position) * drafted_from[draft] < target[draft]:
        return draft
    residual = np.maximum(target - drafted_from, 0.0)
    # p = q but for rounding: a draft is then hardly ever rejected, and p is the limit of the residual.
    residual = residual if residual.any() else target
    return draw(residual, keyed_uniform(f"resample {key}", position))


def draw_draft(distribution: np.ndarray, key: str, position: int) -> int:
    """Draw a draft token from a proposer's distribution, by a random number that serves nothing else."""
    return draw(distribution, keyed_uniform(f"draft {key}", position))
