"""Models with random weights, for lessons about caches: nothing is downloaded, and no text makes sense."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from workbench.models.load import LoadedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
"""Fields of a model's configuration, without experts; an architecture takes those that it knows."""


def random_model(architecture: str, *, seed: int = 0, **fields: Any) -> LoadedModel:
    """A small float32 model of an architecture of mlx-lm, without a tokenizer.

    The weights are scaled so that every layer moves the logits: a token that a layer should have seen, and has not,
    changes the output.

    Args:
        architecture: Name of its module in ``mlx_lm.models``, such as "gemma3_text".
        seed: Seed of the weights.
        **fields: Fields of its configuration, beside ``SHAPE`` or instead.

    Raises:
        ValueError: mlx-lm has no such architecture.

    Example:
        >>> from workbench import Engine, random_model
        >>> with Engine(random_model("gemma3_text"), num_blocks=32) as engine:
        ...     len(engine.generate([[5, 6, 7]], max_tokens=4)[0].token_ids)
        4
    """
    try:
        module = importlib.import_module(f"mlx_lm.models.{architecture}")
    except ModuleNotFoundError:
        raise ValueError(
            f"architecture must be a module of mlx_lm.models, such as 'gemma3_text', got {architecture!r}"
        ) from None
    config = {**SHAPE, "model_type": architecture, **fields}
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))

    def draw(path: str, weight: mx.array) -> mx.array:
        noise = mx.random.normal(weight.shape, key=next(keys))
        if weight.ndim < 2:
            return (1.0 if "norm" in path else 0.0) + 0.2 * noise
        return noise * 2 / weight.shape[-1] ** 0.5

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return LoadedModel(
        model=model,
        tokenizer=None,
        name=f"random {architecture}",
        architecture=architecture,
        max_position=config["max_position_embeddings"],
        eos_token_ids=frozenset(),
        vocab_size=config["vocab_size"],
        dtype="float32",
        num_parameters=sum(weight.size for weight in dict(tree_flatten(model.parameters())).values()),
        source="random",
    )
