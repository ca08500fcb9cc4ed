"""Rows of logits that verify drafts, each with its draft, its token and both probabilities."""

from types import SimpleNamespace

import numpy as np
import pytest

from workbench import Engine, EngineConfig, SamplingParams
from workbench.viz.phases import LogitsRow, rows_of_logits, verified_drafts


def chunk(name, drafts=(), samples=True):
    return SimpleNamespace(request=SimpleNamespace(request_id=name), drafts=drafts, samples=samples)


def test_tokens_of_a_step_are_dealt_to_the_rows_of_its_chunks():
    distributions = np.random.default_rng(3).dirichlet(np.ones(12), size=2)
    chunks = [chunk("a", (4, 5, 6)), chunk("prompt", samples=False), chunk("b", (7, 8)), chunk("c", (-1,)), chunk("d")]
    drafts = {"b": SimpleNamespace(probabilities=distributions), "a": SimpleNamespace(probabilities=None)}
    # a: one draft is accepted, then 9 replaces the second; b: both are accepted, and 3 follows; c: padding.
    rows = rows_of_logits(chunks, [4, 9, 7, 8, 3, 10, 11], drafts)
    assert rows == [
        LogitsRow("a", 4, 4),
        LogitsRow("a", 9, 5),
        LogitsRow("a", None, 6),
        LogitsRow("a", None),
        LogitsRow("b", 7, 7, pytest.approx(distributions[0][7])),
        LogitsRow("b", 8, 8, pytest.approx(distributions[1][8])),
        LogitsRow("b", 3),
        LogitsRow("c", 10),
        LogitsRow("c", None),
        LogitsRow("d", 11),
    ]
    assert [row.token for row in rows_of_logits(chunks, [], drafts)] == [None] * 10, "before sampling"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_synchronous_step_with_drafts_shows_both_probabilities(tiny_llama, temperature):
    options = {"method": "draft_model", "num_layers": 1, "draft_sample_method": "probabilistic"}
    config = EngineConfig(num_blocks=64, block_size=4, num_speculative_tokens=2, speculative=options, seed=3)
    num_drawn = 0
    with Engine(tiny_llama, config) as engine:
        for name in ("r", "s"):
            sampling = SamplingParams(max_tokens=20, temperature=temperature, ignore_eos=True)
            engine.add_request([5, 9, 17], sampling, request_id=name)
        while (phase := engine.step_into()) is not None:
            name, result = phase if isinstance(phase, tuple) else ("record", phase)
            if name == "schedule":
                chunks, before = result.chunks, dict(engine.drafts)
            elif name == "forward":
                logits = np.array(result, dtype=np.float64)
            elif name == "sample":
                assert dict(engine.drafts) == before, "still those that this step verifies"
                tokens = [token.token_id for token in result]
                shown = iter(verified_drafts(logits, rows_of_logits(chunks, tokens, engine.drafts), str))
                left, place = iter(tokens), 0
                for chunk_ in chunks:
                    request_id, rejected = chunk_.request.request_id, False
                    for index, draft in enumerate(chunk_.drafts):
                        row = next(shown)
                        target = np.exp(logits[place + index] - logits[place + index].max())
                        assert (row["request"], row["id"]) == (request_id, draft)
                        assert row["probability"] == pytest.approx((target / target.sum())[draft])
                        drawn = before[request_id].probabilities
                        expected = None if drawn is None else pytest.approx(drawn[index][draft])
                        assert row["draft_probability"] == expected
                        num_drawn += drawn is not None
                        assert row["accepted"] == (None if rejected else next(left) == draft)
                        rejected = rejected or not row["accepted"]
                    if not rejected:
                        next(left)
                    place += len(chunk_.drafts) + 1
                assert next(shown, None) is None and next(left, None) is None
    assert bool(num_drawn) is (temperature > 0)
