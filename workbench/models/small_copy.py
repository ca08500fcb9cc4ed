"""A small copy of a model: the same code and the same numbers, but few heads and narrow layers with random weights.

A rule of a model that begins at a length is found by running that length. With the copy this takes milliseconds; its
weights are drawn so that every part moves the logits.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import deepcopy
from dataclasses import is_dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from workbench.models.model_code import arguments, own_class, scalars
from workbench.models.packed.layers import PackedLayer

SMALL = 2_000_000
"""Number of weights up to which a model is run as it is if it cannot be built again."""

_GAIN = 1.5
"""Size of a product's outputs relative to its inputs: enough for every layer to move the logits, too little for tens of
layers to turn rounding into noise."""

_HEADS, _HEAD_DIM = 2, 16
_HIDDEN = ("hidden_size", "d_model", "n_embd", "model_dim", "dim", "block_dim")
_HIDDEN_SIZES = (32, 64)
"""Tried in this order: some models need heads that fill it."""
_NUM_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
_SIZES: dict[str, int] = {
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "mlp_hidden_size", "n_inner", "block_ff_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "embedding_size", "num_vocab"), 96),
    **dict.fromkeys(_NUM_HEADS, _HEADS),
    **dict.fromkeys(
        ("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"), _HEAD_DIM
    ),  # also of a key with both parts, a multiple of what the Metal kernel takes
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    "q_lora_rank": 24,
}
"""The largest value of a size in a copy, by its name in a model's arguments."""
_NUM_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads")
_WEIGHTS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, SwitchLinear, QuantizedSwitchLinear)
_OF_FORMAT = ("bits", "group_size", "mode")


def small_copy(model: nn.Module) -> nn.Module | None:
    """A copy of a model that runs the same code; None if the code cannot be told to be the same.

    Args:
        model: The model; it and MLX's random numbers are unchanged afterwards.
    """
    high, low = mx.random.state[0].tolist()  # type: ignore[index]
    try:
        if not _is_as_built(model):
            return None
        for keep_head_dim, hidden in product((False, True), _HIDDEN_SIZES):
            try:
                return _built(model, hidden, keep_head_dim)
            except Exception:  # noqa: S112 (a size depends on another one)
                continue
        return None
    finally:
        mx.random.seed(high << 32 | low)


def own_or_small(model: nn.Module) -> nn.Module | None:
    """The small copy of a model, or the model itself if it is small enough; None if it is too large."""
    if (copy := small_copy(model)) is not None:
        return copy
    arrays = dict(tree_flatten(model.parameters())).values()
    packed = sum(getattr(module, "num_packed_weights", 0) for module in model.modules())
    return model if sum(array.size for array in arrays) + packed <= SMALL else None


def _is_as_built(model: nn.Module) -> bool:
    """Whether a model has the modules that its class makes of its arguments, with the same plain values.

    A module that was exchanged or changed afterwards has code or numbers that a copy would lack. The weights of the
    second model are never evaluated.
    """
    try:
        kind: Any = type(model)
        built = dict(kind(deepcopy(arguments(model))).named_modules())
    except Exception:  # a model of any kind is looked at
        return False
    own = dict(model.named_modules())
    return built.keys() == own.keys() and all(_is_alike(module, own[path]) for path, module in built.items())


def _is_alike(built: nn.Module, own: nn.Module) -> bool:
    if type(built) in _WEIGHTS:
        return type(own) in _WEIGHTS or isinstance(own, PackedLayer)
    return own_class(own) is type(built) and scalars(built) == scalars(own)


def _built(model: nn.Module, hidden: int, keep_head_dim: bool) -> nn.Module:
    """The copy, which has run once."""
    args = deepcopy(arguments(model))
    _shrink(args, hidden, keep_head_dim)
    kind: Any = type(model)
    copy: nn.Module = kind(args)
    _check_sizes(copy, model)
    generator = np.random.default_rng(0)

    def draw(path: str, weight: mx.array) -> mx.array:
        noise = generator.standard_normal(weight.shape, dtype=np.float32)
        if weight.ndim < 2:
            return mx.array(noise * np.float32(0.2) + np.float32("norm" in path))
        return mx.array(noise * np.float32(_GAIN / weight.shape[-1] ** 0.5))

    copy.update(tree_map_with_path(draw, copy.parameters()))
    copy.eval()
    mx.eval(copy.parameters(), copy(mx.array([[1, 2, 3]])))
    return copy


def _check_sizes(copy: nn.Module, model: nn.Module) -> None:
    """Check that no number and no size became 0: MLX divides by numbers of heads, which ends the process.

    Raises:
        ValueError: One of them is 0.
    """
    own = dict(model.named_modules())
    for path, module in copy.named_modules():
        before = scalars(own[path])
        if lost := [name for name, value in scalars(module).items() if value == 0 and before.get(name) != 0]:
            raise ValueError(f"{path}.{lost[0]} is 0")
    if any(array.size == 0 for array in dict(tree_flatten(copy.parameters())).values()):
        raise ValueError("a layer has no weights")


def _shrink(args: Any, hidden: int, keep_head_dim: bool, num_pairs: int = 0) -> None:
    """Lower the sizes among a model's arguments, in place, also those of its parts.

    Args:
        args: The arguments.
        hidden: Elements of a hidden state.
        keep_head_dim: Let the elements of a head be as many as they are.
        num_pairs: Pairs of elements that RoPE turns in the model; lists of as many numbers are for them.
    """
    values: MutableMapping[str, Any] = args if isinstance(args, dict) else vars(args)
    sizes = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    heads = next((sizes[name] for name in _NUM_HEADS if name in sizes), 0)
    width = next((sizes[name] for name in _HIDDEN if name in sizes), 0)
    num_pairs = (sizes.get("head_dim") or width // max(1, heads)) // 2 or num_pairs
    for name in sizes.keys() & _SIZES.keys():
        if not (keep_head_dim and "head_dim" in name):
            values[name] = min(sizes[name], _SIZES[name])
    for name in sizes.keys() & _HIDDEN:
        values[name] = _HEADS * 2 * num_pairs if keep_head_dim else min(sizes[name], hidden)
    for name in sizes.keys() & _NUM_KV_HEADS:
        values[name] = min(_HEADS, max(1, _HEADS * sizes[name] // heads)) if heads else sizes[name]
    for name, value in values.items():
        if isinstance(value, dict) or (is_dataclass(value) and not isinstance(value, type)):
            _shrink(value, hidden, keep_head_dim, num_pairs)
        elif isinstance(value, list) and len(value) == num_pairs > _HEAD_DIM // 2 and not keep_head_dim:
            values[name] = value[: _HEAD_DIM // 2]
