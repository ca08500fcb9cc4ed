"""Log-probabilities of prompts against a plain forward pass."""

import tracemalloc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_loaded_model
from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine.forward import compiled
from workbench.models.packed.pack_model import pack_model

CONFIG = EngineConfig(max_num_batched_tokens=16, max_num_seqs=6, block_size=4, num_blocks=100, max_model_len=96)
MODES = {
    "plain": {},
    "preempting": {"num_blocks": 14},
    "drafts": {"num_speculative_tokens": 3},
    "asynchronous": {"async_scheduling": True, "num_blocks": 16},
    "asynchronous drafts": {"async_scheduling": True, "num_speculative_tokens": 2},
}
PROMPTS = [[5 + i, *range(20, 20 + length), 9, 11, 9, 11] for i, length in enumerate((1, 7, 30, 18))]


@pytest.fixture(scope="module")
def model():
    return make_tiny_llama()


def expected(model, tokens):
    """Log-probabilities of all tokens behind each token, float64 [len(tokens), vocab_size]."""
    logits = np.array(model.model(mx.array([tokens]))[0].astype(mx.float32), dtype=np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("mode", MODES)
def test_they_are_those_of_a_plain_pass(model, mode):
    with Engine(model, CONFIG.replace(**MODES[mode]), check_laws=True) as engine:
        for index, prompt in enumerate(PROMPTS * 2):
            wanted = {"prompt_logprobs": index % 4} if index % 3 else {}
            sampling = SamplingParams(max_tokens=6, logprobs=1, **wanted)
            engine.add_request(prompt, sampling, request_id=f"r{index}")
        outputs = engine.run(progress=False)
        trace = engine.trace
    for index, output in enumerate(outputs):
        prompt = PROMPTS[index % len(PROMPTS)]
        if not index % 3:
            assert output.prompt_logprobs is None
            continue
        reference = expected(model, prompt)
        first, *rest = output.prompt_logprobs
        assert first is None and len(rest) == len(prompt) - 1
        for row, token, found in zip(reference, prompt[1:], rest):
            best = np.argsort(-row)[: index % 4].tolist()
            assert list(found)[: len(best)] == best and set(found) == {*best, token}
            assert all(found[i] == pytest.approx(row[i], abs=1e-4) for i in found)
        chunks = [chunk for record in trace for chunk in record.chunks if chunk.request_id == output.request_id]
        assert not any(chunk.num_cached_tokens for chunk in chunks)
    cached = {c.request_id for record in trace for c in record.chunks if c.num_cached_tokens}
    assert "asynchronous drafts" in mode or cached or "preempting" in mode  # others still use the prefix cache
    assert any("prompt_logprobs" in record.timings for record in trace)
    # The tokens that are sampled are the same as without.
    with Engine(model, CONFIG) as engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=6, logprobs=1))
        alone = engine.run(progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone] * 2


def test_compiled_code_projects_them_in_slices(monkeypatch):
    loaded = tiny_loaded_model("llama", seed=3)
    pack_model(loaded.model)
    prompt = np.random.default_rng(5).integers(0, 100, 60).tolist()

    def outputs():
        with Engine(loaded, CONFIG.replace(max_num_batched_tokens=48)) as engine:
            assert engine.runner.path.name == "compiled"
            engine.add_request(prompt[:9], SamplingParams(max_tokens=20))
            engine.add_request(prompt, SamplingParams(max_tokens=8, prompt_logprobs=2))
            return engine.run(progress=False)

    whole, slices, original = outputs(), [], compiled.SlicedLogits

    def counting(values, best, slices_):
        return original(values, best, slices=(slices.append(len(rows)) or rows for rows in slices_))

    monkeypatch.setattr(compiled, "SLICE_BYTES", 4 * loaded.vocab_size * 7)
    monkeypatch.setattr(compiled, "SlicedLogits", lambda values, best, slices: counting(values, best, slices))
    sliced = outputs()
    assert max(slices) == 7 and sum(slices) >= 59  # the bound holds, and covers all rows
    for one, other in zip(whole, sliced):
        assert one.token_ids == other.token_ids and one.prompt_ranks == other.prompt_ranks
        for near, far in zip(one.prompt_logprobs or [], other.prompt_logprobs or []):
            assert near == (far and pytest.approx(far, abs=1e-5))


SLICE = 1 << 20
"""Bytes of 64 rows of logits of the model below."""


def peak_memory(loaded, length, budget):
    """Largest number of bytes that MLX and Python take while a prompt is scored, beyond those in use before."""
    config = CONFIG.replace(max_num_batched_tokens=budget, block_size=16, max_model_len=1100)
    with Engine(loaded, config) as engine:
        prompt = np.random.default_rng(length).integers(0, loaded.vocab_size, length).tolist()
        engine.generate([prompt[:9]], max_tokens=1, prompt_logprobs=1)  # compiles
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        tracemalloc.start()
        try:
            (output,) = engine.generate([prompt], max_tokens=1, prompt_logprobs=1)
            python = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(output.prompt_logprobs) == length
        return mx.get_peak_memory() - before, python


@pytest.mark.parametrize("path", ["compiled", "layer by layer"])
def test_memory_does_not_grow_with_the_prompt(path, monkeypatch):
    """Compiled code holds two slices of a step with the whole prompt, another path the rows of a short step."""
    loaded = replace(tiny_loaded_model("llama", seed=3, vocab_size=4096), vocab_size=4096, max_position=1100)
    budget, bound = 64, 1.2 * SLICE
    if path == "compiled":
        pack_model(loaded.model)
        monkeypatch.setattr(compiled, "SLICE_BYTES", SLICE)
        budget, bound = 1024, 2.1 * SLICE
    for length in (256, 1024):  # logits of 4 and of 16 slices
        of_mlx, of_python = peak_memory(loaded, length, budget)
        assert SLICE < of_mlx < bound, (length, of_mlx / SLICE)
        assert of_python < 0.3 * SLICE + 2000 * length, (length, of_python / SLICE)
    if path == "compiled":  # the same measure sees logits that are not sliced
        monkeypatch.setattr(compiled, "SLICE_BYTES", 16 * SLICE)
        assert peak_memory(loaded, 1024, budget)[0] > 16 * SLICE


def test_too_many_logits_are_refused(model):
    with (
        Engine(replace(model, vocab_size=120), CONFIG) as engine,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ValueError, match=r"prompt_logprobs projects every row .* lower it to 8"),
    ):
        patch.setattr("workbench.engine.prompt_logprobs.MAX_LOGITS_BYTES", 4 * 120 * 8)
        engine.add_request([5, 6], SamplingParams(prompt_logprobs=1))


def test_the_range_is_checked():
    with pytest.raises(ValueError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1)
