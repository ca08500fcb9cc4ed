"""Kept and drawn tokens, against the ranking of the whole vocabulary that the sampler used to make of every row."""

from collections import Counter

import numpy as np
import pytest

from workbench import SamplingParams
from workbench.engine import distribution
from workbench.engine.distribution import Row, draw_token, filter_probabilities, kept_tokens

VOCABULARIES, SHARES = (120, 49_152, 152_000), (0.95, 0.035, 0.015)
KINDS = {"peaked": 6.0, "flat": 0.3, "normal": 3.0, "ties": 3.0, "masked": 3.0, "equal": 0.0, "wide": 200.0}


def reference(logits, params):
    """Log-probabilities and kept probabilities, as the first version of the sampler computed them."""
    quotients = logits.astype(np.float64) / params.temperature
    shifted = quotients - quotients.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    probabilities = np.exp(logprobs)
    if params.min_p > 0.0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    if 0 < params.top_k < len(logits) or params.top_p < 1.0:
        order = np.argsort(-probabilities, kind="stable")
        if 0 < params.top_k < len(order):
            probabilities[order[params.top_k :]] = 0.0
        if params.top_p < 1.0:
            ranked = probabilities[order]
            before = np.cumsum(ranked) - ranked
            probabilities[order[before >= params.top_p * ranked.sum()]] = 0.0
    return logprobs, probabilities


def random_logits(rng, size, kind):
    logits = rng.normal(size=size) * KINDS[kind]
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    if kind == "masked":
        logits[rng.random(size) < 0.9] = -np.inf
        logits[rng.integers(size)] = 1.0
    logits = logits.astype(np.float32)
    if rng.random() < 0.3:  # penalties and biases change some logits in float64
        logits = logits.astype(np.float64)
        logits[rng.integers(size, size=20)] -= rng.random()
    return logits


def random_case(rng):
    size, kind = int(rng.choice(VOCABULARIES, p=SHARES)), str(rng.choice(list(KINDS)))
    params = SamplingParams(
        temperature=float(rng.choice([0.01, 0.3, 0.7, 1.0, 1.0, 1.5, 5.0])),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 1000, size - 1, size])),
        top_p=float(rng.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.95, 0.999])),
        min_p=float(rng.choice([0.0, 0.0, 0.01, 0.1, 0.5, 1.0])),
    )
    uniform = rng.random() if rng.random() < 0.95 else rng.choice([0.0, 1 - 2.0**-53])
    return random_logits(rng, size, kind), params, float(uniform), kind


def differences(rng, rows):
    """Number of rows that differ from the reference, and of those that were ranked."""
    counts = Counter()
    for _ in range(rows):
        logits, params, uniform, kind = random_case(rng)
        logprobs, probabilities = reference(logits, params)
        cumulative = np.cumsum(probabilities)
        expected = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        counts["tokens"] += draw_token(logits, params, uniform) != expected
        filtered = filter_probabilities(logprobs, params.top_k, params.top_p, params.min_p)
        counts["filtered"] += not np.array_equal(filtered, probabilities)
        row = Row(logits, params.temperature)
        is_ranked = kept_tokens(row, params.top_k, params.top_p, params.min_p) is None
        counts["ranked"] += is_ranked and kind not in ("equal", "wide")
    return counts


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_rows_keep_and_draw_the_same_as_a_ranking_of_everything(seed):
    counts = differences(np.random.default_rng(seed), 1000)
    assert (counts["tokens"], counts["filtered"]) == (0, 0)
    assert counts["ranked"] < 50  # the rows are hardly ever ranked as a whole


def test_a_sum_that_is_off_is_seen(monkeypatch):
    exact = Row.weights
    monkeypatch.setattr(Row, "weights", lambda row, logits: exact(row, logits) * np.linspace(1.0, 1.01, len(logits)))
    counts = differences(np.random.default_rng(0), 1000)
    assert counts["tokens"] and counts["filtered"]


def test_a_decision_that_rounding_could_make_is_left_to_the_ranking(monkeypatch):
    logits = np.zeros(100, np.float32)  # half of equal parts: the sum reaches top_p exactly, or not quite
    params = SamplingParams(temperature=1.0, top_p=0.5)
    assert kept_tokens(Row(logits, 1.0), 0, 0.5, 0.0) is None
    asked = []
    ranking = distribution.filter_by_sorting
    monkeypatch.setattr(distribution, "filter_by_sorting", lambda *given: asked.append(given) or ranking(*given))
    draw_token(logits, params, 0.3)
    assert len(asked) == 1
