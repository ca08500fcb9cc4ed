"""config.json: what transformers 5 writes gives the tokens of the older form; each key is read, harmless or refused."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from door_folders import fields_of, write_folder
from mlx_lm.models.base import create_causal_mask
from mlx_lm.utils import load_model as plain_mlx_lm

from workbench import Engine, EngineConfig, SamplingParams
from workbench.models import load_model
from workbench.models.config_json import read_keys

PROMPT = np.random.default_rng(1).integers(0, 250, 120).tolist()
THETA = 500_000.0


def tokens(folder, prompt=PROMPT, **loading):
    """The first tokens that a folder's model answers with."""
    with Engine(str(folder), EngineConfig(num_blocks=64), **loading) as engine:
        engine.add_request(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        return engine.run(progress=False)[0].token_ids


def logits(model, prompt=PROMPT):
    return np.array(model(mx.array([prompt])).astype(mx.float32))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.2 * i for i in range(8)]}
LONG |= {"original_max_position_embeddings": 64}

BOTH_FORMS = [
    *((name, {}) for name in ("llama", "qwen2", "gemma2", "phi3", "mixtral", "smollm3", "gpt_oss", "cohere", "helium")),
    *((name, {}) for name in ("starcoder2", "olmoe", "stablelm", "qwen2_moe", "nemotron", "granite", "minicpm")),
    *(("llama", scaling) for scaling in (LLAMA3, YARN, LINEAR, LONG)),
    *(("qwen2", scaling) for scaling in (LLAMA3, YARN)),
]


@pytest.mark.parametrize(("architecture", "scaling"), BOTH_FORMS)
def test_rope_parameters_give_the_logits_of_the_older_form(architecture, scaling, tmp_path):
    old, new = folders_of_both_forms(architecture, scaling, tmp_path)
    plain, _ = plain_mlx_lm(old)
    plain.set_dtype(mx.float32)
    expected, found = logits(load_model(old).model), logits(load_model(new).model)
    np.testing.assert_allclose(found, logits(plain), atol=2e-3)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize(("architecture", "scaling"), BOTH_FORMS)
def test_engines_over_both_forms_give_the_same_tokens(architecture, scaling, tmp_path):
    old, new = folders_of_both_forms(architecture, scaling, tmp_path)
    assert tokens(new) == tokens(old)


def folders_of_both_forms(architecture, scaling, tmp_path):
    """Folders of one model whose RoPE is written in the older form, and in the one of transformers 5."""
    own = {"hidden_act": "relu2"} if architecture == "nemotron" else {}
    plain = fields_of(architecture, **own)
    plain = {k: v for k, v in plain.items() if k not in ("rope_theta", "partial_rotary_factor")}
    share = {"partial_rotary_factor": 0.5} if architecture in ("stablelm", "nemotron") else {}
    old = {
        "rope_theta": THETA,
        **share,
        **({"rope_scaling": {**scaling, "type": scaling["rope_type"]}} if scaling else {}),
    }
    new = {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": THETA, **share}}
    return [
        write_folder(tmp_path / name, {**plain, **keys}, shapes={"rope_theta": THETA, **share})
        for name, keys in (("old", old), ("new", new))
    ]


def test_each_type_of_layer_has_its_rope(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2
    plain = {
        k: v for k, v in fields_of("gemma3_text").items() if not k.startswith("rope") and k != "sliding_window_pattern"
    }
    parameters = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(kinds, (7000.0, THETA))}
    old = {**plain, "rope_theta": THETA, "rope_local_base_freq": 7000.0, "sliding_window_pattern": 2}
    new = {**plain, "rope_parameters": parameters, "layer_types": kinds}
    shapes = {"sliding_window_pattern": 2}
    folders = [write_folder(tmp_path / str(i), config, shapes=shapes) for i, config in enumerate((old, new))]
    assert tokens(folders[1]) == tokens(folders[0])


def turned(frequencies, scale, x, position):
    """RoPE on the halves of x, in float64."""
    first, second = np.split(x.astype(np.float64), 2)
    cos, sin = scale * np.cos(position * frequencies), scale * np.sin(position * frequencies)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("attention_factor", [None, 1.7])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "mixtral"])
def test_yarn_is_the_paper_s(architecture, attention_factor, truncate, tmp_path):
    """Also where mlx-lm's architecture knows no scaling, and its YaRN no attention_factor and no truncate."""
    yarn = {**YARN, "rope_theta": THETA, "attention_factor": attention_factor, "truncate": truncate}
    config = {k: v for k, v in fields_of(architecture).items() if k != "rope_theta"} | {"rope_parameters": yarn}
    folder = write_folder(tmp_path / "m", config, shapes={"rope_theta": THETA})
    rope = load_model(folder).model.layers[0].self_attn.rope
    dims, original, factor = 16, 64, 4.0
    plain = THETA ** (-np.arange(0, dims, 2) / dims)
    low, high = (dims * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(THETA)) for turns in (16.0, 1.0))
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    kept = 1 - np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    frequencies = plain / factor * (1 - kept) + plain * kept
    scale = 0.1 * np.log(factor) + 1 if attention_factor is None else attention_factor
    x = np.random.default_rng(4).standard_normal(dims).astype(np.float32)
    for position in (0, 3, 200):
        found = np.array(rope(mx.array(x[None, None, None]), offset=position))[0, 0, 0]
        np.testing.assert_allclose(found, turned(frequencies, scale, x, position), atol=2e-4)


def test_a_share_of_rotated_features_is_computed_as_transformers_means_it(tmp_path):
    """mlx-lm's glm rotates whole heads; GLM's configuration says half of them."""
    config = {k: v for k, v in fields_of("glm").items() if k != "rope_theta"}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}}
    rope = load_model(write_folder(tmp_path / "m", config, shapes={"rope_theta": THETA})).model.layers[0].self_attn.rope
    x = mx.array(np.random.default_rng(5).standard_normal((1, 1, 1, 16)).astype(np.float32))
    y = np.array(rope(x, offset=9))
    np.testing.assert_array_equal(y[..., 8:], np.array(x)[..., 8:])
    assert np.abs(y - np.array(x))[..., :8].max() > 0.1


def test_a_window_in_every_layer(tmp_path):
    """Mistral's sliding_window against a mask over the whole sequence."""
    config = fields_of("llama") | {"model_type": "mistral", "sliding_window": 16}
    folder = write_folder(tmp_path / "m", config, shapes={"model_type": "llama"})
    model = load_model(folder).model

    def next_token(sequence):
        hidden = model.model.embed_tokens(mx.array([sequence]))
        for layer in model.model.layers:
            hidden = layer(hidden, create_causal_mask(len(sequence), window_size=16))
        return int(mx.argmax(model.lm_head(model.model.norm(hidden))[0, -1]))

    sequence = list(PROMPT)
    for _ in range(8):
        sequence.append(next_token(sequence))
    assert list(tokens(folder)) == sequence[len(PROMPT) :]


def test_a_context_is_cut_to_a_window_that_mlx_lm_lacks(tmp_path):
    config = fields_of("starcoder2") | {"sliding_window": 1500, "max_position_embeddings": 4000}
    assert load_model(write_folder(tmp_path / "m", config)).max_position == 1500
    off = fields_of("qwen2") | {"sliding_window": 1500, "max_position_embeddings": 4000, "use_sliding_window": False}
    assert load_model(write_folder(tmp_path / "off", off)).max_position == 4000


REFUSED = [
    ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_window 16"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16,
               "layer_types": ["full_attention", *["sliding_attention"] * 3]}, "sliding_window 16"),
    ("mixtral", {"sliding_window": 16}, "sliding_window 16"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False"),
    ("phi", {"qk_layernorm": None, "rope_scaling": {"type": "klingon", "factor": 2.0}}, "'klingon'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "wobble": 2}}, "wobble=2 is unknown"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, "rope_theta must be a number"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta must be above 0"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier 0.2"),
    ("llama", {"frobnicate": 3}, "frobnicate 3 is not supported: it is unknown here.*--ignore-config-key frobnicate"),
    ("internlm2", {"hidden_act": "relu"}, "hidden_act 'relu'"),
    ("llama", {"is_causal": False}, "is_causal False is not supported: .* in any case"),
    ("qwen2", {"causal": False}, "causal False"),
    ("llama", {"use_rope": False}, "use_rope False"),
    ("llama", {"scale_attn_weights": False}, "scale_attn_weights False"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "keys", "words"), REFUSED)
def test_what_changes_the_computation_and_is_not_read_is_refused_by_name(architecture, keys, words, tmp_path):
    folder = write_folder(
        tmp_path / "m", fields_of(architecture) | keys, shapes={"rope_parameters": None, "rope_scaling": None}
    )
    with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("architecture", "key", "value", "words"),
    [
        ("llama", "tie_word_embeddings", "false", "must be true or false, got the text 'false'"),
        ("bailing_moe", "norm_topk_prob", "False", "must be true or false"),
        ("bailing_moe", "rms_norm_eps", "1e-5", "must be a number, got the text '1e-5'"),
        ("baichuan_m1", "rope_theta", "10000", "must be a number"),
        ("llama", "num_hidden_layers", "4", "must be a number"),
    ],
)
def test_a_text_is_not_a_number_nor_a_truth_value(architecture, key, value, words):
    with pytest.raises(ValueError, match=f"config.json: {key} {words}"):
        read_keys("config.json", fields_of(architecture, **{key: value}))


HARMLESS = [
    ("llama", {"_name_or_path": "x", "transformers_version": "5.23.0", "torch_dtype": "float32", "use_cache": True}),
    ("llama", {"transformers.js_config": {"dtype": "q4"}, "pretraining_tp": 1, "initializer_range": 0.02}),
    ("llama", {"attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": None}),
    ("llama", {"hidden_act": "silu", "architectures": ["LlamaForCausalLM"], "is_llama_config": True}),
    ("llama", {"frobnicate": False, "wobble": None, "is_causal": True, "use_rope": True, "causal": None}),
    ("starcoder2", {"activation_function": "gelu", "mlp_type": "default", "norm_type": "layer_norm"}),
    ("starcoder2", {"scale_attn_weights": True, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}),
    ("smollm3", {"max_window_layers": 28, "use_sliding_window": False, "pretraining_tp": 2}),
    ("qwen2", {"head_dim": 16, "hidden_act": "silu", "max_window_layers": 28, "sliding_window": None}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": False, "cache_implementation": "hybrid"}),
    ("mixtral", {"sliding_window": None, "router_aux_loss_coef": 0.02, "output_router_logits": False}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
]


@pytest.mark.parametrize(("architecture", "keys"), HARMLESS)
def test_what_changes_nothing_is_accepted_for_a_reason(architecture, keys, tmp_path):
    plain = fields_of(architecture)
    shapes = {"rope_parameters": None}
    folder = write_folder(
        tmp_path / "m", plain | keys, shapes=shapes | {"tie_word_embeddings": plain.get("tie_word_embeddings")}
    )
    loaded = load_model(folder)
    findings = {finding.key: finding for finding in loaded.findings["config.json"]}
    assert keys.keys() <= findings.keys() and all(finding.because for finding in findings.values())
    expected, _ = plain_mlx_lm(write_folder(tmp_path / "plain", plain))
    np.testing.assert_allclose(logits(loaded.model), logits(expected), atol=2e-3)


def test_a_key_is_accepted_if_the_user_asks_for_it(tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama") | {"frobnicate": 3, "hidden_act": "relu"})
    loaded = load_model(folder, ignore_config_keys=("frobnicate", "hidden_act"))
    reasons = {finding.key: finding.because for finding in loaded.findings["config.json"]}
    assert reasons["frobnicate"] == reasons["hidden_act"] == "ignored as asked"
    with pytest.raises(ValueError, match="ignore_config_keys must be names of keys"):
        load_model(folder, ignore_config_keys="frobnicate")
    assert tokens(folder, ignore_config_keys=["frobnicate", "hidden_act"])


@pytest.mark.parametrize(
    ("file", "keys", "words"),
    [
        ("generation_config.json", {"suppress_tokens": [5]}, "suppress_tokens"),
        ("generation_config.json", {"forced_bos_token_id": 5}, "forced_bos_token_id 5"),
        ("generation_config.json", {"frobnicate": 1}, "frobnicate 1"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens True"),
    ],
)
def test_other_files_have_tables_too(file, keys, words, tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama"))
    usual = json.loads((folder / file).read_text()) if (folder / file).exists() else {"eos_token_id": 1, "top_p": 0.9}
    (folder / file).write_text(json.dumps(usual | keys))
    with pytest.raises(ValueError, match=rf"{file}: {words}"):
        load_model(folder)
    assert file in load_model(folder, ignore_config_keys=list(keys)).findings


def test_a_folder_with_tekken_json_alone_gets_a_message_about_its_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama"), files={"tekken.json": {"config": {}}})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(folder) / name).unlink()
    with pytest.raises(ValueError, match=r"tekken\.json.*tokenizer\.json"):
        load_model(folder)


def test_describe_says_what_was_read_and_what_decides(tmp_path):
    template = "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    folder = write_folder(tmp_path / "m", fields_of("llama") | {"use_cache": True}, template=template)
    with Engine(str(folder), EngineConfig(num_blocks=16)) as engine:
        facts = engine.describe()
    assert "rope_theta" in facts["files"]["config.json"]["read"]
    assert facts["files"]["config.json"]["harmless"]["use_cache"] == "it says how others compute the same"
    assert facts["thinking"].startswith("no, as with enable_thinking false, because")
