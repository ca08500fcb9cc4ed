"""Forms of config.json that mlx-lm reads under other names, or in part: RoPE, types of layers, windows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from workbench.base.key_table import Rule, UnknownKeyError
from workbench.models.config_tables import IMPLIED
from workbench.models.rope import FULL, SLIDING, Rope, fold_rope
from workbench.models.transformers_values import TransformersValues

_WINDOWS = ("sliding_window", "attention_chunk_size", "floor_scale", "sliding_window_size")
MIN_CONTEXT = 1024
"""Shortest context that may be left of a model whose window mlx-lm does not have."""


def own_rules(architecture: str, text: Mapping[str, Any], read: Iterable[str], folded: Mapping[str, Any]) -> list[Rule]:
    """Rules that follow from the fields that an architecture reads."""
    rules = [Rule("read", " ".join(sorted(read)), "mlx-lm reads it")]
    layer_types = text.get("layer_types")
    if "layer_types" not in read and isinstance(layer_types, list):
        pattern = folded.get("sliding_window_pattern")
        alternates = "sliding_window_pattern" in read and _same_pattern(layer_types, pattern)
        if alternates or set(layer_types) <= {FULL, "attention"}:
            rules.append(Rule("harmless", "layer_types", "it is the order that mlx-lm computes"))
    if "sliding_window_pattern" in read:
        rules.append(Rule("harmless", "_sliding_window_pattern", "layer_types has it"))
    return rules


def _same_pattern(layer_types: list[Any], pattern: Any) -> bool:
    """Whether one layer in so many has full attention, the last one of each group."""
    if isinstance(pattern, str):
        names = {"L": SLIDING, "G": FULL}
        wanted = [names.get(pattern[i % len(pattern)]) for i in range(len(layer_types))] if pattern else []
        return layer_types == wanted
    if not isinstance(pattern, int) or pattern < 1:
        return False
    return layer_types == [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(len(layer_types))]


def fold(
    architecture: str, arguments: type, text: Mapping[str, Any], rope: Rope | None, fields: set[str]
) -> dict[str, Any]:
    """The fields that mlx-lm is given under the names that it reads."""
    changes: dict[str, Any] = {}
    if rope is not None and rope.is_new:
        changes = fold_rope(architecture, rope, fields)
        if changes.get("rope_scaling") and not _takes(arguments, {**text, **changes}):
            changes["rope_scaling"] = None  # its layers are given the rotation after they are made
    layer_types = text.get("layer_types")
    if "sliding_window_pattern" in fields and "layer_types" not in fields and isinstance(layer_types, list):
        pattern = _pattern_of(layer_types, is_text=architecture == "exaone4")
        if pattern is not None:
            changes["sliding_window_pattern"] = pattern
    return {key: value for key, value in changes.items() if key not in text or text[key] != value}


def _pattern_of(layer_types: list[Any], is_text: bool) -> int | str | None:
    """The ``sliding_window_pattern`` of a list of types of layers; None if there is none."""
    first = layer_types.index(FULL) + 1 if FULL in layer_types else len(layer_types) + 1
    if not _same_pattern(layer_types, first):
        return None
    return "L" * (first - 1) + "G" if is_text else first


_OTHER_NAMES = {"n_ctx": "n_positions", "block_dim": "hidden_size", "full_attn_idxs": ""}


def missing(
    architecture: str,
    arguments: Any,
    text: Mapping[str, Any],
    default: TransformersValues,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments that mlx-lm needs and a configuration has under another name, by transformers' class of the model."""
    found = {}
    for field in dataclasses.fields(arguments):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if not needed or field.name in text:
            continue
        value = default.attribute(_OTHER_NAMES.get(field.name, field.name))
        if field.name == "is_moe_layer" and isinstance(kinds := text.get("mlp_layer_types"), list):
            value = [kind == "sparse" for kind in kinds]
        if field.name == "tie_word_embeddings":
            value = config.get(field.name, value)
        if value is None:
            value = IMPLIED.get((architecture, field.name))
        sizes = text.get("hidden_size"), text.get("num_attention_heads")
        if value is None and field.name == "head_dim" and all(type(size) is int and size > 0 for size in sizes):
            value = text["hidden_size"] // text["num_attention_heads"]
        if value is not None:
            found[field.name] = value
    return found


def _takes(arguments: Any, config: dict[str, Any]) -> bool:
    """Whether an architecture's arguments accept a configuration."""
    try:
        made = arguments.from_dict(json.loads(json.dumps(config)))
    except Exception:
        return False
    return getattr(made, "rope_scaling", None) is not None


def judge_windows(
    place: str,
    architecture: str,
    model_type: str,
    config: Mapping[str, Any],
    read: set[str],
    default: TransformersValues,
    accepted: Collection[str],
) -> tuple[int | None, int | None, list[Rule]]:
    """The window that every layer gets, the context that windows which mlx-lm lacks leave, and rules about them."""
    layer_types = config.get("layer_types")
    unread = [
        name
        for name in _WINDOWS
        if name not in read | set(accepted)
        and type(config.get(name)) is int
        and config[name] > 0
        and default.may_read(name)
    ]
    window = config.get("sliding_window")
    if model_type == "mistral" and layer_types is None and "sliding_window" in read and isinstance(window, int):
        return window, None, [Rule("read", "sliding_window", "every layer gets it")]
    if not unread:
        return None, None, []
    if not _has_windows(model_type, config, layer_types):
        off = "windows are switched off, or no layer has one"
        return None, None, [Rule("harmless", " ".join([*unread, "max_window_layers"]), off)]
    context = next((config[name] for name in ("max_position_embeddings", "n_positions") if name in config), None)
    name = min(unread, key=lambda name: int(config[name]))
    smallest = config[name]
    if isinstance(context, int) and context <= smallest:
        return None, None, [Rule("harmless", " ".join(unread), "the context is not longer")]
    if smallest < MIN_CONTEXT:
        raise UnknownKeyError(
            f"{place}: {name} {smallest} is not supported: mlx-lm's {architecture} attends to all tokens, and "
            f"without a "
            f"window its context would be cut to {smallest} tokens"
        )
    rules = [
        Rule("read", " ".join(unread), f"mlx-lm's {architecture} lacks it: the context is cut to {smallest} tokens"),
        Rule("harmless", "use_sliding_window max_window_layers layer_types", "the context is cut to the window"),
    ]
    return None, smallest, rules


def _has_windows(model_type: str, config: Mapping[str, Any], layer_types: Any) -> bool:
    """Whether any layer of a model has a window."""
    by_switch = model_type in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
    if config.get("use_sliding_window", not by_switch) is False:
        return False
    if isinstance(layer_types, list):
        return any("sliding" in str(kind) or "chunked" in str(kind) for kind in layer_types)
    last = config.get("max_window_layers")
    layers = config.get("num_hidden_layers")
    return not isinstance(last, int) or not isinstance(layers, int) or last < layers
