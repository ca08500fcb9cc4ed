"""RoPE as a configuration describes it, under today's name (``rope_parameters``) and under the older ones.

mlx-lm's architectures read ``rope_theta`` and ``rope_scaling``, most of them not all kinds of scaling, and some nothing
of it. So what a configuration says is first written under the names that the architecture reads (`fold_rope`). After
the model is built, what each of its layers computes is compared with the formula, and a layer that computes something
else gets the rotation that the configuration describes (`workbench.models.rope_layers`). The formulas are those of
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from workbench.base.text import shown

FULL, SLIDING = "full_attention", "sliding_attention"
_THETAS = ("rope_theta", "rotary_emb_base", "rope_embedding_base", "rope_freq_constant")
_LOCAL_THETAS = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")
_PARTIAL = ("partial_rotary_factor", "rotary_pct")
_FORMS = {"yarn": "yarn", "deepseek_yarn": "yarn", "telechat3-yarn": "yarn", "su": "longrope", "mrope": "default"}
"""Kinds of scaling under other names. mrope's three parts are the same position in a text."""
_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}
ORIGINAL = "original_max_position_embeddings"
_YARN = {"factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
PARAMETERS: dict[str, set[str]] = {
    "default": {"mrope_section", "mrope_interleaved", "factor"},
    "linear": {"factor"},
    "dynamic": {"factor", ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": _YARN,
    "longrope": {"factor", ORIGINAL, "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"},
    "proportional": {"factor"},
}
"""The parameters of each kind of RoPE, besides those of all kinds."""
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("long_factor",),
}
_POSITIVE = {"rope_theta", "factor", ORIGINAL, "low_freq_factor", "high_freq_factor", "partial_rotary_factor"}
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
    "deepseek_v2": {"type": "yarn", "factor": 1.0, ORIGINAL: 4096},
    "minicpm3": {"type": "longrope", "short_factor": 1.0, "long_factor": 1.0, ORIGINAL: 2**20},
    "hunyuan": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
}
"""Plain RoPE for architectures that have one kind of scaling alone."""


class RopeError(ValueError):
    """A RoPE setting is unknown, or the model cannot compute it; the message names it."""


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
        for name in ("partial_rotary_factor", ORIGINAL):  # transformers reads them beside the other parameters too
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
        if name in _POSITIVE and value <= 0:
            raise RopeError(f"{place}: {name} must be above 0, got {shown(value)}")
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
    put((ORIGINAL,), main.get(ORIGINAL))
    if "rope_scaling" in fields:
        scaling = {k: v for k, v in main.items() if k not in ("rope_theta", "partial_rotary_factor")}
        changes["rope_scaling"] = (
            None if kind in ("default", "dynamic") and "alpha" not in main else {**scaling, "type": kind}
        )
        if kind == "default" and architecture in _PLAIN:
            changes["rope_scaling"] = dict(_PLAIN[architecture])
    return changes
