"""The most likely tokens that are recorded with each output token: `EngineConfig(record_top_tokens=k)`."""

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from workbench import Engine, EngineConfig, SamplingParams, Trace
from workbench.trace.readings.top_tokens import read_top_tokens
from workbench.viz.layout.columns import columns_of

CONFIG = EngineConfig(max_num_batched_tokens=16, block_size=4, num_blocks=64, max_model_len=128, record_top_tokens=4)
PROMPTS = {"long": list(range(5, 35)), "short": [7, 3, 9, 11, 40], "loop": [8, 9, 10] * 4}
DRAWN = SamplingParams(
    temperature=1.5, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=6
)


def run(model, sampling, **config):
    """A run of all prompts; returns its trace, and the output tokens by request."""
    with Engine(model, CONFIG, **config) as engine:
        for request_id, prompt in PROMPTS.items():
            engine.add_request(prompt, sampling, request_id=request_id)
        outputs = engine.run(progress=False)
        return engine.trace, {output.request_id: list(output.token_ids) for output in outputs}


def recorded(trace):
    """The recorded tokens by request, in order."""
    found = {request_id: [] for request_id in trace.requests}
    for record in trace:
        for top in read_top_tokens(trace.supplement(record.step, "top_tokens") or {"tokens": []}):
            found[top.request].append(top)
    return found


def plain_logits(model, tokens):
    """The last token's logits by a plain forward pass, float64 [vocab_size]."""
    return np.array(model.model(mx.array([tokens]))[0, -1].astype(mx.float32), dtype=np.float64)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept_by(probabilities, params):
    """The tokens that min_p, top_k and top_p keep, token by token from the most likely one on."""
    kept, mass = [], 0.0
    ranked = [i for i in np.argsort(-probabilities) if probabilities[i] >= params.min_p * probabilities.max()]
    ranked = ranked[: params.top_k or None]
    total = probabilities[ranked].sum()
    for token in ranked:
        if mass >= params.top_p * total:
            break
        kept.append(token)
        mass += probabilities[token]
    return kept


def adjusted_by_hand(logits, prompt, output, params):
    result = logits.copy()
    for token in set(prompt + output):
        result[token] *= params.repetition_penalty if result[token] < 0 else 1 / params.repetition_penalty
    for token in output:
        result[token] -= params.frequency_penalty
    return result


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=6), DRAWN])
def test_the_probabilities_are_those_of_the_plain_model(tiny_llama, sampling):
    trace, outputs = run(tiny_llama, sampling)
    for request_id, tops in recorded(trace).items():
        assert [top.sampled for top in tops] == outputs[request_id] != []
        for number, top in enumerate(tops):
            output = outputs[request_id][:number]
            logits = plain_logits(tiny_llama, PROMPTS[request_id] + output)
            expected = softmax(logits)
            likely = np.argsort(-expected, kind="stable")[:4].tolist()
            ids = [candidate.id for candidate in top.candidates]
            assert ids == likely + [top.sampled] * (top.sampled not in likely)
            for candidate in top.candidates:
                assert candidate.probability == pytest.approx(expected[candidate.id], rel=1e-4)
            if sampling.temperature == 0:
                continue
            final = softmax(adjusted_by_hand(logits, PROMPTS[request_id], output, sampling) / sampling.temperature)
            kept = kept_by(final, sampling)
            for candidate in top.candidates:
                share = final[candidate.id] / final[kept].sum() if candidate.id in kept else 0.0
                assert candidate.drawn == pytest.approx(share, rel=1e-3, abs=1e-12)
                assert bool(candidate.removed_by) == (candidate.id not in kept)
            assert f"left {len(kept)} of {len(logits)} tokens" in top.how


def test_each_candidate_names_the_parameter_that_removed_it(tiny_llama):
    """With one filter in force, nothing else is named."""
    for name, value in (("top_p", 0.05), ("top_k", 2), ("min_p", 0.99)):
        trace, _ = run(tiny_llama, SamplingParams(temperature=1.0, max_tokens=4, **{name: value}))
        removed = {c.removed_by for tops in recorded(trace).values() for top in tops for c in top.candidates}
        assert removed == {"", name}
    trace, _ = run(tiny_llama, SamplingParams(max_tokens=4))
    for tops in recorded(trace).values():
        for top in tops:
            assert [c.removed_by for c in top.candidates] == ["", "temperature", "temperature", "temperature"]
            assert [c.drawn for c in top.candidates] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "config",
    [
        {"async_scheduling": True},
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 3, "async_scheduling": True},
        {"num_speculative_tokens": 2, "speculative": {"method": "draft_model", "draft_sample_method": "probabilistic"}},
    ],
)
@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=12), DRAWN])
def test_every_output_token_has_its_candidates_in_order(tiny_llama, config, sampling):
    options = {"draft_model": tiny_llama} if "speculative" in config else {}
    trace, outputs = run(tiny_llama, sampling, **config, **options)
    for request_id, tops in recorded(trace).items():
        assert [top.sampled for top in tops] == outputs[request_id] != []
        for number, top in enumerate(tops):
            expected = softmax(plain_logits(tiny_llama, PROMPTS[request_id] + outputs[request_id][:number]))
            assert top.candidates[0].probability == pytest.approx(expected.max(), rel=1e-4)


def test_recording_changes_no_token_and_is_off_by_default(tiny_llama):
    for sampling in (SamplingParams(max_tokens=6), DRAWN):
        _, with_candidates = run(tiny_llama, sampling)
        trace, without = run(tiny_llama, sampling, record_top_tokens=0)
        assert with_candidates == without and trace.supplements == []
    assert EngineConfig().record_top_tokens == 0


def test_a_processor_with_a_memory_is_called_once_for_each_token(tiny_llama):
    calls = []

    def never_nine(history, logits):
        calls.append(len(history))
        return mx.where(mx.arange(logits.shape[-1]) == 9, -mx.inf, logits)

    sampling = SamplingParams(temperature=1.0, max_tokens=5, logits_processors=(never_nine,), logit_bias={9: 50.0})
    with Engine(tiny_llama, CONFIG) as engine:
        engine.add_request(PROMPTS["short"], sampling)
        engine.run(progress=False)
        tops = recorded(engine.trace)["r0"]
    assert calls == [5, 6, 7, 8, 9]
    assert all("after penalties and biases" in top.how for top in tops)
    assert {c.removed_by for top in tops for c in top.candidates if c.id == 9} <= {"logits_processors"}


def test_a_trace_file_keeps_them_and_another_form_is_not_shown(tiny_llama, tmp_path):
    trace, _ = run(tiny_llama, DRAWN)
    trace.save(tmp_path / "run.jsonl")
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert recorded(loaded) == recorded(trace)
    shown = [step for step, name, _ in columns_of(loaded).supplements if name == "top_tokens"]
    assert shown == [record.step for record in trace if any(chunk.accepted for chunk in record.chunks)]
    for wrong in ({}, {"tokens": 3}, {"tokens": [{"request": "r", "sampled": 1, "candidates": [{"id": -1}]}]}):
        assert read_top_tokens(wrong) is None


def test_step_into_keeps_them_for_its_step_alone(tiny_llama):
    with Engine(tiny_llama, CONFIG, record_top_tokens=0) as engine:
        engine.add_request(PROMPTS["short"], DRAWN, request_id="short")
        name = ""
        while name != "sample":
            name, result = engine.step_into(layers=False)
        assert len(result[0].top.candidates) >= 5 and result[0].top.sampled == result[0].token_id
        engine.run(progress=False)
        assert engine.trace.supplements == []


@pytest.mark.parametrize("value", [-1, 101, 2.5, "five"])
def test_a_number_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match="record_top_tokens"):
        EngineConfig(record_top_tokens=value)


def test_the_texts_are_those_of_the_tokenizer(smollm2):
    with Engine(smollm2, CONFIG, max_model_len=64) as engine:
        output = engine.generate(["The capital of France is"], max_tokens=2)[0]
        tops = recorded(engine.trace)[output.request_id]
        assert [c.text for top in tops for c in top.candidates if c.id == top.sampled] == [" Paris", "."]
        assert msgspec.json.decode(msgspec.json.encode(tops), type=list[type(tops[0])]) == tops
