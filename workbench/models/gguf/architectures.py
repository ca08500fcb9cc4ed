"""The architectures of GGUF files as mlx-lm models: configuration and tensor names.

Sources: the tensor names and metadata keys of PyPI ``gguf`` (``gguf.constants``), and their meaning in llama.cpp's
converter and model loader. Nothing is guessed: an architecture, a metadata key or a tensor that is not listed here is
refused by name, because a model that ignores one of them still writes fluent text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.base.text import shown
from workbench.models.gguf import fields
from workbench.models.gguf.fields import GGUFError
from workbench.models.gguf.file import GGUFFile
from workbench.models.gguf.hyperparameters import Hyperparameters

_ATTENTION_AND_MLP = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {name: module for name, module in _ATTENTION_AND_MLP.items() if name.startswith("attn")}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LFM2_TENSORS = {
    **_ATTENTION_AND_MLP,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
}


def _rope_scaling(h: Hyperparameters) -> dict[str, Any] | None:
    """The RoPE scaling as mlx-lm's ``rope_scaling``, None for plain RoPE.

    Raises:
        GGUFError: mlx-lm's models do not have this kind of scaling, or one of its parameters.
    """
    kind = h.get("rope.scaling.type", "linear")  # llama.cpp's default, which a factor of 0 or 1 turns off
    if kind not in ("none", "linear", "yarn"):
        raise GGUFError(f"{h.file.path}: RoPE scaling {shown(kind)} is not supported; none, linear and yarn are")
    factor = h.number("rope.scaling.factor", h.number("rope.scale_linear", 0.0))
    original = "rope.scaling.original_context_length"
    context = h.count(original) if h.get(original) else h.count("context_length")
    beta_fast = h.number("rope.scaling.yarn_beta_fast", 32.0, above=0)
    beta_slow = h.number("rope.scaling.yarn_beta_slow", 1.0, above=0)
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        h.require(key, 1.0)
    h.require("rope.scaling.yarn_log_multiplier", 0.0)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if factor < 0:
        raise GGUFError(f"{h.file.path}: RoPE scaling factor {shown(factor)} must not be negative")
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": context,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
    }


def _common_config(
    h: Hyperparameters, default_rope_theta: float = 10000.0, num_kv_heads: int | None = None
) -> dict[str, Any]:
    """The fields that all architectures share, under Hugging Face's names.

    Args:
        h: The hyperparameters.
        default_rope_theta: Base of RoPE's wavelengths if the file has none.
        num_kv_heads: Number of key/value heads, if the architecture reads it in another way.
    """
    tensors = h.file.tensors
    if "token_embd.weight" not in tensors:
        raise GGUFError(f"{h.file.path}: tensor 'token_embd.weight' is missing: this file is not a language model")
    if len(shape := tensors["token_embd.weight"].shape) != 2:
        raise GGUFError(f"{h.file.path}: tensor 'token_embd.weight' has shape {shape}; it must be a matrix")
    hidden_size, num_heads = h.count("embedding_length"), h.count("attention.head_count")
    head_dim = h.count("attention.key_length", hidden_size // num_heads)
    if head_dim % 2:
        raise GGUFError(
            f"{h.file.path}: attention heads of {head_dim} features cannot be rotated: their size must be even"
        )
    h.require("attention.value_length", head_dim)
    h.require("rope.dimension_count", head_dim)
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": h.count("block_count", high=len(tensors)),  # each layer has its tensors
        "intermediate_size": h.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or h.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": h.number("attention.layer_norm_rms_epsilon", above=0),
        "vocab_size": shape[0],
        "max_position_embeddings": h.count("context_length"),
        "rope_theta": h.number("rope.freq_base", default_rope_theta, above=0),
        "rope_scaling": _rope_scaling(h),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _llama_config(h: Hyperparameters) -> dict[str, Any]:
    tensors = h.file.tensors
    return {
        **_common_config(h),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _experts_config(h: Hyperparameters) -> dict[str, Any]:
    """The fields of mixtures whose router is a softmax over all experts (llama.cpp's ``build_moe_ffn``)."""
    h.require("expert_gating_func", 1)  # softmax
    num_experts = h.count("expert_count")
    return {
        **_common_config(h),
        "num_experts": num_experts,
        "num_local_experts": num_experts,  # Mixtral's name of it
        "num_experts_per_tok": h.count("expert_used_count", high=num_experts),
    }


# Number of layers of Gemma 3 27B, the only size whose attention scale is not 1/sqrt(head_dim) (llama.cpp's loader).
_GEMMA3_27B_LAYERS = 62


def _gemma3_config(h: Hyperparameters) -> dict[str, Any]:
    config = _common_config(h, default_rope_theta=1_000_000.0)
    if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]
    config["sliding_window"] = h.count("attention.sliding_window")
    config["sliding_window_pattern"] = h.count("attention.sliding_window_pattern", 6)
    config["rope_local_base_freq"] = h.number("rope.freq_base_swa", 10_000.0, above=0)
    return config


def _lfm2_config(h: Hyperparameters) -> dict[str, Any]:
    """Layers without key/value heads are short convolutions with kernels of ``l_cache`` (llama.cpp's loader)."""
    num_layers = h.count("block_count", high=len(h.file.tensors))
    kv_heads = h.count_per_layer("attention.head_count_kv", num_layers)
    attention_layers = [layer for layer, heads in enumerate(kv_heads) if heads]
    different = {kv_heads[layer] for layer in attention_layers}
    if len(different) != 1 or len(attention_layers) == num_layers:
        raise GGUFError(
            f"{h.file.path}: lfm2.attention.head_count_kv={shown(kv_heads)} must be 0 for layers with a short "
            "convolution and one and the same number for layers with attention, and there must be layers of both kinds"
        )
    config = _common_config(h, num_kv_heads=different.pop())
    if config["rope_scaling"] is not None:
        raise GGUFError(f"{h.file.path}: RoPE scaling is not supported for architecture 'lfm2'")
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "full_attn_idxs": attention_layers,
        "conv_L_cache": h.count("shortconv.l_cache", low=2),
        "block_dim": config["hidden_size"],
        "block_ff_dim": config["intermediate_size"],
    }


@dataclass(frozen=True)
class Architecture:
    """The conversion of one architecture's GGUF files to an mlx-lm model.

    Attributes:
        model_type: Module of ``mlx_lm.models``.
        fields: Makes fields of that module's ``ModelArgs`` from the hyperparameters.
        counts: Fields that are counts among the hyperparameters, with their keys.
        constants: Fields that are the same in every file.
        equal_heads: Whether the mlx-lm model computes the size of heads from the hidden size.
        block_tensors: Module of a layer by the tensor's name without "blk.N." and ".weight" or ".bias".
        outer_tensors: Module outside the layers by the tensor's name without ".weight".
        biases: Tensors of ``block_tensors`` that may have a bias.
        interleaved_rope: Whether the rows of q and k are stored for RoPE on neighbouring pairs, as llama.cpp's
            converter permutes them for this architecture; mlx-lm rotates halves.
        norm_offset: The difference of the file's norm weights from mlx-lm's.
        factored_rope: Whether a tensor ``rope_freqs.weight`` may stretch the wavelengths of RoPE (Llama 3.1).
    """

    model_type: str
    fields: Callable[[Hyperparameters], dict[str, Any]]
    block_tensors: Mapping[str, str]
    outer_tensors: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    biases: tuple[str, ...] = ()
    interleaved_rope: bool = False
    norm_offset: float = 0.0
    factored_rope: bool = False
    counts: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    equal_heads: bool = False

    def config(self, h: Hyperparameters) -> dict[str, Any]:
        """The fields of ``ModelArgs``.

        Raises:
            GGUFError: Metadata is missing, or has a value that the mlx-lm model does not have.
        """
        config = {**self.fields(h), **{name: h.count(key) for name, key in self.counts.items()}, **self.constants}
        if self.equal_heads and config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
            raise GGUFError(
                f"{h.file.path}: {h.file.metadata['general.architecture']} heads of {config['head_dim']} do not add up "
                f"to embedding_length={config['hidden_size']}, which is not supported"
            )
        return config

    def parameter_name(self, tensor_name: str) -> str | None:
        """Name of a tensor among the mlx-lm model's parameters, None if it is unknown."""
        stem, _, kind = tensor_name.rpartition(".")
        if stem in self.outer_tensors and kind == "weight":
            return f"{self.outer_tensors[stem]}.weight"
        prefix, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if prefix != "blk" or not layer.isdigit() or part not in self.block_tensors:
            return None
        if kind != "weight" and not (kind == "bias" and part in self.biases):
            return None
        return f"model.layers.{layer}.{self.block_tensors[part]}.{kind}"


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        fields=_llama_config,
        block_tensors={**_ATTENTION_AND_MLP, **_PRE_NORMS},
        biases=tuple(_ATTENTION_AND_MLP),
        interleaved_rope=True,
        factored_rope=True,
    ),
    "qwen2": Architecture(
        model_type="qwen2",
        fields=_common_config,
        equal_heads=True,
        block_tensors={**_ATTENTION_AND_MLP, **_PRE_NORMS},
        biases=("attn_q", "attn_k", "attn_v"),
    ),
    "qwen3": Architecture(
        model_type="qwen3",
        fields=_common_config,
        block_tensors={**_ATTENTION_AND_MLP, **_PRE_NORMS, **_QK_NORMS},
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        fields=_experts_config,
        counts=_EXPERT_SIZE | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        equal_heads=True,
        block_tensors={**_ATTENTION, **_PRE_NORMS, **_EXPERTS, **_SHARED_EXPERT},
        biases=("attn_q", "attn_k", "attn_v"),
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        fields=_experts_config,
        counts=_EXPERT_SIZE,
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        block_tensors={**_ATTENTION, **_PRE_NORMS, **_QK_NORMS, **_EXPERTS},
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        fields=_experts_config,
        block_tensors={**_ATTENTION, **_PRE_NORMS, **_QK_NORMS, **_EXPERTS},
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        fields=_gemma3_config,
        block_tensors={**_ATTENTION_AND_MLP, **_SANDWICH_NORMS, **_QK_NORMS},
        norm_offset=1.0,  # the file holds the factor itself, mlx-lm adds 1 to its weight
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        fields=_lfm2_config,
        constants={
            "conv_bias": False,  # a file with biases has tensors that are unknown here
            "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
            "block_multiple_of": 1,
            "block_ffn_dim_multiplier": 1.0,
        },
        equal_heads=True,
        block_tensors=_LFM2_TENSORS,
        outer_tensors={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm"},
    ),
}

_MIXTRAL = Architecture(
    model_type="mixtral",
    fields=_experts_config,
    equal_heads=True,
    block_tensors={
        **_ATTENTION,
        **_PRE_NORMS,
        **{name: module.replace("mlp.", "block_sparse_moe.", 1) for name, module in _EXPERTS.items()},
    },
    interleaved_rope=True,
)
"""Files of Mixtral name the architecture llama, and have experts."""


def find_architecture(file: GGUFFile) -> Architecture:
    """The architecture of a file.

    Raises:
        GGUFError: It is not one of ``ARCHITECTURES``.
    """
    name = fields.text(file.metadata, "general.architecture")
    if name not in ARCHITECTURES:
        raise GGUFError(
            f"{file.path}: architecture {name!r} is not supported; {', '.join(ARCHITECTURES)} are: "
            "load the model's MLX or Hugging Face folder instead"
        )
    if name == "llama" and file.metadata.get("llama.expert_count", 0) != 0:
        return _MIXTRAL
    return ARCHITECTURES[name]
