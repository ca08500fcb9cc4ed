"""RoPE as a configuration describes it, under today's name (``rope_parameters``) and under the older ones.

mlx-lm's architectures read ``rope_theta`` and ``rope_scaling``, most of them not all kinds of scaling, and some nothing
of it. So what a configuration says is first written under the names that the architecture reads (`fold_rope`). After
the model is built, what each of its layers computes is compared with the formula, and a layer that computes something
else gets the rotation that the configuration describes (`match_rope`). The formulas are those of transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.base.field_checks import shown

FULL, SLIDING = "full_attention", "sliding_attention"
_THETAS = ("rope_theta", "rotary_emb_base", "rope_embedding_base", "rope_freq_constant")
_LOCAL_THETAS = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")
_PARTIAL = ("partial_rotary_factor", "rotary_pct")
_FORMS = {"yarn": "yarn", "deepseek_yarn": "yarn", "telechat3-yarn": "yarn", "su": "longrope", "mrope": "default"}
"""Kinds of scaling under other names. mrope's three parts are the same position in a text."""
_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}
_ORIGINAL = "original_max_position_embeddings"
_YARN = {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
PARAMETERS: dict[str, set[str]] = {
    "default": {"mrope_section", "mrope_interleaved", "factor"},
    "linear": {"factor"},
    "dynamic": {"factor", _ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": _YARN,
    "longrope": {"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"},
    "proportional": {"factor"},
}
"""The parameters of each kind of RoPE, besides those of all kinds."""
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("long_factor",),
}
_OWN = {"ministral3", "mistral4", "hunyuan", "hunyuan_v1_dense"}
"""Architectures that read parameters besides these: ``llama_4_scaling_beta``, ``alpha``."""
_OWN_PARAMETERS = {
    "llama_4_scaling_beta",
    "max_position_embeddings",
    "alpha",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
}
_PLAIN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"type": "yarn", "factor": 1.0, _ORIGINAL: 4096},
    "minicpm3": {"type": "longrope", "short_factor": 1.0, "long_factor": 1.0, _ORIGINAL: 2**20},
    "hunyuan": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
}
"""Plain RoPE for architectures that have one kind of scaling alone."""
_WITHOUT_POSITIONS = {"nemotron_h", "jamba", "kimi_linear", "mamba", "mamba2"}
"""Architectures whose attention has no positions, although configurations of theirs may say how to rotate."""
_PROBED = (1, 37, 400)
"""Positions at which a layer's rotation is compared."""


class RopeError(ValueError):
    """A RoPE setting is unknown, or the model cannot compute it; the message names it."""


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


class Rope(NamedTuple):
    """The settings of RoPE in a configuration.

    Attributes:
        by_type: The parameters of each type of layer; under "" those of all layers.
        layer_types: The type of each layer; empty if the configuration does not name them.
        is_new: Whether it says so under today's name.
    """

    by_type: dict[str, dict[str, Any]]
    layer_types: list[str]
    is_new: bool

    def of_layer(self, layer: int) -> dict[str, Any] | None:
        """The parameters of a layer; None if the configuration does not say."""
        if "" in self.by_type:
            return self.by_type[""]
        return self.by_type.get(self.layer_types[layer]) if layer < len(self.layer_types) else None

    @property
    def main(self) -> dict[str, Any]:
        """The parameters of all layers, or of those with full attention."""
        return self.by_type.get("") or self.by_type.get(FULL) or next(iter(self.by_type.values()))


def read_rope(architecture: str, config: Mapping[str, Any]) -> Rope | None:
    """The settings of a configuration, checked; None if it has none.

    Raises:
        RopeError: A kind, a type of layer or a parameter is unknown.
    """
    new = config.get("rope_parameters")
    layer_types = [str(kind) for kind in config.get("layer_types") or ()]
    if new:
        if not isinstance(new, Mapping):
            raise RopeError(f"rope_parameters must be an object, got {shown(new)}")
        nested = {key: value for key, value in new.items() if isinstance(value, Mapping)}
        by_type = {"": dict(new)} if not nested else {key: dict(value) for key, value in nested.items()}
        if nested and (others := [k for k, v in new.items() if k not in nested and k not in _COMMON and v is not None]):
            raise RopeError(f"rope_parameters holds {others[0]!r} beside types of layers: remove one of the two forms")
        if nested and layer_types and (unknown := sorted(set(nested) - set(layer_types) - {FULL, SLIDING})):
            named = ", ".join(sorted(set(layer_types)))
            raise RopeError(f"rope_parameters has settings for {unknown[0]!r}, layer_types names {named}")
        place = "rope_parameters"
    else:
        scaling = config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise RopeError(f"rope_scaling must be an object or null, got {shown(scaling)}")
        theta = next((config[name] for name in _THETAS if config.get(name) is not None), None)
        if not isinstance(theta, int | float):
            return None if not scaling else Rope({"": _checked(architecture, "rope_scaling", dict(scaling))}, [], False)
        by_type, place = {"": {**scaling, "rope_theta": theta}}, "rope_scaling"
    for kind, parameters in by_type.items():
        for name in ("partial_rotary_factor", _ORIGINAL):  # transformers reads them beside the other parameters too
            takes = name in _COMMON or _kind_of(parameters) in ("longrope", "yarn", "llama3")
            if takes and isinstance(value := config.get(name), int | float):
                parameters.setdefault(name, value)
        by_type[kind] = _checked(architecture, place + (f".{kind}" if kind else ""), parameters)
    return Rope(by_type, layer_types, bool(new))


def _kind_of(parameters: Mapping[str, Any]) -> Any:
    """The kind of RoPE under its common name."""
    kind = parameters.get("rope_type") or parameters.get("type")
    kind = kind or ("longrope" if "long_factor" in parameters else "default")
    return _FORMS.get(kind, kind) if isinstance(kind, str) else kind


def _checked(architecture: str, place: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters with their kind under its common name.

    Raises:
        RopeError: A kind or a parameter is unknown, or a value is not a number.
    """
    kind = _kind_of(parameters)
    if kind not in PARAMETERS:
        raise RopeError(f"{place}: RoPE of type {shown(kind)} is not supported; {', '.join(PARAMETERS)} are")
    own = _OWN_PARAMETERS if architecture in _OWN else set()
    for name, value in parameters.items():
        if name not in _COMMON | PARAMETERS[kind] | own and value is not None:
            raise RopeError(
                f"{place}: {name}={shown(value)} is unknown for RoPE of type {kind!r}, and ignoring it could "
                f"give wrong "
                f"results; known are {', '.join(sorted(PARAMETERS[kind] | {'rope_theta', 'partial_rotary_factor'}))}"
            )
        lists = ("short_factor", "long_factor", "mrope_section")
        if value is None or name in ("rope_type", "type", "finetuned", "truncate", "mrope_interleaved", *lists):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RopeError(f"{place}: {name} must be a number, got {shown(value)}")
    for name in _REQUIRED.get(kind, ()):
        if parameters.get(name) is None:
            raise RopeError(f"{place}: {name} is missing; RoPE of type {kind!r} needs it")
    return {name: value for name, value in parameters.items() if value is not None} | {"rope_type": kind}


def fold_rope(architecture: str, rope: Rope, fields: Collection[str]) -> dict[str, Any]:
    """The settings of ``rope_parameters`` under the names that an architecture reads.

    Args:
        architecture: mlx-lm's name.
        rope: The settings.
        fields: The fields of the architecture's arguments.

    Returns:
        Fields of a configuration to add or replace.
    """
    main, changes = rope.main, dict[str, Any]()
    kind = main["rope_type"]

    def put(names: tuple[str, ...], value: Any) -> None:
        for name in names:
            if name in fields and value is not None:
                changes[name] = value

    put(_THETAS, main.get("rope_theta"))
    put(_LOCAL_THETAS, rope.by_type.get(SLIDING, {}).get("rope_theta"))
    if kind != "proportional":
        put(_PARTIAL, main.get("partial_rotary_factor"))
    put((_ORIGINAL,), main.get(_ORIGINAL))
    if "rope_scaling" in fields:
        scaling = {k: v for k, v in main.items() if k not in ("rope_theta", "partial_rotary_factor")}
        changes["rope_scaling"] = (
            None if kind in ("default", "dynamic") and "alpha" not in main else {**scaling, "type": kind}
        )
        if kind == "default" and architecture in _PLAIN:
            changes["rope_scaling"] = dict(_PLAIN[architecture])
    return changes


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
        original = parameters.get(_ORIGINAL, max_position)
        factor = factor or max_position / original
        scale = parameters.get("attention_factor") or parameters.get("long_mscale")
        scale = scale or (1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)))
        # As in vLLM, a model whose context is longer than the original one uses the long factors at every length.
        return plain / np.asarray(parameters["long_factor"], np.float64), float(scale)
    return plain, 1.0  # dynamic: positions up to max_position_embeddings are served, and those it leaves as they are


def _llama3(parameters: Mapping[str, Any], plain: np.ndarray, max_position: int) -> np.ndarray:
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters.get(_ORIGINAL, max_position) * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / parameters["factor"] + smooth * plain


def _yarn(parameters: Mapping[str, Any], plain: np.ndarray, max_position: int) -> tuple[np.ndarray, float]:
    factor, dims = parameters["factor"], 2 * len(plain)
    original, base = parameters.get(_ORIGINAL, max_position), parameters["rope_theta"]

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
    max_position = int(config.get("max_position_embeddings") or 0) or int(rope.main.get(_ORIGINAL) or 2048)
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
        frequencies, scale = rotation(parameters, rotated, max_position)
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
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if share is None or parameters["rope_type"] == "proportional" or config.get("qk_rope_head_dim") or not heads:
        return dims
    head_dim = config.get("head_dim") or (hidden // heads if hidden else 0)
    wanted = int(head_dim * share)
    if not head_dim or wanted == dims or "index" in place.path or config.get("rotary_dim") == dims:
        return dims
    if dims != head_dim or wanted < 2 or wanted % 2:
        raise RopeError(
            f"partial_rotary_factor={share} means {wanted} of {head_dim} features, mlx-lm's {architecture} rotates "
            f"{dims} ({place.path})"
        )
    return wanted


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
