"""Engines whose long chunks expand their latents have the tokens of plain mlx-lm, and their records say so."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernel_in_mlx import MetalInMlx
from mlx_lm.generate import generate_step
from plain_model import random_prompts
from tiny_configurations import SPECIAL, VOCAB_SIZE
from tiny_models import tiny_loaded_model, tiny_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine import model_runner
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import Segment, pack
from workbench.kernels.attention import get_backend
from workbench.models.preflight import preflight
from workbench.models.preflight_once import from_json, to_json

pytestmark = pytest.mark.usefixtures("no_compilation")

SIZES = {"kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 8}
"""Latents so wide that chunks of a few dozen rows are expanded."""
ARCHITECTURES = (
    *("deepseek_v3", "mistral4", "glm4_moe_lite", "longcat_flash", "kimi_linear", "kimi_k3", "kimi_k25"),
    *("bailing_hybrid", "bailing_moe_v3"),
)
SETTINGS = {"block_size": 8, "num_blocks": 160, "max_model_len": 256, "max_num_batched_tokens": 72}
WAYS = {
    "chunks": {"enable_prefix_caching": False},
    "prefixes": {"enable_prefix_caching": True},
    "few blocks": {"num_blocks": 38},
    "drafts": {"num_speculative_tokens": 3, "speculative": {"method": "ngram", "prompt_lookup_min": 1}},
    "ahead": {"async_scheduling": True},
}
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    made = random_prompts([150, 41, 5, 90], VOCAB_SIZE)
    made["r4"] = made["r0"][:100] + made["r1"][:35]
    made["r5"] = made["r2"] * 12
    return made


@pytest.fixture(scope="module")
def models(prompts):
    """A tiny model of an architecture, and the tokens that mlx-lm generates."""
    made = {}

    def make(architecture):
        if architecture not in made:
            loaded = tiny_loaded_model(architecture, **sizes_of(architecture))
            made[architecture] = loaded, {name: generated(loaded.model, tokens) for name, tokens in prompts.items()}
        return made[architecture]

    return make


def generated(model, prompt):
    """Greedy tokens of mlx-lm."""
    steps = generate_step(mx.array(prompt), model, max_tokens=PARAMS.max_tokens)
    return [int(token) for token, _ in steps]


def sizes_of(architecture):
    text = SPECIAL[architecture].get("text_config")
    return SIZES if text is None else {"text_config": text | SIZES}


def run(loaded, prompts, **changes):
    with Engine(loaded, EngineConfig(**{**SETTINGS, **changes})) as engine:
        assert engine.runner.mode == "kernel" and engine.describe()["expands_latents"]
        for name, tokens in prompts.items():
            engine.add_request(tokens, PARAMS, request_id=name)
        found = {output.request_id: list(output.token_ids) for output in engine.run(progress=False)}
        return found, engine.trace


def expanded_rows(step):
    return step.kernel.details.get("expanded_rows", 0) if step.kernel else 0


@pytest.mark.repeats(step=5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_mlx_lm(models, prompts, architecture, way):
    loaded, expected = models(architecture)
    found, trace = run(loaded, prompts, **WAYS[way])
    assert found == expected
    both = [step for step in trace if 0 < expanded_rows(step) < step.num_tokens]
    assert both, "no step has both forms"
    assert any(expanded_rows(step) and any(chunk.start for chunk in step.chunks) for step in trace)
    if way == "few blocks":
        assert any(chunk.num_recomputed_tokens for step in trace for chunk in step.chunks)


def test_a_record_says_what_was_launched(models, prompts):
    loaded, _ = models("deepseek_v3")
    _, trace = run(loaded, prompts)
    assert any(expanded_rows(step) for step in trace) and any(not expanded_rows(step) for step in trace)
    for step in trace:
        kernel, long = step.kernel, [chunk for chunk in step.chunks if chunk.num_tokens >= 32]
        assert kernel.details.get("expanded_sequences", 0) <= len(long)
        assert expanded_rows(step) <= sum(chunk.num_tokens for chunk in long)
        rows = sorted(row for item in kernel.work_items for row in range(item.q_start, item.q_start + item.num_rows))
        assert rows == list(range(step.num_tokens))
        first = np.cumsum([0, *(chunk.num_tokens for chunk in step.chunks)])
        for item in kernel.work_items:
            chunk = step.chunks[item.seq]
            assert first[item.seq] <= item.q_start < first[item.seq + 1]
            assert item.kv_end == chunk.start + item.q_start - first[item.seq] + item.num_rows
            assert item.num_rows <= kernel.block_q
        whole = expanded_rows(step) == step.num_tokens
        assert (kernel.num_kv_heads, kernel.head_dim) == ((4, 24) if whole else (1, 72))
    step = next(step for step in trace if expanded_rows(step))
    count = step.kernel.details["expanded_sequences"]
    assert f"latents expanded for {expanded_rows(step)} rows of {count} chunk" in step._repr_html_()
    assert all("latents expanded" not in step._repr_html_() for step in trace if not expanded_rows(step))


def one_step(runner, lengths, start=0):
    """Logits of the last row of some prompts, in one step."""
    tables = np.arange(1, 1 + 20 * len(lengths)).reshape(len(lengths), 20).tolist()
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, VOCAB_SIZE, 160).tolist() for _ in lengths]
    segments = [
        Segment(table, start, length, ids[start : start + length], 1, str(index))
        for index, (table, length, ids) in enumerate(zip(tables, lengths, tokens))
    ]
    logits, launch = runner.forward(pack(segments, 8))
    return np.array(logits.values), launch


@pytest.fixture
def runner(models):
    loaded, _ = models("deepseek_v3")
    made = ModelRunner(loaded, EngineConfig(**SETTINGS))
    yield made
    made.close()


def test_a_step_has_the_same_bits_when_it_is_looked_at(runner):
    """Taps see all rows in the space of latents; what the model is given does not change."""
    expected, launch = one_step(runner, [90, 3, 50])
    assert launch.details["expanded_rows"] == 140
    seen = []
    taps = runner.kv_cache.kernel_layers[1].taps
    taps.append(seen.append)
    looked_at, watched = one_step(runner, [90, 3, 50])
    taps.clear()
    assert np.array_equal(looked_at, expected) and watched.details["expanded_rows"] == 140
    (call,) = seen
    assert call.queries.shape == (143, 4, 72) and call.out.shape == (143, 4, 64) and call.keys.shape == (143, 1, 72)
    assert call.metadata.num_seqs == 3 and call.options.value_dim == 64
    assert np.isfinite(np.array(call.out)).all()
    again, _ = one_step(runner, [90, 3, 50])
    assert np.array_equal(again, expected)


def test_the_form_of_a_chunk_does_not_depend_on_its_batch(runner):
    alone = [one_step(runner, [length])[1].details.get("expanded_rows", 0) for length in (90, 31, 50)]
    assert alone == [90, 0, 50]
    assert one_step(runner, [90, 31, 50])[1].details["expanded_rows"] == 140


def test_captured_values_are_the_weights_times_the_latents(models):
    loaded, _ = models("deepseek_v3")
    with Engine(loaded, EngineConfig(**SETTINGS)) as engine:
        engine.add_request([5 + index for index in range(60)], max_tokens=3)
        capture = engine.capture(layer=0)
        step = engine.step()
        assert expanded_rows(step) == 60
        weights, values = capture.weights(40), capture.values[0].astype(np.float64)
        out = np.einsum("hk,khd->hd", weights, values.repeat(weights.shape[0], axis=1))
        np.testing.assert_allclose(out, capture.out[40], rtol=1e-4, atol=1e-5)


def test_a_replay_finds_rounding_alone(models, prompts):
    """Alone and in other chunks, some rows take the other form."""
    loaded, _ = models("deepseek_v3")
    _, trace = run(loaded, prompts)
    step = next(step for step in reversed(trace) if 0 < expanded_rows(step) < step.num_tokens)
    replayed = trace.replay(step.step, loaded)
    assert not replayed.wrong and not replayed.other_tokens


def test_the_emulator_serves_both_forms():
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    loaded, tokens = tiny_loaded_model("deepseek_v3", **sizes), {}
    for backend in ("msl", "cpu"):
        with Engine(loaded, EngineConfig(**{**SETTINGS, "attention_backend": backend})) as engine:
            assert engine.describe()["expands_latents"]
            for length in (60, 3):
                engine.add_request(
                    [5 + index for index in range(length)], SamplingParams(max_tokens=3, ignore_eos=True)
                )
            engine.step()
            assert backend == "msl" or engine.shadow().agrees
            tokens[backend] = [list(output.token_ids) for output in engine.run(progress=False)]
            assert expanded_rows(engine.trace[0]) == 60
    assert tokens["msl"] == tokens["cpu"]


def test_a_kernel_without_a_variant_of_the_sizes_stays_absorbed():
    """Keys of 16 + 8 are not a multiple of 16, and latents of 56 + 8 are."""
    sizes = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16}
    result = preflight(tiny_model("deepseek_v3", **sizes), get_backend("msl"))
    assert (result.mode, result.expands_latents) == ("kernel", False)


def test_what_the_preflight_finds_is_remembered(models):
    loaded, _ = models("longcat_flash")
    result = preflight(loaded.model, get_backend("cpu"))
    assert result.expands_latents and from_json(to_json(result)) == result


def test_a_gpu_tries_the_kernel_of_the_expanded_form_at_load(models, monkeypatch):
    tried, select = [], model_runner.select_backend
    monkeypatch.setattr(model_runner, "select_backend", lambda name, **of: tried.append(of) or select(name, **of))
    ModelRunner(models("deepseek_v3")[0], EngineConfig(**SETTINGS)).close()
    sizes = {(of["num_kv_heads"], of["head_dim"], of["value_dim"], of["latent"], of["dtype"]) for of in tried}
    assert sizes == {(1, 72, 64, True, "float32"), (4, 24, 8, False, "float32")}


def test_batch_invariance_is_still_refused(models):
    with pytest.raises(ValueError, match="batch_invariant=True takes compiled code"):
        Engine(models("deepseek_v3")[0], EngineConfig(**SETTINGS, batch_invariant=True))


@pytest.fixture
def graphs(monkeypatch):
    """Engines run the backend of an Apple GPU, as MLX operations that are evaluated after the step."""
    backend = MetalInMlx()

    def tried(model, _config):
        return backend, preflight(model if isinstance(model, nn.Module) else model.model, backend), ""

    monkeypatch.setattr(model_runner, "_tried_backend", tried)


WIDE = SIZES | {"qk_rope_head_dim": 16, "v_head_dim": 16}
"""Sizes that the Metal kernel takes."""


def test_decodes_are_replayed_and_chunks_are_not(prompts, graphs):
    loaded = tiny_loaded_model("deepseek_v3", **WIDE)
    expected = {name: generated(loaded.model, tokens) for name, tokens in prompts.items()}
    with Engine(loaded, EngineConfig(**SETTINGS)) as engine:
        for name, tokens in prompts.items():
            engine.add_request(tokens, PARAMS, request_id=name)
        found = {output.request_id: list(output.token_ids) for output in engine.run(progress=False)}
        assert found == expected
        assert engine.runner.path.num_recorded >= 1 and not engine.runner.path.not_replayed
        ways = {(step.kernel.details["forward"], expanded_rows(step) > 0) for step in engine.trace}
    assert ways == {("replayed", False), ("layer by layer", False), ("layer by layer", True)}


def test_latents_are_written_in_place_in_both_forms(graphs):
    """A step's peak of memory would rise by a layer's pool if it were copied."""
    model = tiny_model("deepseek_v3", **WIDE)  # alone, it has its whole pool at once
    runner = ModelRunner(model, EngineConfig(**SETTINGS | {"num_blocks": 40_000}))
    try:
        for lengths in ([60, 3], [3, 5]):
            one_step(runner, lengths)
            mx.reset_peak_memory()
            active = mx.get_active_memory()
            _, launch = one_step(runner, lengths)
            assert ("expanded_rows" in launch.details) == (60 in lengths)
            assert mx.get_peak_memory() - active < runner.kv_cache.arrays[0].nbytes / 4
    finally:
        runner.close()
