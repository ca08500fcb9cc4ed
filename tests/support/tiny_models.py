"""Random tiny models of mlx-lm's architectures, small enough to build by the dozen.

Weights are random and scaled so that every layer moves the logits: a wrong position, window or sink shows.
`SERVED_AS` gives the expected answer of the preflight for each of them. It records measurements; the product has no
such list and finds the answer for a model when it is loaded.
"""

from __future__ import annotations

import importlib
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from tiny_configurations import COMMON, MAX_POSITION, SPECIAL, VOCAB_SIZE

from workbench.models.load import LoadedModel

MAX_PARAMETERS = 10_000_000
"""Largest number of weights of a tiny model."""

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

    Raises:
        ValueError: The configuration leaves a size at a default that is not tiny; no weight has been drawn.
    """
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    fields = {**COMMON, "model_type": architecture, **SPECIAL.get(architecture, {}), **changes}
    model = module.Model(module.ModelArgs.from_dict(deepcopy(fields)))  # some change the fields of their text part
    num_parameters = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"the tiny {architecture} has {num_parameters:,} parameters: a size has its large default")
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
