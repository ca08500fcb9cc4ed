"""GGUF files of every architecture and type against mlx-lm models that hold the same weights."""

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import byte_tokenizer, random_model, tiny_config, write_model
from mlx.utils import tree_flatten

from workbench.models import load_model
from workbench.models.gguf.file import GGUFError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "lfm2")
TOKENS = np.random.default_rng(5).integers(0, 262, (1, 23))


def logits(model) -> np.ndarray:
    return np.array(model(mx.array(TOKENS)))


def assert_same_logits(model, expected, tolerance=2e-5):
    actual, expected = logits(model), logits(expected)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("matrix_type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_equal_the_model_with_the_same_weights(tmp_path, architecture, matrix_type):
    config = tiny_config(architecture)
    model = random_model(config)
    weights = write_model(tmp_path / "m.gguf", architecture, config, model, matrix_type=matrix_type)
    loaded = load_model(tmp_path / "m.gguf", weights="float32")
    reference = random_model(config)
    reference.load_weights([(name, mx.array(values)) for name, values in weights.items()], strict=True)
    assert_same_logits(loaded.model, reference)
    for name, array in tree_flatten(loaded.model.parameters()):
        np.testing.assert_allclose(np.array(array), weights[name], atol=1e-6, err_msg=name)
    packed = load_model(tmp_path / "m.gguf")
    assert packed.num_parameters == loaded.num_parameters
    assert_same_logits(packed.model, reference)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_fact_about_the_model_is_read(tmp_path, architecture):
    config = tiny_config(architecture)
    write_model(tmp_path / "tiny.gguf", architecture, config, random_model(config))
    loaded = load_model(tmp_path / "tiny.gguf")
    assert loaded.name == "tiny"
    assert loaded.architecture == config["model_type"]
    assert loaded.max_position == 640
    assert loaded.vocab_size == 262
    assert loaded.eos_token_ids == {261}
    assert loaded.dtype == "float32"
    assert loaded.num_parameters == sum(a.size for _, a in tree_flatten(random_model(config).parameters()))
    assert repr(loaded).startswith("LoadedModel('tiny': ")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_embeddings(tmp_path, architecture):
    config = tiny_config(architecture, tie_word_embeddings=True)
    model = random_model(config)
    write_model(tmp_path / "m.gguf", architecture, config, model)
    loaded = load_model(tmp_path / "m.gguf")
    assert "lm_head.weight" not in dict(tree_flatten(loaded.model.parameters()))
    assert_same_logits(loaded.model, model)


def test_llama_biases_are_permuted_too(tmp_path):
    config = tiny_config("llama", attention_bias=True, mlp_bias=True)
    model = random_model(config)
    write_model(tmp_path / "m.gguf", "llama", config, model)
    assert_same_logits(load_model(tmp_path / "m.gguf").model, model)


def test_llama_with_its_own_head_size(tmp_path):
    config = tiny_config("llama", head_dim=32)
    model = random_model(config)
    lengths = {"attention.key_length": 32, "attention.value_length": 32}
    write_model(tmp_path / "m.gguf", "llama", config, model, metadata=lengths)
    assert_same_logits(load_model(tmp_path / "m.gguf").model, model)


def test_forgetting_to_reorder_q_and_k_is_seen(tmp_path, monkeypatch):
    config = tiny_config("llama")
    model = random_model(config)
    write_model(tmp_path / "m.gguf", "llama", config, model)
    monkeypatch.setattr("workbench.models.gguf.loader._row_order", lambda *_: None)
    wrong = load_model(tmp_path / "m.gguf").model
    assert np.abs(logits(wrong) - logits(model)).max() > 0.05


def test_forgetting_the_norm_offset_is_seen(tmp_path):
    config = tiny_config("gemma3")
    model = random_model(config)
    write_model(tmp_path / "m.gguf", "gemma3", config, model)
    wrong = load_model(tmp_path / "m.gguf").model
    wrong.model.norm.weight = wrong.model.norm.weight + 1
    assert np.abs(logits(wrong) - logits(model)).max() > 0.05


# -- RoPE scaling --------------------------------------------------------------------------------------------


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "lfm2"])
@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 160,
                "rope.scaling.yarn_beta_fast": 6.0,
                "rope.scaling.yarn_beta_slow": 0.5,
            },
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 160,
                "beta_fast": 6.0,
                "beta_slow": 0.5,
            },
        ),
    ],
    ids=["none", "linear", "old linear", "yarn"],
)
def test_rope_scaling_is_honoured(tmp_path, architecture, metadata, scaling):
    config = tiny_config(architecture)
    model = random_model(config)
    write_model(tmp_path / "m.gguf", architecture, config, model, metadata=metadata)
    loaded = load_model(tmp_path / "m.gguf").model
    assert_same_logits(loaded, random_model({**config, "rope_scaling": scaling}))
    if scaling:
        assert np.abs(logits(loaded) - logits(model)).max() > 1e-3


def test_rope_factors_of_llama_3(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config("llama", rope_scaling=scaling)
    model = random_model(config)
    plain = config["rope_theta"] ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = np.array(model.layers[0].self_attn.rope._freqs) / plain
    assert factors.min() < 1.01 and factors.max() > 7.9
    write_model(tmp_path / "m.gguf", "llama", config, model, extra_tensors={"rope_freqs.weight": factors})
    loaded = load_model(tmp_path / "m.gguf").model
    assert_same_logits(loaded, model)
    assert np.abs(logits(loaded) - logits(random_model(tiny_config("llama")))).max() > 1e-3


@pytest.mark.parametrize(
    ("factors", "metadata", "message"),
    [
        (np.ones(7, np.float32), {}, "8 positive factors"),
        (np.zeros(8, np.float32), {}, "8 positive factors"),
        (np.ones(8, np.float32), {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "together with"),
    ],
)
def test_bad_rope_factors_are_refused(tmp_path, factors, metadata, message):
    config = tiny_config("llama")
    tensors = {"rope_freqs.weight": factors}
    write_model(tmp_path / "m.gguf", "llama", config, random_model(config), metadata=metadata, extra_tensors=tensors)
    with pytest.raises(GGUFError, match=message):
        load_model(tmp_path / "m.gguf")


# -- unknown metadata and tensors are refused by name --------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope'"),
        ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor=0.5"),
        ("qwen3", {"expert_count": 8}, "qwen3.expert_count=8"),
        ("llama", {"attention.temperature_length": 9}, "llama.attention.temperature_length=9"),
        ("qwen3", {"pooling_type": 3}, "qwen3.pooling_type=3"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping=30.0"),
        ("qwen2", {"attention.value_length": 8}, "qwen2.attention.value_length=8"),
        ("qwen3", {"rope.dimension_count": 8}, "qwen3.rope.dimension_count=8"),
    ],
)
def test_unknown_hyperparameters_are_refused(tmp_path, architecture, metadata, message):
    config = tiny_config(architecture)
    write_model(tmp_path / "m.gguf", architecture, config, random_model(config), metadata=metadata)
    with pytest.raises(GGUFError, match=message):
        load_model(tmp_path / "m.gguf")


def test_hyperparameters_without_effect_are_accepted(tmp_path):
    config = tiny_config("llama")
    model = random_model(config)
    harmless = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.finetuned": True}
    write_model(tmp_path / "m.gguf", "llama", config, model, metadata=harmless)
    assert_same_logits(load_model(tmp_path / "m.gguf").model, model)


def test_an_unknown_architecture_is_refused(tmp_path):
    config = tiny_config("qwen3")
    write_model(tmp_path / "m.gguf", "qwen3", config, random_model(config))
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(data.replace(b"qwen3", b"mamba"))
    with pytest.raises(GGUFError, match=r"architecture 'mamba' is not supported; llama, .*, lfm2 are"):
        load_model(tmp_path / "x.gguf")


def test_unknown_missing_and_misshapen_tensors_are_refused(tmp_path):
    config = tiny_config("qwen3")
    model = random_model(config)
    path = tmp_path / "m.gguf"
    extra = {"blk.1.attn_sinks.weight": np.ones(4, np.float32)}
    write_model(path, "qwen3", config, model, extra_tensors=extra)
    with pytest.raises(GGUFError, match=r"'blk\.1\.attn_sinks\.weight' is unknown for architecture 'qwen3'"):
        load_model(path)
    write_model(path, "qwen3", config, model, extra_tensors={"blk.3.attn_q.weight": np.ones((128, 64), np.float32)})
    with pytest.raises(GGUFError, match=r"'blk\.3\.attn_q\.weight' has no place"):
        load_model(path)
    write_model(path, "qwen3", config, model, leave_out=("blk.2.ffn_up.weight",))
    with pytest.raises(GGUFError, match=r"no tensor for 'model\.layers\.2\.mlp\.up_proj\.weight'"):
        load_model(path)
    write_model(
        path,
        "qwen3",
        config,
        model,
        leave_out=("blk.2.ffn_up.weight",),
        extra_tensors={"blk.2.ffn_up.weight": np.ones((64, 96), np.float32)},
    )
    with pytest.raises(GGUFError, match=r"'blk\.2\.ffn_up\.weight' has shape \(64, 96\), .* implies \(96, 64\)"):
        load_model(path)
    write_model(path, "qwen3", config, model, leave_out=("token_embd.weight",))
    with pytest.raises(GGUFError, match=r"'token_embd\.weight' is missing"):
        load_model(path)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    config = tiny_config("qwen3")
    tokenizer = byte_tokenizer(262, pre="klingon-bpe")
    write_model(tmp_path / "m.gguf", "qwen3", config, random_model(config), tokenizer=tokenizer)
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.pre='klingon-bpe' is unknown"):
        load_model(tmp_path / "m.gguf")
