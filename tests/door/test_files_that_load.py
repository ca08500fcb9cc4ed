"""Files that load, by name: a new row of a table must refuse none of them. ``pytest -v`` prints the list.

Those are SmolLM2, a GGUF file of every architecture and type, and a folder of every architecture of mlx-lm, in every
form in which tools write one.
"""

import dataclasses
import importlib
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from door_folders import fields_of, write_folder
from gguf_files import GGUF_ARCHITECTURES, byte_tokenizer, random_model, tiny_config, write_model
from list_models import architectures
from mlx.utils import tree_flatten
from tiny_configurations import COMMON, NOT_TRIED, SPECIAL

from workbench.models import load_model
from workbench.models.config_json import arguments_of
from workbench.models.gguf.architectures import ARCHITECTURES

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
TOKENS = mx.array([[1, 2, 3]])
NO_FOLDER = {
    "olmo": "mlx-lm's module needs a further package",
    "bitnet": "mlx-lm's layers need Metal",
    **NOT_TRIED,
}
"""Architectures without a folder that loads, and why."""


def assert_computes(model):
    logits = np.array(model.model(TOKENS).astype(mx.float32))
    assert np.isfinite(logits).all() and logits.std() > 0


def test_smollm2_loads():
    assert_computes(load_model("smollm2"))


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("matrix_type", TYPES)
@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_a_gguf_file_loads(architecture, matrix_type, tmp_path):
    config = tiny_config(architecture)
    write_model(tmp_path / "m.gguf", architecture, config, random_model(config), matrix_type=matrix_type)
    assert_computes(load_model(tmp_path / "m.gguf"))


GENERAL = {
    "general.name": "m", "general.author": "a", "general.quantization_version": 2, "general.file_type": 0,
    "general.size_label": "1M", "general.license": "mit", "general.tags": ["a"], "general.languages": ["en"],
    "general.base_model.count": 1, "general.base_model.0.name": "b", "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}  # fmt: skip
"""Metadata that converters write besides."""


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_a_gguf_file_with_usual_metadata_loads(architecture, tmp_path):
    config = tiny_config(architecture)
    tokenizer = {**byte_tokenizer(config["vocab_size"]), **GENERAL}
    write_model(tmp_path / "m.gguf", architecture, config, random_model(config), tokenizer=tokenizer)
    assert_computes(load_model(tmp_path / "m.gguf"))


TEXT_TYPES = {"qwen2_vl": "qwen2", "qwen3_vl": "qwen3"}
PARTS = ("qwen2_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Architectures whose fields stand in text_config alone."""


CONSISTENT = {
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "granitemoehybrid": {"mamba_expand": 1},
    "mamba2": {"expand": 1},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "qwen3_5": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
}
"""Keys besides, without which transformers refuses the tiny configuration, or which mlx-lm reads instead of others."""
CONSISTENT["qwen3_5_moe"] = CONSISTENT["qwen3_5"]


def folder_config(architecture):
    changes = CONSISTENT.get(architecture, {})
    if architecture not in PARTS:
        return fields_of(architecture, **changes)
    found = arguments_of({"model_type": architecture, "text_config": {}})
    known = {field.name for field in dataclasses.fields(found[1])}
    part = {key: value for key, value in {**COMMON, **SPECIAL.get(architecture, {})}.items() if key in known} | changes
    part |= {"model_type": TEXT_TYPES.get(architecture, f"{architecture}_text"), "vocab_size": 300}
    return {"model_type": architecture, "vocab_size": 300, "text_config": part}


@pytest.mark.parametrize("architecture", sorted(set(architectures()) - set(NO_FOLDER)))
def test_a_folder_loads(architecture, tmp_path):
    model = load_model(write_folder(tmp_path / "m", folder_config(architecture)), weights="float32")
    assert model.num_parameters > 0 and model.vocab_size > 0


USUAL = {
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.57.1", "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": [2, 3],
    "pad_token_id": None, "pretraining_tp": 1, "attention_dropout": 0.0, "_name_or_path": "a/b",
    "return_dict": True, "output_attentions": False, "is_encoder_decoder": False, "tie_word_embeddings": False,
    "rope_scaling": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
GENERATION = {
    "_from_model_config": True, "bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6,
    "top_p": 0.9, "top_k": 20, "max_length": 4096, "pad_token_id": 0, "transformers_version": "4.57.1",
    "repetition_penalty": 1.05, "forced_eos_token_id": None,
}  # fmt: skip
TOKENIZER = {
    "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False, "legacy": False,
    "model_max_length": 131072, "padding_side": "left", "unk_token": None, "pad_token": "<|im_end|>",
    "errors": "replace", "additional_special_tokens": ["<think>"], "split_special_tokens": False,
}  # fmt: skip
FORMS = {
    "16 bits": {"dtype": mx.float16},
    "brain floats": {"dtype": mx.bfloat16},
    "4 bits": {"bits": 4, "group_size": 32},
    "8 bits": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "two files": {"parts": 2},
}


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_folder_in_the_forms_of_tools_loads(architecture, form, tmp_path):
    options = dict(FORMS[form])
    config = {**fields_of(architecture, hidden_size=64, intermediate_size=128), **USUAL}
    files = {"generation_config.json": GENERATION, "special_tokens_map.json": {"eos_token": "<|im_end|>"}}
    folder = write_folder(tmp_path / "m", config, tokenizer_config=TOKENIZER, files=files)
    weights = mx.load(str(folder / "model.safetensors"))
    if "dtype" in options:
        weights = {name: array.astype(options["dtype"]) for name, array in weights.items()}
    if "bits" in options:
        module = importlib.import_module(f"mlx_lm.models.{architecture}")
        model = module.Model(module.ModelArgs.from_dict(config))
        model.load_weights(list(weights.items()))
        nn.quantize(model, **options)
        weights, config = dict(tree_flatten(model.parameters())), {**config, "quantization": options}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    if options.get("parts") == 2:
        (folder / "model.safetensors").unlink()
        names, index = sorted(weights), {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            file = f"model-{number:05d}-of-00002.safetensors"
            index |= dict.fromkeys(part, file)
            mx.save_safetensors(str(folder / file), {name: weights[name] for name in part}, metadata={"format": "mlx"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert_computes(load_model(folder))


def test_the_lists_are_complete():
    """Every architecture of a GGUF file that is read has a file here."""
    assert set(GGUF_ARCHITECTURES) == set(ARCHITECTURES)
