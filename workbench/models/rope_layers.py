"""The rotation of each layer of a model, compared with the formula and replaced if it differs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.base.text import shown
from workbench.models.rope import ORIGINAL, Rope, RopeError

_WITHOUT_POSITIONS = {"nemotron_h", "jamba", "kimi_linear", "mamba", "mamba2"}
"""Architectures whose attention has no positions, although configurations of theirs may say how to rotate."""
_PROBED = (1, 37, 400)
"""Positions at which a layer's rotation is compared."""


class ScaledRoPE(nn.Module):
    """RoPE with given wavelengths, and a factor on what is rotated.

    Args:
        frequencies: Inverse frequencies of the pairs of features, float64 [dims / 2]; 0 for pairs that stay.
        scale: Factor on the rotated features.
        traditional: Whether a pair is two neighbours, and not a feature of each half.
    """

    def __init__(self, frequencies: np.ndarray, scale: float = 1.0, traditional: bool = False) -> None:
        super().__init__()
        self.dims, self.traditional, self.scale = 2 * len(frequencies), traditional, scale
        with np.errstate(divide="ignore"):
            self._freqs = mx.array((1 / frequencies).astype(np.float32))

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate the first ``dims`` features of x [..., T, features], whose first position is ``offset``."""
        if self.scale != 1.0:
            x = mx.concatenate([x[..., : self.dims] * self.scale, x[..., self.dims :]], axis=-1)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=self._freqs
        )


def rotation(parameters: Mapping[str, Any], dims: int, max_position: int) -> tuple[np.ndarray, float]:
    """The inverse frequencies of pairs of features, float64 [dims / 2], and the factor on what is rotated."""
    kind, base = parameters["rope_type"], float(parameters["rope_theta"])
    exponents = np.arange(0, dims, 2) / dims
    plain: np.ndarray = base**-exponents
    factor = parameters.get("factor")
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "proportional":
        rotated = int(parameters.get("partial_rotary_factor", 1.0) * dims // 2)
        return np.where(np.arange(dims // 2) < rotated, plain, 0.0) / (factor or 1.0), 1.0
    if kind == "llama3":
        return _llama3(parameters, plain, max_position), 1.0
    if kind == "yarn":
        return _yarn(parameters, plain, max_position)
    if kind == "longrope":
        original = parameters.get(ORIGINAL, max_position)
        factor = factor or max_position / original
        scale = parameters.get("attention_factor") or parameters.get("long_mscale")
        scale = scale or (1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)))
        # As in vLLM, a model whose context is longer than the original one uses the long factors at every length.
        return plain / np.asarray(parameters["long_factor"], np.float64), float(scale)
    return plain, 1.0  # dynamic: positions up to max_position_embeddings are served, and those it leaves as they are


def _llama3(parameters: Mapping[str, Any], plain: np.ndarray, max_position: int) -> np.ndarray:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters.get(ORIGINAL, max_position) * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / parameters["factor"] + smooth * plain


def _yarn(parameters: Mapping[str, Any], plain: np.ndarray, max_position: int) -> tuple[np.ndarray, float]:
    factor, dims = parameters["factor"], 2 * len(plain)
    original, base = parameters.get(ORIGINAL, max_position), parameters["rope_theta"]

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low or 0.001), 0, 1)
    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return plain / factor * ramp + plain * (1 - ramp), float(scale)


def _dims(module: Any) -> int:
    """Number of features that a module rotates; 0 if it does not say."""
    frequencies = getattr(module, "_freqs", None)
    return int(
        getattr(module, "dims", 0) or getattr(module, "dim", 0) or (0 if frequencies is None else 2 * len(frequencies))
    )


class _Place(NamedTuple):
    """A module that rotates."""

    path: str
    parent: nn.Module
    name: str
    module: Any
    layer: int


def _rotating(model: nn.Module) -> Iterator[_Place]:
    for path, parent in model.named_modules():
        number = re.search(r"\.(\d+)(?:\.|$)", f".{path}")
        for name, module in parent.children().items():
            if isinstance(module, nn.Module) and re.search("rope|rotary", name) and number is not None:
                yield _Place(f"{path}.{name}", parent, name, module, int(number[1]))


def match_rope(architecture: str, model: nn.Module, config: Mapping[str, Any], rope: Rope | None) -> list[str]:
    """Give each layer that rotates in another way than the configuration says the rotation that it describes.

    A configuration in the older form says nothing about types of layers: an architecture that tells them apart itself
    stays as it is.

    Returns:
        Paths of the modules that were replaced.

    Raises:
        RopeError: The model cannot rotate as its configuration says.
    """
    if rope is None or "rope_theta" not in rope.main or "alpha" in rope.main:
        return []
    max_position = _count(config, "max_position_embeddings") or int(rope.main.get(ORIGINAL) or 2048)
    places = list(_rotating(model))
    if not places:
        _check_without_modules(architecture, rope, config)
        return []
    if not rope.is_new and not _all_alike(places):
        return []
    replaced = []
    for place in places:
        parameters = rope.of_layer(place.layer)
        if parameters is None or "rope_theta" not in parameters:
            continue
        dims = _dims(place.module)
        if dims < 2 and not _turns(place.module):
            continue
        if dims < 2:
            raise RopeError(f"{place.path} of mlx-lm's {architecture} does not say how many features it rotates")
        traditional, found = _layout(place.module, dims)
        rotated = _rotated_dims(architecture, parameters, config, dims, place)
        try:
            frequencies, scale = rotation(parameters, rotated, max_position)
        except (ValueError, ArithmeticError, TypeError) as problem:
            raise RopeError(f"RoPE of {place.path} cannot be computed from {shown(parameters)}: {problem}") from None
        if rotated != dims or not _same(found, frequencies, scale):
            place.parent[place.name] = ScaledRoPE(frequencies, scale, traditional)
            replaced.append(place.path)
    return replaced


def _check_without_modules(architecture: str, rope: Rope, config: Mapping[str, Any]) -> None:
    """Refuse a model that rotates in its own code, unless it reads all that the configuration says."""
    plain = all(p["rope_type"] in ("default", "dynamic") for p in rope.by_type.values()) and len(rope.by_type) == 1
    if architecture in _WITHOUT_POSITIONS or not plain or not rope.is_new:
        if plain or architecture in _WITHOUT_POSITIONS:
            return
        raise RopeError(
            f"RoPE of type {rope.main['rope_type']!r} is not read by mlx-lm's {architecture}, which rotates in "
            f"its own code"
        )


def _rotated_dims(
    architecture: str, parameters: Mapping[str, Any], config: Mapping[str, Any], dims: int, place: _Place
) -> int:
    """The number of features that a configuration rotates.

    Raises:
        RopeError: It is another one than the model's, and the module does not get whole heads.
    """
    share = parameters.get("partial_rotary_factor")
    heads, hidden = (_count(config, name) for name in ("num_attention_heads", "hidden_size"))
    if share is None or parameters["rope_type"] == "proportional" or config.get("qk_rope_head_dim") or not heads:
        return dims
    head_dim = _count(config, "head_dim") or hidden // heads
    wanted = int(head_dim * share)
    if not head_dim or wanted == dims or "index" in place.path or config.get("rotary_dim") == dims:
        return dims
    if dims != head_dim or wanted < 2 or wanted % 2:
        raise RopeError(
            f"partial_rotary_factor={share} means {wanted} of {head_dim} features, mlx-lm's {architecture} rotates "
            f"{dims} ({place.path})"
        )
    return wanted


def _count(config: Mapping[str, Any], name: str) -> int:
    """A whole number of a configuration; 0 if there is none."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _turns(module: Any) -> bool:
    """Whether a module changes anything."""
    x = np.ones((1, 1, 1, 8), np.float32)
    return not np.array_equal(_turned(module, mx.array(x), 3), x)


def _turned(module: Any, x: mx.array, position: int) -> np.ndarray:
    try:
        return np.array(module(x, offset=position))
    except TypeError:
        return np.array(module(x, position))


def _layout(module: Any, dims: int) -> tuple[bool, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Whether a module rotates neighbours, and the cosines and sines that it multiplies with at some positions."""
    first = np.zeros((1, 1, 1, dims), np.float32)
    first[..., 0] = 1
    moved = np.abs(_turned(module, mx.array(first), 1)[0, 0, 0])
    traditional = dims > 2 and bool(moved[1] > moved[dims // 2])
    x = np.zeros((1, 1, 1, dims), np.float32)
    x[..., 0::2] = 1.0 if traditional else 0.0
    if not traditional:
        x[..., : dims // 2] = 1.0
    found = {}
    for position in _PROBED:
        y = _turned(module, mx.array(x), position)[0, 0, 0]
        found[position] = (y[0::2], y[1::2]) if traditional else (y[: dims // 2], y[dims // 2 :])
    return traditional, found


def _same(found: Mapping[int, tuple[np.ndarray, np.ndarray]], frequencies: np.ndarray, scale: float) -> bool:
    return all(
        np.allclose(cos, scale * np.cos(position * frequencies), atol=2e-4 * scale)
        and np.allclose(sin, scale * np.sin(position * frequencies), atol=2e-4 * scale)
        for position, (cos, sin) in found.items()
    )


def _all_alike(places: list[_Place]) -> bool:
    """Whether all modules rotate in the same way."""
    seen = []
    for place in places:
        dims = _dims(place.module)
        if dims < 2:
            return False
        _, found = _layout(place.module, dims)
        seen.append(np.concatenate([np.concatenate(pair) for pair in found.values()]))
    return all(one.shape == seen[0].shape and np.allclose(one, seen[0], atol=1e-5) for one in seen)
