"""A pool of few bits is compared with a plain model that rounds in the same places, so the comparison is sharp."""

import pytest
from tiny_models import tiny_loaded_model, tiny_model

from workbench import Engine, SamplingParams
from workbench.kernels.attention import cpu_backend, get_backend
from workbench.kernels.attention.stored import STORED_DTYPES, to_stored
from workbench.models.preflight import preflight

SMALL_TYPES = ("float16", "bfloat16", "int8_per_token_head")
ARCHITECTURES = {
    "deepseek_v3": "latents and experts: another expert at a near tie changed a row by a fifth of its spread",
    "mistral4": "latents, and queries that grow",
    "llama4": "chunks, and logits that hardly depend on positions",
    "exaone": "a fault as small as the rounding of 8 bits",
    "gemma3_text": "windows",
    "granitemoehybrid": "recurrent layers beside attention",
}


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("kv_cache_dtype", SMALL_TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_serves_every_model_with_every_type_of_pool(architecture, kv_cache_dtype):
    result = preflight(tiny_model(architecture), get_backend("cpu"), kv_cache_dtype)
    assert result.mode == "kernel", result.reason
    assert {layer.dtype for layer in result.layers} == {STORED_DTYPES[kv_cache_dtype]}
    assert result.max_error < 2e-3


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("kv_cache_dtype", SMALL_TYPES)
def test_a_fault_smaller_than_the_rounding_is_noticed(monkeypatch, architecture, kv_cache_dtype):
    """The codes of a row have a scale that is 5% too large, and 8 bits alone change the logits by as much."""
    monkeypatch.setattr(cpu_backend, "to_stored", lambda rows, dtype: to_stored(1.05 * rows, dtype))
    result = preflight(tiny_model(architecture), get_backend("cpu"), kv_cache_dtype)
    assert result.mode == "gather" and "logits differ" in result.reason  # which does not write with the kernel


def test_latents_of_8_bits_give_the_same_tokens_however_steps_are_cut():
    loaded, found = tiny_loaded_model("deepseek_v3"), []
    for budget in (64, 7):
        settings = {"block_size": 4, "num_blocks": 96, "max_model_len": 96, "max_num_batched_tokens": budget}
        with Engine(loaded, **settings, kv_cache_dtype="int8_per_token_head") as engine:
            facts = engine.describe()
            assert (facts["attention_mode"], facts["kv_layout"]) == ("kernel", "latents")
            assert facts["kv_bytes_per_block"] == 4 * facts["num_layers"] * (24 + 4)
            for number in range(4):
                prompt = [(7 * number + 3 * place) % 250 + 1 for place in range(9 + 5 * number)]
                engine.add_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True), request_id=f"r{number}")
            found.append([tuple(output.token_ids) for output in engine.run(progress=False)])
    assert found[0] == found[1]
