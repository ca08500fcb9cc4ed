"""Tables of the keys of config.json: what is harmless, what is refused, and what mlx-lm's architectures compute."""

from __future__ import annotations

from typing import Any

from workbench.base.key_table import Rule

TEXT_PARTS: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
}
"""Architectures that hand ``text_config`` to another one, and the arguments of that."""

DESCRIPTIVE = (
    Rule("harmless", "architectures model_type auto_map *_name_or_path name_or_path name transformers_version "
         "torch_dtype dtype transformers.js_config *attn_implementation* *experts_implementation* _commit_hash "
         "license* "
         "unsloth_* is_llama_config task_specific_params finetuning_task tokenizer_class base_model* mlx* "
         "transformers_weights *auto_class* model_name model_file", "it describes the file"),
    Rule("harmless", "quantization quantization_config compression_config", "mlx-lm reads it beside the arguments"),
    Rule("harmless", "quantize_activations", "it is off", (False, None)),
    Rule("harmless", "*_token_id *_token_ids *_token_index *_token eos_ids tokenizer_* tokenizer",
         "the tokenizer decides; mlx-lm reads eos_token_id"),
    Rule("harmless", "initializer_* init_* *_init_variance_scale *_init_* *dropout* *_pdrop *_loss* *loss_* "
         "aux_loss_alpha "
         "*_jitter_noise gradient_checkpointing seq_aux rescale_prenorm_residual layerdrop *_a_log_* *_dt_* "
         "time_step_m* time_step_floor time_step_scale time_step_init_scheme router_bias_update_* use_aux_*",
         "it is for training"),
    Rule("harmless", "use_cache cache_implementation output_* return_dict* torchscript pruned_heads id2label label2id "
         "problem_type num_labels summary_* classifier_* chunk_size_feed_forward keys_to_ignore_at_inference "
         "num_logits_to_keep is_decoder add_cross_attention cross_attention_hidden_size pretraining_tp tf_legacy_loss "
         "use_bfloat16 *flash_attn* use_fused_* fused_* use_sdpa* ep_size moe_shared_expert_overlap use_mamba_kernels "
         "use_mambapy use_associative_scan mamba_ssm_cache_dtype mamba_chunk_size chunk_size residual_in_fp32 "
         "*_softmax_in_fp32 reorder_and_upcast_attn use_triton* use_cache_quantization use_cache_kernel _cross_* "
         "softmax_in_fp32 onnx_safe fp16 fp32 bf16", "it says how others compute the same"),
    Rule("harmless", "do_sample temperature top_k top_p typical_p repetition_penalty length_penalty num_beams* "
         "min_length "
         "max_length max_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size early_stopping diversity_penalty "
         "num_return_sequences exponential_decay_length_penalty remove_invalid_values bad_words_ids prefix",
         "sampling is asked for by requests"),
    Rule("harmless", "num_nextn_predict_layers mtp_* num_mtp_* *_mtp_*", "the layers that draft further tokens "
         "are left out"),
    Rule("harmless", "max_position_embeddings n_positions max_seq_len max_sequence_length seq_length n_ctx "
         "model_max_length max_context_length", "it is the length of the context"),
)  # fmt: skip
"""Keys of all architectures that change nothing here, whatever their values."""

NEUTRAL = (
    Rule("harmless", "scale_attn_weights", "attention is scaled", (True,)),
    Rule("harmless", "is_encoder_decoder tie_encoder_decoder", "the model is a decoder", (False, None)),
    Rule("harmless", "use_bidirectional_attention", "attention looks back alone", (False, None)),
    Rule("refused", "use_bidirectional_attention", "attention of mlx-lm's architectures looks back alone"),
    Rule("harmless", "rope_scaling rope_parameters", "there is none", (None,)),
    Rule(
        "harmless",
        "*bias add_bias_linear *qk_norm *qk_layernorm",
        "the weights decide: mlx-lm refuses weights that it has no place for, and weights that are missing",
    ),
    Rule(
        "harmless",
        "tie_word_embeddings",
        "the weights decide: mlx-lm refuses a head that it has no place for",
        (False,),
    ),
    Rule(
        "read",
        "rope_scaling rope_parameters rope_theta partial_rotary_factor",
        "each layer's rotation is compared with it",
    ),
    Rule("harmless", "original_max_position_embeddings", "RoPE's own parameters have it"),
    Rule("harmless", "rope_interleaved rope_traditional", "halves of a head are rotated", (False, None)),
)
"""Keys of all architectures that change nothing with some values."""

SIZES = Rule(
    "harmless",
    "hidden_size head_dim num_key_value_heads num_attention_heads intermediate_size *intermediate_size vocab_size "
    "num_hidden_layers num_layers num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts "
    "*_lora_rank qk_*head_dim v_head_dim linear_head_dim linear_num_heads *_kernel_dim *_kernel_size d_model n_embd "
    "n_layer n_layers n_head n_heads n_inner *expand lru_width conv1d_width vocab_size_per_layer_input",
    "the shapes of the weights decide",
)  # fmt: skip
"""Sizes under names that an architecture does not read: mlx-lm refuses weights of other shapes than the model's."""

CHANGES_LOGITS = (
    Rule(
        "harmless",
        "*_multiplier *_scaling *_scaling_factor *_scale scale_* *_temperature*",
        "it multiplies by 1",
        (1, 1.0),
    ),
    Rule(
        "refused",
        "*softcap* *soft_cap* *_multiplier *_multipliers *_scalar *_scaling *_scaling_factor *_scale scale_* *clip* "
        "*alibi* *parallel_residual* *parallel_attn* *_temperature* *_chunk_size *_types layernorm* *_norm",
        "mlx-lm's architecture does not read it, and it changes what a model computes",
    ),
)
"""Keys that change what a model computes wherever they are read; those that are off or 1 do not."""

_ALWAYS_ON = "*causal* use_rope apply_rope* use_rotary* rotary_embedding* scale_attn* scale_attention*"
ALWAYS_ON = (
    Rule("harmless", _ALWAYS_ON, "mlx-lm's architectures compute so", (True, 1, None)),
    Rule("refused", _ALWAYS_ON, "mlx-lm's architectures compute so in any case"),
)
"""Keys whose absence means yes: switched off, they change what a model computes."""

OTHER_INPUTS = Rule(
    "harmless",
    "vision_* audio_* image_* video_* mm_* projector_* *_projector* speech_* vit_* vqmodel_* boi_* eoi_* boa_* "
    "multimodal_* spatial_* num_image* downsample_* use_image* out_hidden_size media_* patch_* use_vision* "
    "num_channels vision_config audio_config encoder_* *_vision_* ignore_index max_image* do_image* tile_* "
    "use_thumbnail "
    "min_image* *_vit_* is_native* deepstack_*",
    "images and sounds are not served; the text part runs alone",
)  # fmt: skip
"""Keys of models that take other inputs than text."""

_ACTIVATIONS = "hidden_act hidden_activation activation_function activation mlp_hidden_act hidden_function"
WITHOUT_CLASS = (
    Rule("harmless", _ACTIVATIONS, "mlx-lm's architecture computes it", ("silu", "swish")),
    Rule("refused", _ACTIVATIONS, "mlx-lm's architecture computes another function"),
)
"""Keys of architectures of which transformers has no class."""

ALSO_COMPUTED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("gemma", "hidden_act"): ("gelu", "gelu_pytorch_tanh"),
    ("gemma", "hidden_activation"): ("gelu", "gelu_pytorch_tanh"),
    ("gemma2", "hidden_act"): ("gelu_pytorch_tanh",),
    ("gemma2", "hidden_activation"): ("gelu_pytorch_tanh",),
    ("gemma3_text", "hidden_act"): ("gelu_pytorch_tanh",),
    ("gpt_neox", "hidden_act"): ("gelu", "gelu_fast", "gelu_new"),
    ("phi", "hidden_act"): ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    ("starcoder2", "hidden_act"): ("gelu_pytorch_tanh", "gelu"),
    ("starcoder2", "activation_function"): ("gelu", "gelu_pytorch_tanh"),
    ("gpt_bigcode", "activation_function"): ("gelu_pytorch_tanh", "gelu"),
    ("gpt2", "activation_function"): ("gelu_new", "gelu_pytorch_tanh"),
    ("mixtral", "head_dim"): (None,),
    ("rwkv7", "hidden_act"): ("sqrelu",),
    ("gear", "hidden_activation"): ("gelu_pytorch_tanh",),
    ("phixtral", "activation_function"): ("gelu_new",),
    ("phi3small", "hidden_act"): ("gegelu",),
    ("openelm", "activation_fn_name"): ("swish",),
}
"""Values that mlx-lm's architecture computes, besides those of transformers' class."""

UNREAD = {
    "mixtral": ("rope_scaling",),
    "qwen3_moe": ("rope_scaling",),
    "glm4_moe": ("rope_scaling", "tie_word_embeddings"),
    "gemma3n": ("rope_scaling",),
}
"""Fields that an architecture names and does not use, beyond those whose name stands nowhere else in its code."""

IMPLIED: dict[tuple[str, str], Any] = {
    ("apertus", "mlp_bias"): False,
    ("apertus", "post_norm"): False,
    ("apertus", "qk_norm"): True,
    ("glm_moe_dsa", "topk_method"): "noaux_tc",
    ("glm_moe_dsa", "scoring_func"): "sigmoid",
    ("glm_moe_dsa", "moe_layer_freq"): 1,
    ("longcat_flash", "attention_method"): "MLA",
    ("longcat_flash", "zero_expert_type"): "identity",
    ("longcat_flash", "mla_scale_q_lora"): True,
    ("longcat_flash", "mla_scale_kv_lora"): True,
    ("qwen3_moe", "norm_topk_prob"): True,
}
"""Arguments that mlx-lm needs and transformers' model has in its code."""

PUBLISHED = Rule(
    "harmless",
    "max_window_layers full_attn_mod interpolate_factor mlp_type norm_type norm_epsilon "
    "use_embedding_sharing use_gated_activation use_parallel_block use_parallel_embedding layer_switch num_heads theta "
    "order_of_interleaved_layers position_embedding_type rotary_pct rotary_dim block_* conv_dim* conv_use_* "
    "use_pos_enc "
    "initial_context_length experts_per_token rotary_emb_base use_mrope ffn_dim_multiplier",
    "published files have it, and transformers' class does not read it",
)
"""Keys in published files that transformers' class of their model does not know. Other unknown keys are refused."""
