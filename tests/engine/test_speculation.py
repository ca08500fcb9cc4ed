"""Proposers, and the verification of drafts: which tokens are kept, and their distribution."""

import itertools
import logging

import mlx.core as mx
import numpy as np
import pytest

from workbench import SamplingParams
from workbench.engine.distribution import draw
from workbench.engine.sampler import Logits, Sampler, keyed_uniform, random_key
from workbench.engine.speculation import verification
from workbench.engine.speculation.adaptive import AdaptiveDrafts
from workbench.engine.speculation.custom import CustomProposer, checked_drafts
from workbench.engine.speculation.ngram import NgramProposer, find_drafts
from workbench.engine.speculation.proposer import ComputedChunk, Drafts
from workbench.engine.speculation.verification import draw_draft, sample_step
from workbench.scheduler.request import Request

VOCAB = 53


def request(params=None, prompt=(5, 9, 9, 11), output=(), name="r"):
    made = Request(name, list(prompt), params or SamplingParams())
    made.token_ids.extend(output)
    return made


def chunk(tokens, num_drafts):
    return ComputedChunk(request(prompt=tokens), (1,), 0, len(tokens), num_drafts)


# -- n-gram ---------------------------------------------------------------------------------------------------


def slow_find_drafts(tokens, count, shortest, longest):
    """vLLM's rule read aloud: the longest n-gram, the first place."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + count]
    return []


def test_ngram_drafts_follow_the_rule():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(1500):
        tokens = rng.integers(0, rng.integers(1, 9), rng.integers(1, 40)).tolist()
        shortest, extra, count = (int(n) for n in (rng.integers(1, 5), rng.integers(0, 4), rng.integers(1, 7)))
        ours = find_drafts(tokens, count, shortest, shortest + extra)
        assert ours == slow_find_drafts(tokens, count, shortest, shortest + extra), tokens
        found += len(ours) > 0
    assert 300 < found < 1400


def test_ngram_prefers_the_longest_match_and_then_the_first():
    text = [1, 2, 3, 7, 2, 3, 8, 1, 2, 3]
    assert find_drafts(text, 2, 2, 3) == [7, 2]
    assert find_drafts(text, 9, 1, 1) == [7, 2, 3, 8, 1, 2, 3]
    assert find_drafts([4, 4, 4], 5, 1, 2) == [4]
    assert find_drafts([1, 2, 3], 5, 1, 2) == []
    assert NgramProposer(2, 3).propose([chunk(text, 2), chunk(text, 0)]) == [Drafts((7, 2)), Drafts()]


# -- a function of the user's own -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([1, 2, 3], "more than 2 drafts"),
        ([VOCAB], rf"drafts\[0\]={VOCAB} is outside the vocabulary: 0 to {VOCAB - 1}"),
        ([1, -1], r"drafts\[1\]=-1 is outside"),
        ([1.5], r"drafts\[0\] must be a token id"),
        ([True], r"drafts\[0\] must be a token id"),
        ("12", "must return a list"),
        (None, "must return a list"),
    ],
)
def test_drafts_of_a_function_are_checked(drafts, message, caplog):
    with pytest.raises(ValueError, match=message):
        checked_drafts(drafts, 2, VOCAB)
    proposer = CustomProposer(lambda tokens, count: drafts, VOCAB)
    with caplog.at_level(logging.ERROR, logger="workbench"):
        assert proposer.propose([chunk([1, 2], 2)] * 3) == [Drafts()] * 3
    assert len(caplog.records) == 1 and "request 'r' has no drafts" in caplog.text


def test_a_function_gives_drafts():
    proposer = CustomProposer(lambda tokens, count: mx.array(tokens[:count]), VOCAB)
    assert proposer.propose([chunk([1, 2, 3], 2), chunk([4], 2), chunk([4], 0)]) == [
        Drafts((1, 2)),
        Drafts((4,)),
        Drafts(),
    ]
    with pytest.raises(ValueError, match="must be a function"):
        CustomProposer("ngram", VOCAB)


# -- adaptive -------------------------------------------------------------------------------------------------


def test_drafts_that_are_always_rejected_become_rare():
    adaptive = AdaptiveDrafts(8)
    counts = []
    for _ in range(1000):
        counts.append(adaptive.next("r"))
        if counts[-1]:
            adaptive.note("r", counts[-1], 0)
    assert counts[:5] == [8, 4, 2, 1, 0]
    assert sum(counts) < 30 and counts[300:].count(1) in range(1, 6)


def test_drafts_come_back_with_the_first_acceptance():
    adaptive = AdaptiveDrafts(8)
    while count := adaptive.next("r"):
        adaptive.note("r", count, 0)
    while not adaptive.next("r"):
        pass
    for expected in (2, 4, 8, 8):
        adaptive.note("r", max(1, expected // 2), max(1, expected // 2))
        assert adaptive.next("r") == expected
    adaptive.note("r", 8, 4)
    assert adaptive.next("r") == 8
    assert adaptive.next("another") == 8
    adaptive.forget("r")
    assert adaptive._progress == {}


# -- verification ---------------------------------------------------------------------------------------------

PARAMS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=1.0, seed=5),
    "filtered": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.9, seed=2
    ),
    "greedy penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={3: 1.5}),
    "logprobs": SamplingParams(temperature=1.2, logprobs=3, seed=1),
}


def markov(tokens):
    """Logits that depend on the last two tokens alone, float32 [VOCAB]."""
    return np.random.default_rng([token + 1 for token in tokens[-2:]]).normal(size=VOCAB).astype(np.float32)


def plain_tokens(params, count):
    """Tokens one at a time, without drafts."""
    state = request(params)
    made = []
    for _ in range(count):
        made += Sampler(3).sample(Logits.of(mx.array(markov(state.token_ids)[None])), [state])
        state.token_ids.append(made[-1].token_id)
    return made


def rows_of(state, drafts):
    """Logits of the last token's row and of those of the drafts."""
    return [markov([*state.token_ids, *drafts[:n]]) for n in range(len(drafts) + 1)]


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_no_token(name):
    """Drafts that are right, wrong at some place, padding, or absent, for several requests at once."""
    rng = np.random.default_rng(1)
    expected = plain_tokens(PARAMS[name], 12)
    ids = [token.token_id for token in expected]
    for _ in range(12):
        states, drafts, logits = [], [], []
        for index in range(3):
            done, count = int(rng.integers(0, 6)), int(rng.integers(0, 5))
            states.append(request(PARAMS[name], output=ids[:done]))
            tokens = ids[done : done + count]
            if tokens and rng.random() < 0.6:
                place = rng.integers(len(tokens))
                tokens[place] = -1 if index == 2 else (tokens[place] + 1) % VOCAB
            drafts.append(Drafts(tuple(tokens)))
            logits += rows_of(states[-1], tokens)
        results = sample_step(Sampler(3), Logits.of(mx.array(np.array(logits))), states, drafts)
        for state, draft, result in zip(states, drafts, results, strict=True):
            done = len(state.token_ids) - 4
            right = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft.token_ids, ids[done:])))
            assert len(result) == len(right) + 1
            assert result == expected[done : done + len(result)]


def test_penalties_count_the_accepted_drafts_before_a_row():
    """The control: without them the same rows give another token."""
    params = SamplingParams(frequency_penalty=2.0)
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 7], logits[:, 8] = 3.0, 2.0  # the second 7 is worth 1.0, less than the 8
    (result,) = sample_step(Sampler(), Logits.of(mx.array(logits)), [request(params)], [Drafts((7, 8))])
    assert [token.token_id for token in result] == [7, 8, 7]
    again = Sampler().sample(Logits.of(mx.array(logits)), [request(params)] * 3)
    assert [token.token_id for token in again] == [7, 7, 7]


def test_rows_behind_a_rejected_draft_play_no_part():
    logits = np.array(rows_of(request(), [1, 2, 3]))
    logits[1:] = np.nan
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        (result,) = sample_step(Sampler(), Logits.of(mx.array(logits)), [request(params)], [Drafts((-1, -1, -1))])
        assert len(result) == 1 and result[0].token_id is not None
        token = result[0].token_id
        (result,) = sample_step(Sampler(), Logits.of(mx.array(logits)), [request(params)], [Drafts((token, 1, 2))])
        assert [made.token_id for made in result] == [token], "the next step meets the error"
        (result,) = sample_step(Sampler(), Logits.of(mx.array(logits[1:])), [request(params)], [Drafts((1, 2))])
        assert result[0].token_id is None and "not finite" in result[0].error


# -- the distribution of drafts that are drawn at random --------------------------------------------------------

SMALL, STEPS, RUNS = 6, 3, 700
RNG = np.random.default_rng(8)
TARGET = RNG.dirichlet(np.full(SMALL, 0.7), size=SMALL)
"""p of the next token by the last one."""
DRAFT = RNG.dirichlet(np.full(SMALL, 0.7), size=SMALL)
"""q, of another model."""


def expected_counts(params):
    """Expected number of times of each text of STEPS tokens, flat."""
    rows = [
        Sampler().distribution(mx.array(np.log(TARGET[last]).astype(np.float32)), request(params, prompt=[last]))
        for last in range(SMALL)
    ]
    texts = itertools.product(range(SMALL), repeat=STEPS)
    return RUNS * np.array([np.prod([rows[a][b] for a, b in itertools.pairwise((0, *text))]) for text in texts])


def speculated_counts(params, num_drafts):
    """Number of times that each text of STEPS tokens comes out of speculative decoding, flat."""
    counts = np.zeros((SMALL,) * STEPS)
    for run in range(RUNS):
        state = request(params, prompt=[0], name=f"r{run}")
        while len(state.token_ids) <= STEPS:
            key, drafts = random_key(0, state), [state.token_ids[-1]]
            for ahead in range(num_drafts):
                drafts.append(draw_draft(DRAFT[drafts[-1]], key, len(state.token_ids) + ahead))
            logits = np.log(TARGET[drafts]).astype(np.float32)
            proposed = Drafts(tuple(drafts[1:]), DRAFT[drafts[:-1]])
            (tokens,) = sample_step(Sampler(), Logits.of(mx.array(logits)), [state], [proposed])
            state.token_ids += [token.token_id for token in tokens]
        counts[tuple(state.token_ids[1 : STEPS + 1])] += 1
    return counts.ravel()


def sigmas(counts, expected):
    """Pearson's chi-square statistic of the texts that are expected often enough, in standard deviations."""
    often = expected > 5
    assert (counts[expected == 0] == 0).all()
    rest = (counts[~often].sum() - expected[~often].sum()) ** 2 / max(1.0, expected[~often].sum())
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum() + rest
    return (statistic - often.sum()) / np.sqrt(2 * often.sum())


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.8)],
    ids=["temperature", "top_p"],
)
def test_speculated_texts_follow_the_distribution_of_the_model(params):
    assert abs(sigmas(speculated_counts(params, 2), expected_counts(params))) < 4


def reuse_of_a_random_number(target, drafted_from, draft, key, position):
    """The draft's own number decides on its acceptance."""
    if keyed_uniform(f"draft {key}", position) * drafted_from[draft] < target[draft]:
        return draft
    return draw(np.maximum(target - drafted_from, 0.0), keyed_uniform(f"resample {key}", position))


def wrong_residual(target, drafted_from, draft, key, position):
    """A rejected draft is replaced by a token of the model's whole distribution."""
    if keyed_uniform(f"accept {key}", position) * drafted_from[draft] < target[draft]:
        return draft
    return draw(target, keyed_uniform(f"resample {key}", position))


@pytest.mark.parametrize("fault", [reuse_of_a_random_number, wrong_residual])
def test_the_chi_square_test_sees_a_planted_fault(fault, monkeypatch):
    monkeypatch.setattr(verification, "rejection_rule", fault)
    params = SamplingParams(temperature=1.0)
    assert sigmas(speculated_counts(params, 2), expected_counts(params)) > 6


def test_random_numbers_of_a_position_are_different():
    keys = ("seed 1", "accept seed 1", "resample seed 1", "draft seed 1", "accept engine 0 r", "engine 0 accept r")
    assert len({keyed_uniform(key, position) for key in keys for position in range(100)}) == 100 * len(keys)
