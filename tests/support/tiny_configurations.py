"""Tiny configurations of mlx-lm's architectures, as the fields of their ModelArgs.

An architecture takes the fields of `COMMON` that it knows, and those of `SPECIAL` under its name. Sizes are small and
different from each other where the architecture lets them, so that a mistaken one shows.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 260
NUM_LAYERS = 4
WINDOW = 6
MAX_POSITION = 512

COMMON: dict[str, Any] = {
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

_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
_LONGCAT = _LATENT | {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 64,
        "n_layers": NUM_LAYERS,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v41": _LATENT
    | {
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": [0, 4, 4, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 4,
    },
    "exaone_moe": {"layer_types": _ALTERNATING, "is_moe_layer": [False, True, True, True]},
    "glm_moe_dsa": _LATENT
    | _INDEXER
    | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gptj": {"rotary_dim": 8},
    "kimi_k25": {"text_config": COMMON | _LATENT},
    "kimi_vl": {"text_config": COMMON | _LATENT | {"sliding_window": None}},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT | {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mellum": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 5000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm3": _LATENT
    | {
        "rope_scaling": {"short_factor": 1.1, "long_factor": 1.3},
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
    },
    "mistral4": _LATENT
    | {
        "head_dim": None,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 6,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
        ],
    },
    "openelm": {
        "num_transformer_layers": NUM_LAYERS,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * NUM_LAYERS,
        "num_kv_heads": [2] * NUM_LAYERS,
        "ffn_multipliers": [1.0, 1.5, 1.5, 2.0],
    },
    "olmo": {
        "d_model": 64,
        "n_layers": NUM_LAYERS,
        "mlp_hidden_size": 96,
        "n_heads": 4,
        "embedding_size": VOCAB_SIZE,
    },
    "phi3small": {
        "vocab_size": 100352,  # it overwrites the logits of ids up to this
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "phixtral": {"num_vocab": VOCAB_SIZE, "model_dim": 64, "num_heads": 4, "num_layers": NUM_LAYERS, "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "spark2_5": {
        "hidden_act": "gelu",
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
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
    "deepseek_v32": _LATENT | _INDEXER,
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


def _text(model_type: str, **changes: Any) -> dict[str, Any]:
    """The fields of a model whose text part has a configuration within the model's."""
    return {"text_config": COMMON | {"model_type": model_type} | SPECIAL.get(model_type, {}) | changes}


SPECIAL |= {
    "gemma3": {"vocab_size": VOCAB_SIZE} | _text("gemma3_text"),
    "gemma3n": _text(
        "gemma3n_text",
        layer_types=_ALTERNATING * 2,
        num_hidden_layers=2 * NUM_LAYERS,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 2 * NUM_LAYERS,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
        rope_local_base_freq=5000.0,
        final_logit_softcapping=30.0,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    ),
    "gemma4": {"vocab_size": VOCAB_SIZE} | _text("gemma4_text"),
    "kimi_k3": _text(
        "kimi_linear",
        hidden_act="situ",
        attn_res_block_size=2,
        first_k_dense_replace=1,
    ),
    "lfm2-vl": _text("lfm2"),
    "llama4": _text(
        "llama4_text",
        num_experts_per_tok=1,
        intermediate_size_mlp=96,
        attention_chunk_size=8,
        interleave_moe_layer_step=2,
        rope_scaling=None,
    ),
    "minimax_m3_vl": _text(
        "minimax_m3_text",
        sliding_window=None,
        dense_intermediate_size=96,
        sparse_attention_config={
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 1,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    ),
    "mistral3": _text("ministral3"),
    "muse_spark": _text(
        "muse_spark_text",
        post_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0},
        layer_rope_theta=[10000.0, 0.0] * (NUM_LAYERS // 2),
        layer_types=_ALTERNATING,
        final_logit_softcapping=30.0,
        output_multiplier=1.0,
        moe_hidden_size=32,
        num_shared_experts=0,
    ),
    "pixtral": _text("llama"),
    "nemotron": {"hidden_act": "relu2"},
    "qwen3_vl_moe": _text("qwen3_moe", sliding_window=None),
}

NOT_TRIED = {"prism_hadamard_qwen35": "its weights are packs of 2 bits that a list in the configuration describes"}
"""Architectures without a configuration, and why."""
