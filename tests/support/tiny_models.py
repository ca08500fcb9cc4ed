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
from mlx_lm.models import llama
from tiny_configurations import COMMON, MAX_POSITION, SPECIAL, VOCAB_SIZE

from workbench.models import far_trial
from workbench.models.load import LoadedModel

far_trial._MAX_MADE = 200  # many files have models of one kind, and trying a kind takes a second

MAX_PARAMETERS = 10_000_000
"""Largest number of weights of a tiny model."""

_KERNEL = """
    Klear afm7 afmoe apertus bailing_moe cohere cohere2 deepseek deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 gemma gemma2 gemma3_text gemma3n gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
    gpt_neox gpt_oss granite granitemoe helium hunyuan hunyuan_v1_dense internlm2 internlm3 iquestloopcoder kimi_k25
    laguna lille-130m llama llama4 llama4_text longcat_flash mimo minicpm minicpm3 minimax ministral3 mistral4
    mixtral muse_glimmer nanbeige nanochat nemotron olmo2 olmo3 olmoe phi phi3 phimoe plamo plamo3 qwen qwen2
    qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl seed_oss smollm3 solar_open stablelm starcoder2 step3p5 talkie
    telechat3 youtu_llm
"""
_RECURRENT_KERNEL = """
    bailing_hybrid bailing_moe_linear bailing_moe_v3 falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe
    mamba mamba2 nemotron_h olmo_hybrid plamo2 qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma rwkv7
"""
_REFUSED = "baichuan_m1 deepseek_v32 gear minimax_m3_vl"

RECURRENT = sorted(_RECURRENT_KERNEL.split())
"""Architectures with recurrent layers that are served."""

SERVED_AS: dict[str, str] = {
    name: mode
    for mode, names in (
        ("kernel", _KERNEL + _RECURRENT_KERNEL),
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


class EinsumAttention(llama.Attention):
    """Llama's attention by ``einsum``, which nothing reads: such a model gets gathered context."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """See the class."""
        rows, length, _ = x.shape
        q, k, v = (
            project(x).reshape(rows, length, heads, -1).swapaxes(1, 2)
            for project, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        offset = cache.offset
        k, v = cache.update_and_fetch(self.rope(k, offset=offset), v)
        k, v = (mx.repeat(array, self.n_heads // self.n_kv_heads, axis=1) for array in (k, v))
        scores = mx.einsum("bhqd,bhkd->bhqk", self.rope(q, offset=offset), k) * self.scale
        if isinstance(mask, str):
            keys = mx.arange(k.shape[2])
            mask = keys <= keys[k.shape[2] - length :, None]
        scores = scores if mask is None else mx.where(mask, scores, -mx.inf)
        out = mx.einsum("bhqk,bhkd->bhqd", mx.softmax(scores, axis=-1), v)
        return self.o_proj(out.swapaxes(1, 2).reshape(rows, length, -1))


def tiny_gathered_model(**changes: Any) -> nn.Module:
    """A tiny llama whose attention can only be served with gathered context."""
    model = tiny_model("llama", **changes)
    for layer in model.layers:
        layer.self_attn.__class__ = EinsumAttention
    return model


def tiny_loaded_model(architecture: str, **changes: Any) -> LoadedModel:
    """`tiny_model` with the other parts of a loaded model, except a tokenizer; "gathered" is `tiny_gathered_model`."""
    model = tiny_gathered_model(**changes) if architecture == "gathered" else tiny_model(architecture, **changes)
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
