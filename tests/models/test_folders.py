"""Quantised folders of tiny random models: logits with packed weights against plain mlx-lm in float32."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as plain_mlx_lm
from tiny_configurations import COMMON, SPECIAL
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

from workbench.models import load_model

TOKENS = mx.array(np.random.default_rng(8).integers(0, 256, (1, 17)))


def write_folder(folder, architecture, quantization, dtype, **changes):
    model = tiny_model(architecture, **changes)
    model.set_dtype(dtype)
    nn.quantize(model, **quantization)
    config = {**COMMON, "model_type": architecture, **SPECIAL.get(architecture, {}), **changes}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({**config, "quantization": quantization}))
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.mark.parametrize(
    ("architecture", "bits", "dtype", "changes"),
    [
        ("llama", 3, mx.float16, {"tie_word_embeddings": False}),
        ("qwen3", 4, mx.bfloat16, {}),
        ("mixtral", 6, mx.bfloat16, {}),
        ("phi3", 5, mx.float16, {}),
        ("gpt_oss", 8, mx.bfloat16, {}),
    ],
)
def test_logits_are_those_of_plain_mlx_lm(tmp_path, architecture, bits, dtype, changes):
    write_folder(tmp_path, architecture, {"group_size": 32, "bits": bits}, dtype, **changes)
    plain, _ = plain_mlx_lm(tmp_path)
    plain.set_dtype(mx.float32)  # scales too: the exact values
    loaded = load_model(tmp_path)
    assert loaded.quantized == f"{bits} bits"
    expected = np.array(plain(TOKENS))
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), expected, atol=3e-5 * np.abs(expected).max())
