"""Random tiny models of mlx-lm's architectures, small enough to build by the dozen.

Weights are random and scaled so that every layer moves the logits: a wrong position, window or sink shows.
`SERVED_AS` gives the expected answer of the preflight for each of them. It records measurements; the product has no
such list and finds the answer for a model when it is loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from workbench.models.load import LoadedModel

VOCAB_SIZE = 260
NUM_LAYERS = 4
WINDOW = 6
MAX_POSITION = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": True,
    # GPT-2's names.
    "n_embd": 64,
    "n_layer": NUM_LAYERS,
    "n_head": 4,
    "n_positions": MAX_POSITION,
    "n_ctx": MAX_POSITION,
}

_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_GRANITE = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "ssm_state_size": 8,
    "state_size": 8,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
}
_BAILING = {"layer_group_size": 2, "group_norm_size": 2, "moe_shared_expert_intermediate_size": 32}

_SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {"layer_types": _ALTERNATING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "bailing_hybrid": _BAILING | _LATENT,
    "bailing_moe_linear": _BAILING,
    "bailing_moe_v3": _BAILING | _LATENT | {"short_conv_kernel_size": 4, "head_dim": 32},
    "baichuan_m1": {
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
    },
    "deepseek_v2": _LATENT | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "deepseek_v3": _LATENT,
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4},
    "exaone": {"num_layers": NUM_LAYERS},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "gemma4_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
    },
    "gear": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": _LATENT,
    "gpt_bigcode": {"n_inner": 96},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE
    | {
        "layer_types": ["mamba", "attention"] * (NUM_LAYERS // 2),
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_linear": _LATENT
    | {
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": MAX_POSITION,
        "num_experts_per_token": 2,
    },
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "lfm2_moe": {
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1, 3],
    },
    "lille-130m": {"block_size": MAX_POSITION, "n_kv_heads": 2},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 8},
    "mamba2": _MAMBA2 | {"num_heads": 4, "time_step_limit": (0.0, 10.0), "time_step_rank": 8},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minimax": {"rotary_dim": 8},
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 6,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "nemotron_h": _MAMBA2
    | {
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "time_step_limit": (0.0, 10.0),
    },
    "olmo_hybrid": _DELTA | {"linear_allow_neg_eigval": True, "linear_num_key_heads": 4},
    "olmo3": {"layer_types": _ALTERNATING},
    "phi3": {"head_dim": None},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
        "mamba_chunk_size": 16,
        "attention_window_size": MAX_POSITION,
    },
    "qwen": {"kv_channels": 16, "intermediate_size": 192},
    "qwen3_5": _DELTA | {"num_experts": 0, "rope_parameters": {"type": "default", "rope_theta": 10000.0}},
    "qwen3_5_moe": _DELTA | {"rope_parameters": {"type": "default", "rope_theta": 10000.0}},
    "qwen3_next": _DELTA,
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"num_attention_groups": 2},
}

_KERNEL = """
    Klear afmoe apertus bailing_moe cohere cohere2 deepseek deepseek_v2 dots1 ernie4_5 ernie4_5_moe exaone exaone4 gemma
    gemma3_text glm glm4 glm4_moe gpt2 gpt_neox gpt_oss granite granitemoe helium hunyuan hunyuan_v1_dense internlm2
    internlm3 laguna lille-130m llama llama4_text mimo minicpm minimax ministral3 mixtral muse_glimmer nanbeige nanochat
    nemotron olmo2 olmo3 olmoe phi phi3 phimoe qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl seed_oss smollm3
    solar_open stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
"""
_GATHER = "deepseek_v3 gemma2 gemma4_text glm4_moe_lite iquestloopcoder plamo3"
_RECURRENT_KERNEL = """
    bailing_moe_linear falcon_h1 granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2 nemotron_h olmo_hybrid qwen3_5
    qwen3_5_moe qwen3_next recurrent_gemma rwkv7
"""
_RECURRENT_GATHER = "bailing_hybrid bailing_moe_v3 kimi_linear plamo2"
_REFUSED = "afm7 baichuan_m1 deepseek_v32 gear gpt_bigcode"

RECURRENT = sorted([*_RECURRENT_KERNEL.split(), *_RECURRENT_GATHER.split()])
"""Architectures with recurrent layers that are served."""

SERVED_AS: dict[str, str] = {
    name: mode
    for mode, names in (
        ("kernel", _KERNEL + _RECURRENT_KERNEL),
        ("gather", f"{_GATHER} {_RECURRENT_GATHER}"),
        ("refused", _REFUSED),
    )
    for name in names.split()
}


def tiny_model(architecture: str, *, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes: Any) -> nn.Module:
    """A random model of an mlx-lm architecture, with evaluated weights.

    Args:
        architecture: The name of its module in ``mlx_lm.models``.
        seed: Seed of the weights.
        dtype: Element type of the weights.
        **changes: Fields of the architecture's ModelArgs that differ from the tiny defaults.
    """
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    fields = {**_COMMON, "model_type": architecture, **_SPECIAL.get(architecture, {}), **changes}
    model = module.Model(module.ModelArgs.from_dict(fields))
    keys = iter(mx.random.split(mx.random.key(seed), 10_000))

    def draw(path: str, weight: mx.array) -> mx.array:
        noise = mx.random.normal(weight.shape, key=next(keys))
        if weight.ndim < 2:
            return ((1.0 if "norm" in path else 0.0) + 0.2 * noise).astype(dtype)
        return (noise * 2 / weight.shape[-1] ** 0.5).astype(dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


def tiny_loaded_model(architecture: str, **changes: Any) -> LoadedModel:
    """`tiny_model` with the other parts of a loaded model, except a tokenizer."""
    model = tiny_model(architecture, **changes)
    return LoadedModel(
        model=model,
        tokenizer=None,
        name=f"tiny-{architecture}",
        architecture=architecture,
        max_position=MAX_POSITION,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        num_parameters=sum(weight.size for _, weight in tree_flatten(model.parameters())),
        source="random",
    )
