"""Adapters: what their configuration means is computed or refused, and new files are another adapter to the cache."""

import json
import shutil

import numpy as np
import pytest
from random_adapters import linear_sizes, make_adapter
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.models.adapter_files import AdapterError, read_adapter

PROMPT = list(range(30, 100))
SIZES = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in (0, 1)}


def changed(folder, **keys):
    """An adapter of PEFT with changed keys in its configuration."""
    made = make_adapter(folder, SIZES, seed=1, form="PEFT")
    path = made / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return made


REFUSED = [
    ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens .*every token"),
    *(({"init_lora_weights": start}, f"init_lora_weights '{start}' .*model's own weights") for start in
      ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")),
    ({"arrow_config": {"top_k": 1}}, "arrow_config"),
    ({"r": 8}, "r is 8 for .* rank 4"),
    ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, "r is 2 for 'model.layers.1"),
    ({"layers_to_transform": [0]}, r"layers_to_transform is \[0\].*model\.layers\.1"),
    ({"layers_to_transform": 1}, r"layers_to_transform is 1.*model\.layers\.0"),
    ({"target_modules": ["k_proj"]}, "target_modules is .*q_proj"),
    ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, "exclude_modules is"),
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"use_qalora": True}, "use_qalora True"),
    ({"use_dora": True}, "use_dora True"),
    ({"lora_bias": True}, "lora_bias True"),
    ({"bias": "lora_only"}, "bias 'lora_only'"),
    ({"rank_pattern": {"(a+)+$": 2}}, "the pattern .* is not supported"),
    ({"frobnicate": 2}, "frobnicate 2 is not supported: it is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_what_is_not_a_plain_lora_is_refused_by_name(keys, words, tmp_path):
    with pytest.raises(AdapterError, match=words):
        read_adapter("x", changed(tmp_path / "a", **keys))


HARMLESS = {
    "task_type": "CAUSAL_LM", "peft_version": "0.19.1", "base_model_name_or_path": "m", "revision": None,
    "inference_mode": True, "lora_dropout": 0.1, "init_lora_weights": True, "loftq_config": {}, "eva_config": None,
    "layers_to_transform": [0, 1], "layers_pattern": None, "target_modules": ["q_proj"], "rank_pattern": {},
    "alpha_pattern": {}, "modules_to_save": None, "megatron_core": "megatron.core", "use_dora": False,
    "use_qalora": False, "qalora_group_size": 16, "fan_in_fan_out": False, "trainable_token_indices": None,
    "arrow_config": None, "alora_invocation_tokens": None, "exclude_modules": None, "frobnicate": None,
}  # fmt: skip
"""Values that PEFT writes by default, and some that describe the file."""


def test_what_peft_writes_by_default_is_a_plain_lora(tmp_path):
    plain, full = read_adapter("x", changed(tmp_path / "a")), read_adapter("x", changed(tmp_path / "b", **HARMLESS))
    for path, factors in plain.items():
        for one, other in zip(factors, full[path]):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "pattern", ["layers.1.self_attn.q_proj", r".*\.1\..*q_proj", "^model.layers.1.self_attn.q_proj$"]
)
def test_a_pattern_of_alphas_scales_the_layers_that_it_names(pattern, tmp_path):
    plain = read_adapter("x", changed(tmp_path / "a"))
    scaled = read_adapter("x", changed(tmp_path / "b", alpha_pattern={pattern: 24.0}))
    first, second = SIZES
    np.testing.assert_array_equal(scaled[first][1], plain[first][1])
    np.testing.assert_allclose(scaled[second][1], plain[second][1] * 2, rtol=1e-6)  # the others have 12


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_layers": 1}, "num_layers is 1, the last of 4"),
        ({"lora_parameters": {"rank": 8, "scale": 3.0}}, "lora_parameters.rank is 8"),
        ({"lora_parameters": {"rank": 4, "scale": 3.0, "keys": ["self_attn.k_proj"]}}, "lora_parameters.keys is"),
        ({"lora_parameters": {"rank": 4, "scale": 3.0, "wobble": 1}}, "wobble 1"),
        ({"frobnicate": 2}, "frobnicate 2"),
    ],
)
def test_the_same_for_mlx_lm_s_adapters(keys, words, tmp_path):
    folder = make_adapter(tmp_path / "a", SIZES, seed=1)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    with pytest.raises(AdapterError, match=words):
        read_adapter("x", folder, num_layers=4)


def answer(engine, adapter):
    engine.add_request(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), adapter=adapter)
    return engine.run(progress=False)[-1].token_ids


def engine_with(folder, prefix_caching=True, **adapters):
    engine = Engine(
        tiny_loaded_model("llama"), EngineConfig(num_blocks=64, enable_prefix_caching=prefix_caching), max_loras=1
    )
    for name, version in adapters.items():
        engine.add_adapter(name, folder / version)
    return engine


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_files_that_are_replaced_are_another_adapter(prefix_caching, tmp_path):
    """`mlx_lm.lora` overwrites its adapter while it trains; KV of the old weights must not be found again."""
    sizes = linear_sizes(tiny_loaded_model("llama").model)
    for version in ("one", "two", "other"):
        make_adapter(tmp_path / version, sizes, seed=len(version) + ord(version[0]), form="PEFT", strength=1.5)
    expected = {}
    for version in ("one", "two"):
        with engine_with(tmp_path, a=version) as engine:
            expected[version] = answer(engine, "a")
    assert expected["one"] != expected["two"]
    shutil.copytree(tmp_path / "one", tmp_path / "live")
    with engine_with(tmp_path, prefix_caching, a="live", b="other") as engine:
        assert answer(engine, "a") == expected["one"]
        answer(engine, "b")  # puts the other one out
        shutil.copytree(tmp_path / "two", tmp_path / "live", dirs_exist_ok=True)
        assert answer(engine, "a") == expected["two"]
        assert [info.adapter.partition("@")[0] for info in engine.trace.requests.values()] == ["a", "b", "a"]
        answer(engine, "b")
        shutil.copytree(tmp_path / "one", tmp_path / "live", dirs_exist_ok=True)
        assert answer(engine, "a") == expected["one"]


def test_a_request_whose_files_changed_meanwhile_is_not_computed_with_others(tmp_path, caplog):
    sizes = linear_sizes(tiny_loaded_model("llama").model)
    for version in ("one", "two", "other"):
        make_adapter(tmp_path / version, sizes, seed=len(version) + ord(version[0]), form="PEFT")
    shutil.copytree(tmp_path / "one", tmp_path / "live")
    with engine_with(tmp_path, a="live", b="other") as engine:
        answer(engine, "a")
        answer(engine, "b")
        engine.add_request(PROMPT, SamplingParams(max_tokens=2), adapter="a")
        shutil.copytree(tmp_path / "two", tmp_path / "live", dirs_exist_ok=True)
        output = engine.run(progress=False)[-1]
        assert output.finish_reason == "error" and not output.token_ids
        assert "have changed since this request was added: add it again" in caplog.text
