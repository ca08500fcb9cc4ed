"""The distribution that a token is drawn from, by temperature, min_p, top_k and top_p.

`filter_by_sorting` and `draw` say what is kept and drawn. They rank the whole vocabulary, which takes as long as a
forward pass. `kept_tokens` finds the same tokens without: it ranks candidates, and knows the tokens above them by
their sums. Its sums are rounded in another order, so it answers None if a decision is as close as rounding can be, and
the ranking decides.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.kernels.cpu.attention.object_code import NotCompiled, compiling_elsewhere
from workbench.kernels.cpu.weight_sums import BLOCK, sum_weights, sum_with_numpy

if TYPE_CHECKING:
    from workbench.config import SamplingParams

_ROUNDING = 1e-9
"""Decisions closer than this part of a sum, or of a probability, may be made by rounding. The sums of both ways agree
to 1e-10 for ten million tokens."""

_MAX_QUOTIENT = 1e5  # of a logit and the temperature; beyond, it has too few digits
_SMALLEST = 1e-300  # probabilities below have too few digits
_UNDERFLOW = -746.0  # e to this power is 0

_SAMPLE = 4096  # logits that say about where top_p is reached; fewer candidates are ranked at once
_SPREAD = 64  # of the rank in a sample

_NO_TOKENS = np.empty(0, np.int64)


def drawn_from(adjusted: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities by temperature, top_k, top_p and min_p of adjusted logits, float64 [vocab_size]; not normalised."""
    return filter_probabilities(log_softmax(adjusted / params.temperature), params.top_k, params.top_p, params.min_p)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [vocab_size]."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def filter_probabilities(logprobs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities with the unlikely tokens set to 0; not normalised.

    Args:
        logprobs: float64 [vocab_size], after temperature.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches top_p (Holtzman et al., 2020).
        min_p: Drop tokens less likely than min_p times the most likely one (Nguyen et al., 2024).

    Returns:
        float64 [vocab_size]; the most likely token is always kept.
    """
    kept = kept_tokens(Row(logprobs, 1.0), top_k, top_p, min_p)
    if kept is None:
        return filter_by_sorting(logprobs, top_k, top_p, min_p)
    is_kept = logprobs > kept.above
    is_kept[kept.tokens] = True
    tokens = np.flatnonzero(is_kept)
    probabilities = np.zeros_like(logprobs)
    probabilities[tokens] = np.exp(logprobs[tokens])
    return probabilities


def filter_by_sorting(logprobs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """`filter_probabilities`, by a ranking of the whole vocabulary."""
    probabilities = np.exp(logprobs)
    if min_p > 0.0:
        probabilities[probabilities < min_p * probabilities.max()] = 0.0
    if 0 < top_k < len(probabilities) or top_p < 1.0:
        # Ties are broken by token id, so that the kept set does not depend on the sort.
        order = np.argsort(-probabilities, kind="stable")
        if 0 < top_k < len(order):
            probabilities[order[top_k:]] = 0.0
        if top_p < 1.0:
            ranked = probabilities[order]
            before = np.cumsum(ranked) - ranked
            probabilities[order[before >= top_p * ranked.sum()]] = 0.0
    return probabilities


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """Draw a token by inverting the cumulative distribution at ``uniform`` in [0, 1)."""
    cumulative = np.cumsum(probabilities)
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def draw_token(adjusted: np.ndarray, params: SamplingParams, uniform: float) -> int:
    """The token that `draw` draws from `drawn_from`.

    Args:
        adjusted: The adjusted logits, float32 or float64 [vocab_size]; the largest is finite.
        params: A request's parameters, with a temperature over 0.
        uniform: A number in [0, 1).
    """
    row = Row(adjusted, params.temperature)
    kept = kept_tokens(row, params.top_k, params.top_p, params.min_p)
    token = None if kept is None else _drawn(row, kept, uniform)
    if token is not None:
        return token
    logprobs = log_softmax(adjusted.astype(np.float64) / params.temperature)
    return draw(filter_by_sorting(logprobs, params.top_k, params.top_p, params.min_p), uniform)


class Row:
    """The logits of a row at a temperature.

    Args:
        logits: float32 or float64 [vocab_size]; the largest is finite.
        temperature: Divides them.

    Attributes:
        largest: The largest logit. The weight of a token is its probability as a part of that of the largest.
    """

    def __init__(self, logits: np.ndarray, temperature: float) -> None:
        self.logits = logits
        self.temperature = temperature
        self.largest = float(logits.max())

    def weights(self, logits: np.ndarray) -> np.ndarray:
        """Weights of some logits, float64."""
        return np.exp(logits.astype(np.float64) / self.temperature - self.largest / self.temperature)

    def sums(self, low: float, high: float = np.inf) -> np.ndarray:
        """Sums of the weights over two limits, see `sum_weights`; float64 [2, ceil(vocab_size / `BLOCK`)]."""
        sums = np.empty((2, -(-len(self.logits) // BLOCK)))
        logits = self.logits.astype(np.float64, copy=False)
        with compiling_elsewhere():
            try:
                sum_weights(logits, self.largest, 1.0 / self.temperature, low, high, sums)
            except NotCompiled:
                sum_with_numpy(logits, self.largest, 1.0 / self.temperature, low, high, sums)
        return sums

    def log_probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Log-probabilities of some logits, float64."""
        return (logits.astype(np.float64) - self.largest) / self.temperature - math.log(self.sums(-np.inf)[0].sum())

    def is_close(self, logits: np.ndarray, other: float) -> bool:
        """Whether one of some logits, but not the largest, gives the same weight as another but for rounding."""
        near = np.abs(logits - np.float64(other)) <= _ROUNDING * self.temperature
        return bool((logits[near] != self.largest).any())

    def below(self, limit: float) -> float:
        """The last number of the logits' type up to a limit, below the largest logit: comparisons with it are exact."""
        rounded = self.logits.dtype.type(limit)
        return float(rounded if rounded <= limit and rounded < self.largest else np.nextafter(rounded, -np.inf))

    def reached_by(self, count: int) -> float:
        """A number that ``count`` logits reach, and not many more."""
        columns = len(self.logits) // BLOCK
        several = self.logits
        if 2 * count <= columns:  # the largest of each column: as many logits reach what ``count`` of these reach
            several = self.logits[: columns * BLOCK].reshape(BLOCK, columns).max(axis=0)
        return float(np.partition(several, len(several) - count)[len(several) - count])


class Kept(NamedTuple):
    """The tokens that a token is drawn from: all with a logit over a limit, and some more.

    Attributes:
        above: The limit.
        sums: Sums of the weights of the tokens over the limit, float64 [ceil(vocab_size / `BLOCK`)]; None if there are
            no such tokens.
        tokens: The others, in order, int64.
    """

    above: float
    sums: np.ndarray | None
    tokens: np.ndarray


def kept_tokens(row: Row, top_k: int, top_p: float, min_p: float) -> Kept | None:
    """The tokens that min_p, top_k and top_p keep; None if rounding could decide about one.

    Args:
        row: The logits.
        top_k: As in `filter_probabilities`, like ``top_p`` and ``min_p``.
        top_p: See there.
        min_p: See there.
    """
    logits, size = row.logits, len(row.logits)
    if abs(row.largest) > _MAX_QUOTIENT * row.temperature:
        return None
    count = top_k if 0 < top_k < size else size
    limit = row.largest + row.temperature * (math.log(min_p) if min_p > 0.0 else _UNDERFLOW)
    floor = row.below(limit)  # no logit is as close to the limit, or rounding could decide
    if count < size or min_p > 0.0:
        lowest = max(limit, row.reached_by(count)) if count < size else limit
        tokens = np.flatnonzero(logits >= row.below(lowest - 2 * _ROUNDING * row.temperature))
        values = logits[tokens]
        if min_p > 0.0 and row.is_close(values, limit):
            return None
        if count < size or len(tokens) <= _SAMPLE:
            return _of_few(row, tokens, values, floor, count, top_p)
    if top_p == 1.0:
        return Kept(floor, row.sums(floor)[0], _NO_TOKENS)
    return _nucleus(row, floor, top_p)


def _of_few(row: Row, tokens: np.ndarray, values: np.ndarray, floor: float, count: int, top_p: float) -> Kept | None:
    """The ``count`` most likely tokens over a logit, and those that top_p keeps of them.

    Args:
        row: The logits.
        tokens: All that can be among them, in order.
        values: Their logits.
        floor: The logit.
        count: Maximum number.
        top_p: As in `filter_probabilities`.
    """
    ranked = np.sort(values)[::-1]
    weights = row.weights(ranked[:count][ranked[:count] > floor])
    number = len(weights)
    if top_p < 1.0:
        total = float(weights.sum())
        number = _num_before(weights, 0.0, top_p * total, total)
    if not number or weights[number - 1] < _SMALLEST:
        return None
    chosen = _first(row, tokens, values, ranked, number)
    return None if chosen is None else Kept(np.inf, None, chosen)


def _nucleus(row: Row, floor: float, top_p: float) -> Kept | None:
    """The tokens that top_p keeps of those over a logit; None if rounding could decide about one.

    A sample of the logits says near which logit their sum reaches top_p. If it misleads, the candidates are all tokens
    that are not too unlikely: the others are together less likely than 1 - top_p.
    """
    sample = np.sort(row.logits[:: max(1, len(row.logits) // _SAMPLE)])[::-1]
    sums = np.cumsum(np.where(sample > floor, row.weights(sample), 0.0))
    rank = int(np.searchsorted(sums, top_p * sums[-1]))
    high = float(sample[rank - _SPREAD]) if rank >= _SPREAD else np.inf
    low = float(sample[rank + _SPREAD]) if rank + _SPREAD < len(sample) else floor
    over_floor, over_high = row.sums(floor, high)
    total = float(over_floor.sum())
    kept = _reaching(row, (max(low, floor), high), over_high, floor, top_p, total)
    if kept is not None:
        return kept
    unlikely = row.largest + row.temperature * (math.log((1.0 - top_p) * total / len(row.logits)) - 2 * _ROUNDING)
    return _reaching(row, (max(row.below(unlikely), floor), np.inf), np.zeros(1), floor, top_p, total)


def _reaching(
    row: Row, between: tuple[float, float], over_high: np.ndarray, floor: float, top_p: float, total: float
) -> Kept | None:
    """The tokens that top_p keeps, if the least likely of them is between two logits.

    Args:
        row: The logits.
        between: The two logits, the lower one excluded.
        over_high: Sums of the weights over the higher one.
        floor: The logit over which there are tokens to keep.
        top_p: As in `filter_probabilities`.
        total: Sum of the weights of all tokens over ``floor``.
    """
    low, high = between
    tokens = np.flatnonzero((row.logits > low) & (row.logits <= high))
    values = row.logits[tokens]
    ranked = np.sort(values)[::-1]
    count = _num_before(row.weights(ranked), float(over_high.sum()), top_p * total, total)
    if not count or (count == len(ranked) and low > floor):
        return None
    chosen = _first(row, tokens, values, ranked, count)
    return None if chosen is None else Kept(high, over_high if high < np.inf else None, chosen)


def _num_before(weights: np.ndarray, start: float, needed: float, total: float) -> int:
    """Number of weights before which the sum, from ``start`` on, is less than needed; 0 if rounding could decide."""
    before = start + np.cumsum(weights) - weights
    count = int(np.searchsorted(before, needed))
    near = np.abs(before[max(0, count - 1) : count + 1] - needed) <= _ROUNDING * total
    return 0 if near.any() else count


def _first(row: Row, tokens: np.ndarray, values: np.ndarray, ranked: np.ndarray, count: int) -> np.ndarray | None:
    """The ``count`` tokens with the largest logits, of equal ones the first; None if rounding could decide.

    Args:
        row: The logits of all tokens.
        tokens: The candidates, in order.
        values: Their logits.
        ranked: The same, the largest first.
        count: Number of tokens, at least 1.
    """
    last = ranked[count - 1]
    if count < len(ranked) and 0.0 < float(last) - float(ranked[count]) <= _ROUNDING * row.temperature:
        return None
    chosen = values > last
    equal = np.flatnonzero(values == last)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return tokens[chosen]


def _drawn(row: Row, kept: Kept, uniform: float) -> int | None:
    """The token at ``uniform`` in the cumulative distribution of those kept; None if rounding could decide."""
    weights, tokens, start = row.weights(row.logits[kept.tokens]), kept.tokens, 0.0
    total = float(weights.sum())
    if kept.sums is not None:  # find the block first, then the token in it
        blocks = np.cumsum(kept.sums + np.bincount(tokens // BLOCK, weights, len(kept.sums)))
        total = float(blocks[-1])
        block = int(np.searchsorted(blocks, uniform * total, side="right"))
        start = float(blocks[block - 1]) if block else 0.0
        first = block * BLOCK
        logits = row.logits[first : first + BLOCK]
        is_kept = logits > kept.above
        is_kept[tokens[slice(*np.searchsorted(tokens, (first, first + len(logits))))] - first] = True
        weights, tokens = np.where(is_kept, row.weights(logits), 0.0), np.arange(first, first + len(logits))
    ends = np.append(start, start + np.cumsum(weights))
    at = int(np.searchsorted(ends, uniform * total, side="right"))
    if at in (0, len(ends)) or (np.abs(ends[at - 1 : at + 1] - uniform * total) <= _ROUNDING * total).any():
        return None
    return int(tokens[at - 1])
