"""Sampling: each filter against a plain restatement or mlx-lm, and the promise that random numbers are keyed."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from workbench import SamplingParams
from workbench.engine import sampler
from workbench.engine.distribution import draw, filter_probabilities, log_softmax
from workbench.engine.sampler import Logits, Sampler, adjust_logits, keyed_uniform, top_logprobs
from workbench.scheduler.request import Request

VOCAB = 97


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def request(params, prompt=(5, 9, 9, 11), output=(), name="r"):
    made = Request(name, list(prompt), params)
    made.token_ids.extend(output)
    return made


def sample_one(logits, params, **kwargs):
    return Sampler(seed=3).sample(Logits.of(mx.array(logits[None].astype(np.float32))), [request(params, **kwargs)])[0]


def test_greedy_takes_the_largest_logit(rng):
    logits = rng.normal(size=(6, VOCAB)).astype(np.float32)
    requests = [request(SamplingParams(), name=f"r{i}") for i in range(6)]
    tokens = [s.token_id for s in Sampler().sample(Logits.of(mx.array(logits)), requests)]
    assert tokens == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
def test_a_distribution_adds_up_to_1(rng, filters):
    asked = request(SamplingParams(temperature=0.7, **filters))
    found = Sampler().distribution(mx.array(rng.normal(size=VOCAB).astype(np.float32)), asked)
    assert found.sum() == pytest.approx(1) and (found > 0).sum() < VOCAB + (not filters)


def test_no_rows_give_no_tokens():
    assert Sampler().sample(Logits.of(mx.zeros((0, VOCAB))), []) == []


def test_draws_follow_the_distribution(rng):
    logits = rng.normal(size=VOCAB) * 2
    probabilities = np.exp(log_softmax(logits))
    draws = np.bincount(
        [draw(probabilities, keyed_uniform("seed 1", position)) for position in range(40_000)], minlength=VOCAB
    )
    # Pearson's chi-square over the tokens that are expected often enough; 5 sigma.
    expected = probabilities * 40_000
    often = expected > 20
    statistic = ((draws - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_random_numbers_depend_on_key_and_position_alone():
    uniforms = {keyed_uniform(key, position) for key in ("a", "b") for position in range(500)}
    assert len(uniforms) == 1000
    assert all(0.0 <= u < 1.0 for u in uniforms)
    assert keyed_uniform("a", 17) == keyed_uniform("a", 17)


def test_a_row_samples_the_same_alone_and_in_any_company(rng):
    logits = rng.normal(size=(8, VOCAB)).astype(np.float32)
    params = SamplingParams(temperature=1.3, top_p=0.9)
    requests = [request(params, name=f"r{i}") for i in range(8)]
    together = [s.token_id for s in Sampler(3).sample(Logits.of(mx.array(logits)), requests)]
    order = rng.permutation(8)
    shuffled = Sampler(3).sample(Logits.of(mx.array(logits[order])), [requests[i] for i in order])
    alone = [Sampler(3).sample(Logits.of(mx.array(logits[i][None])), [requests[i]])[0].token_id for i in range(8)]
    assert alone == together
    assert [s.token_id for s in shuffled] == [together[i] for i in order]
    assert len(set(together)) > 1
    other_engine_seed = [s.token_id for s in Sampler(4).sample(Logits.of(mx.array(logits)), requests)]
    assert other_engine_seed != together


def test_a_seed_makes_the_text_independent_of_the_request_id(rng):
    logits = rng.normal(size=VOCAB)
    params = SamplingParams(temperature=1.0, seed=11)
    tokens = {sample_one(logits, params, name=f"name{i}").token_id for i in range(10)}
    assert len(tokens) == 1


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (12, 0.8, 0.05), (1, 1.0, 0.0)]
)
def test_filters_keep_what_a_plain_loop_keeps(rng, top_k, top_p, min_p):
    for _ in range(20):
        logprobs = log_softmax(rng.normal(size=VOCAB) * 3)
        probabilities = np.exp(logprobs)
        kept = {t for t in range(VOCAB) if probabilities[t] >= min_p * probabilities.max()}
        ranked = sorted(kept, key=lambda t: -probabilities[t])[: top_k or VOCAB]
        total, reached, nucleus = sum(probabilities[t] for t in ranked), 0.0, set()
        for token in ranked:
            if reached >= top_p * total:
                break
            nucleus.add(token)
            reached += probabilities[token]
        filtered = filter_probabilities(logprobs, top_k, top_p, min_p)
        assert set(np.flatnonzero(filtered)) == nucleus


def test_penalties_and_bias_agree_with_mlx_lm(rng):
    logits = rng.normal(size=VOCAB)
    output = [3, 3, 40, 3, 77]
    params = SamplingParams(presence_penalty=0.6, frequency_penalty=0.3, logit_bias={8: 2.5, 3: -1.0})
    ours = adjust_logits(logits, request(params, output=output))
    theirs = mx.array(logits.astype(np.float32))[None]
    for processor in make_logits_processors(logit_bias={8: 2.5, 3: -1.0}, presence_penalty=0.6, frequency_penalty=0.3):
        theirs = processor(mx.array(output), theirs)
    np.testing.assert_allclose(ours, np.array(theirs[0]), atol=1e-5)
    repeated = adjust_logits(logits, request(SamplingParams(repetition_penalty=1.4), output=output))
    [processor] = make_logits_processors(repetition_penalty=1.4, repetition_context_size=100)
    theirs = processor(mx.array([5, 9, 9, 11, *output]), mx.array(logits.astype(np.float32))[None])
    np.testing.assert_allclose(repeated, np.array(theirs[0]), atol=1e-5)
    assert not np.allclose(repeated, logits)


def test_mlx_lm_callables_are_keyed_too(rng):
    logits = rng.normal(size=VOCAB)
    params = SamplingParams(sampler=make_sampler(temp=1.0), logits_processors=make_logits_processors({4: -50.0}))
    first = sample_one(logits, params).token_id
    mx.random.uniform(shape=(10,))
    assert sample_one(logits, params).token_id == first
    later = {sample_one(logits, params, output=range(n)).token_id for n in range(30)}
    assert len(later) > 3 and 4 not in later


def test_logprobs_are_of_the_raw_logits_and_hold_the_sampled_token(rng):
    logits = rng.normal(size=VOCAB)
    reference = logits - np.log(np.exp(logits).sum())
    sampled = sample_one(logits, SamplingParams(temperature=3.0, logprobs=4, logit_bias={60: 100.0}))
    assert sampled.token_id == 60
    assert list(sampled.logprobs)[:4] == np.argsort(-logits)[:4].tolist()
    for token, value in sampled.logprobs.items():
        assert value == pytest.approx(reference[token], abs=1e-5)
    assert 60 in sampled.logprobs
    assert top_logprobs(logits, 0, 12) == {12: pytest.approx(reference[12])}


def test_broken_logits_fail_their_row_alone(rng):
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    logits[1, 50] = np.nan
    requests = [request(SamplingParams(temperature=t), name=f"r{t}") for t in (0.0, 1.0, 1.0)]
    good, bad, also_good = Sampler().sample(Logits.of(mx.array(logits)), requests)
    assert bad.token_id is None and "not finite" in bad.error
    assert good.token_id is not None and also_good.token_id is not None


@pytest.mark.parametrize("threads", ["1", "2", "8"])
def test_threads_find_the_largest_logits_of_their_rows(threads, rng, monkeypatch):
    monkeypatch.setattr(sampler, "_WORTH_THREADS", 1)
    monkeypatch.setenv("WORKBENCH_THREADS", threads)
    logits = rng.standard_normal((5, 50)).astype(np.float32)
    logits[1, 7], logits[2] = np.nan, -np.inf
    logits[3, [4, 9]] = 10.0  # the first of two equal ones
    largest = [int(np.argmax(row)) for row in logits]
    assert sampler.most_likely_tokens(logits).tolist() == [largest[0], -1, -1, 4, largest[4]]


def test_minus_infinity_is_a_legal_logit(rng):
    logits = rng.normal(size=VOCAB)
    logits[10:] = -np.inf
    for temperature in (0.0, 1.0):
        assert sample_one(logits, SamplingParams(temperature=temperature)).token_id < 10
