"""Quantised folders of tiny random models: logits with packed weights against plain mlx-lm in float32."""

import importlib
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model as plain_mlx_lm
from tiny_configurations import COMMON, SPECIAL
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

from workbench.models import load_model
from workbench.models.packed.activations import packed_matrices

TOKENS = mx.array(np.random.default_rng(8).integers(0, 256, (1, 17)))


def write_folder(folder, architecture, quantization, dtype, class_predicate=None, **changes):
    model = tiny_model(architecture, **changes)
    model.set_dtype(dtype)
    nn.quantize(model, **quantization, class_predicate=class_predicate)
    known = importlib.import_module(f"mlx_lm.models.{architecture}").ModelArgs.__dataclass_fields__
    common = {name: value for name, value in COMMON.items() if name in known or name == "max_position_embeddings"}
    config = {**common, "model_type": architecture, **SPECIAL.get(architecture, {}), **changes}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({**config, "quantization": quantization}))
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def packed_and_plain(folder):
    """The loaded model, and the logits of plain mlx-lm in float32."""
    plain, _ = plain_mlx_lm(folder)
    plain.set_dtype(mx.float32)  # scales too: the exact values
    return load_model(folder), np.array(plain(TOKENS))


def check_logits(loaded, expected):
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), expected, atol=3e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("architecture", "bits", "dtype", "changes"),
    [
        ("llama", 3, mx.float16, {"tie_word_embeddings": False}),
        ("qwen3", 4, mx.bfloat16, {}),
        ("mixtral", 6, mx.bfloat16, {}),
        ("phi3", 5, mx.float16, {}),
        ("gpt_oss", 8, mx.bfloat16, {}),
        ("qwen2_moe", 2, mx.bfloat16, {}),
        ("qwen3_moe", 4, mx.float16, {}),
        ("olmoe", 3, mx.bfloat16, {}),
        ("phimoe", 5, mx.float16, {}),
    ],
)
def test_logits_are_those_of_plain_mlx_lm(tmp_path, architecture, bits, dtype, changes):
    write_folder(tmp_path, architecture, {"group_size": 32, "bits": bits}, dtype, **changes)
    loaded, expected = packed_and_plain(tmp_path)
    assert loaded.quantized == f"{bits} bits"
    assert not any(isinstance(module, SwitchLinear | QuantizedSwitchLinear) for module in loaded.model.modules())
    check_logits(loaded, expected)
    check_logits(load_model(tmp_path, weights="float32"), expected)


@pytest.mark.parametrize("architecture", ["gpt_oss", "mixtral", "llama"])
def test_weights_in_mxfp4(tmp_path, architecture):
    write_folder(tmp_path, architecture, {"group_size": 32, "bits": 4, "mode": "mxfp4"}, mx.bfloat16)
    loaded, expected = packed_and_plain(tmp_path)
    assert loaded.quantized == "4 bits"
    assert all(matrix.form.table for matrix in packed_matrices(loaded.model).values())
    check_logits(loaded, expected)
    check_logits(load_model(tmp_path, weights="float32"), expected)


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_weights_that_are_not_packed(tmp_path, mode, group_size, bits):
    write_folder(tmp_path, "mixtral", {"group_size": group_size, "bits": bits, "mode": mode}, mx.bfloat16)
    loaded, expected = packed_and_plain(tmp_path)
    assert loaded.quantized == ""
    check_logits(loaded, expected)


def test_a_scale_for_each_expert(tmp_path):
    """MLX has no products with them on a CPU, so weights are compared with those before they were quantised."""
    quantization = {"group_size": 16, "bits": 4, "mode": "nvfp4"}

    def with_scales(_, module):
        return {**quantization, "global_scale": True} if isinstance(module, SwitchLinear) else False

    write_folder(tmp_path, "mixtral", quantization, mx.float32, with_scales)
    stored = tiny_model("mixtral").model.layers[1].block_sparse_moe.switch_mlp
    loaded = load_model(tmp_path).model.layers[1].block_sparse_moe.switch_mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        exact, weight = np.array(stored[name].weight), np.array(loaded[name].weight)
        largest = np.abs(exact).max(axis=(1, 2), keepdims=True)
        assert 0.01 < (np.abs(weight - exact) / largest).max() < 0.2  # 4 and 6 are neighbours


def test_experts_take_activations_of_8_bits(tmp_path):
    write_folder(tmp_path, "qwen3_moe", {"group_size": 32, "bits": 4}, mx.float16)
    exact = np.array(load_model(tmp_path).model(TOKENS))
    loaded = load_model(tmp_path, activations="int8")
    experts = [matrix for path, matrix in packed_matrices(loaded.model).items() if path.endswith("[1]")]
    assert experts and all(matrix.activations == "int8" for matrix in experts)
    difference = np.abs(np.array(loaded.model(TOKENS)) - exact)
    assert 0 < np.median(difference) < 0.05 * np.abs(exact).max()  # a token whose router is undecided may differ more


def test_a_layer_without_a_probed_row(tmp_path):
    """The rows that are probed when a model is loaded are in q and v, which share a matrix with k."""
    changes = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 32}
    write_folder(tmp_path, "qwen3", {"group_size": 32, "bits": 4}, mx.bfloat16, **changes)
    loaded, expected = packed_and_plain(tmp_path)
    check_logits(loaded, expected)


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_packed_weights_cannot_be_replaced(tmp_path, architecture):
    write_folder(tmp_path, architecture, {"group_size": 32, "bits": 4}, mx.bfloat16)
    loaded = load_model(tmp_path).model
    for layer in (module for module in loaded.modules() if hasattr(module, "num_packed_weights")):
        with pytest.raises(AttributeError, match='packed weights cannot be replaced: load the model with weights="fl'):
            layer.weight = mx.zeros((2, 2))
