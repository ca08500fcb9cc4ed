"""Tiny GGUF files for tests, written by PyPI gguf from random mlx-lm models, as llama.cpp's converter would."""

from __future__ import annotations

import importlib
from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "lfm2": "lfm2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
}
GGUF_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}


def tiny_config(architecture: str, **changes) -> dict:
    """Hugging Face configuration of a tiny model; all numbers differ from each other and from the defaults."""
    config = {
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if architecture in ("qwen3", "qwen3moe", "gemma3") else 16,
        "rms_norm_eps": 3e-5,
        "vocab_size": 262,
        "max_position_embeddings": 640,
        "rope_theta": 7000.0,
        "tie_word_embeddings": architecture in ("gemma3", "lfm2"),
    }
    if architecture == "gemma3":
        config |= {
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 32,
            "rope_local_base_freq": 900.0,
        }
    if architecture == "lfm2":
        config |= {
            "num_hidden_layers": 4,
            "full_attn_idxs": [1, 2],
            "norm_eps": config["rms_norm_eps"],
            "conv_L_cache": 4,
            "conv_bias": False,
            "block_dim": 64,
            "block_ff_dim": 140,  # adjusted to 96
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
        }
    if config["model_type"] in ("qwen2_moe", "qwen3_moe", "olmoe") or changes.get("model_type") == "mixtral":
        config |= {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2}
    if architecture in ("qwen2moe", "qwen3moe"):
        config |= {
            "moe_intermediate_size": 160,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if architecture == "qwen2moe":
        config |= {"shared_expert_intermediate_size": 224}
    return config | changes


def random_model(config: dict, seed: int = 0) -> nn.Module:
    """An mlx-lm model with random float32 weights, norms and biases included."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"]:
        model.sanitize({})
    rng = np.random.default_rng(seed)
    weights = []
    for name, array in tree_flatten(model.parameters()):
        values = rng.standard_normal(array.shape) * (0.3 if array.ndim == 1 else array.shape[-1] ** -0.5)
        if name.endswith("norm.weight") and config["model_type"] != "gemma3_text":
            values = values + 1
        weights.append((name, mx.array(values.astype(np.float32))))
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def permute_as_converter(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter writes them for the llama architecture."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_model(
    path: Path,
    architecture: str,
    config: dict,
    model: nn.Module,
    *,
    matrix_type: str = "F32",
    metadata: dict | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
    tokenizer: dict | None = None,
) -> dict[str, np.ndarray]:
    """Write a model as a GGUF file.

    Returns:
        The values in the file by mlx-lm parameter name, after quantisation.
    """
    writer = gguf.GGUFWriter(path, architecture)
    write_hyperparameters(writer, architecture, config)
    for key, value in (metadata or {}).items():
        add_value(writer, f"{architecture}.{key}", value)
    write_tokenizer(writer, tokenizer or byte_tokenizer(config["vocab_size"]))
    names = gguf.get_tensor_name_map(GGUF_ARCHITECTURES[architecture], config["num_hidden_layers"])
    stands_for = {}
    for name, array in tree_flatten(model.parameters()):
        is_expert = "switch_mlp" in name
        converted = name.replace("switch_mlp", "experts").replace("block_sparse_moe", "mlp") if is_expert else name
        tensor_name = names.get_name(converted, try_suffixes=(".weight", ".bias"))
        assert tensor_name, f"gguf has no name for {name}"
        if tensor_name in leave_out:
            continue
        values = np.array(array)
        stored = values
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(tensor_name.split(".")[-2])
        if architecture == "llama" and heads:
            stored = permute_as_converter(values, config[heads])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            stored = stored + 1
        if tensor_name.endswith("shortconv.conv.weight"):
            stored = stored[..., 0]
        ggml_type = gguf.GGMLQuantizationType[matrix_type if array.ndim == 2 or is_expert else "F32"]
        data = quantize(np.ascontiguousarray(stored), ggml_type)
        writer.add_tensor(tensor_name, data, raw_dtype=ggml_type)
        if ggml_type.name == "F32":
            stands_for[name] = values
        else:
            back = dequantize(data, ggml_type)
            if architecture == "llama" and heads:
                head_dim = values.shape[0] // config[heads]
                back = back.reshape(config[heads], head_dim // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
            stands_for[name] = back
    for tensor_name, values in (extra_tensors or {}).items():
        writer.add_tensor(tensor_name, values)
    finish(writer)
    return stands_for


def write_hyperparameters(writer: gguf.GGUFWriter, architecture: str, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kv_heads = config["num_key_value_heads"]
    if "full_attn_idxs" in config:
        kv_heads = [kv_heads * (layer in config["full_attn_idxs"]) for layer in range(config["num_hidden_layers"])]
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if architecture == "lfm2":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_vocab_size(config["vocab_size"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        add_value(writer, "gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
        add_value(writer, "gemma3.rope.freq_base_swa", config["rope_local_base_freq"])


def add_value(writer: gguf.GGUFWriter, key: str, value) -> None:
    """Add one metadata value by its Python type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def byte_tokenizer(vocab_size: int, pre: str = "gpt-2") -> dict:
    """Metadata of a byte-level tokenizer with two merges; control tokens fill the vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    merged = ["th", "the"]
    control = [f"<|{index}|>" for index in range(vocab_size - len(letters) - len(merged))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": letters + merged + control,
        "tokenizer.ggml.token_type": [1] * (len(letters) + len(merged)) + [3] * len(control),
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": vocab_size - 2,
        "tokenizer.ggml.eos_token_id": vocab_size - 1,
    }


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    for key, value in tokenizer.items():
        add_value(writer, key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
