"""Split a model over ranks: mlx-lm's own tensor parallelism, with the checks it lacks.

Every rank keeps the same fraction of each layer's heads and of its MLP, and two sums over the ranks per layer complete
the hidden state. Heads are not cut, so the number of ranks has to divide their number; mlx-lm splits the weights of a
model even if it does not, and fails in the first forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_HEADS = {
    "num_attention_heads": "query heads",
    "num_key_value_heads": "KV heads",
    "num_attention_groups": "KV heads",
}
"""Fields of a configuration that count heads, with the kind of heads."""


def check_heads_divide(name: str, config: Mapping[str, Any], size: int) -> None:
    """Refuse a model whose heads cannot be shared evenly, from its configuration alone.

    Args:
        name: The model's name, for the message.
        config: Fields of its config.json, or of the part about text.
        size: Number of ranks.

    Raises:
        ValueError: ``size`` does not divide a number of heads.
    """
    part = {**config, **(config.get("text_config") or {})}
    counts = {meaning: part[field] for field, meaning in _HEADS.items() if isinstance(part.get(field), int)}
    if all(count % size == 0 for count in counts.values()):
        return
    common = math.gcd(*counts.values())
    possible = [str(ranks) for ranks in range(1, common + 1) if common % ranks == 0]
    heads = " and ".join(f"{count} {meaning}" for meaning, count in counts.items())
    raise ValueError(f"{name!r} has {heads}, which {size} ranks cannot share evenly: use {' or '.join(possible)}")


def shard(name: str, model: nn.Module, group: mx.distributed.Group) -> None:
    """Keep this rank's part of every layer, evaluated; lazy weights of other parts are never read.

    Args:
        name: The model's name, for the message.
        model: An mlx-lm model, changed in place.
        group: The ranks.

    Raises:
        ValueError: mlx-lm cannot split this architecture, or the number of ranks does not divide a layer's width.
    """
    if not hasattr(model, "shard"):
        architecture = type(model).__module__.rpartition(".")[2]
        raise ValueError(f"{name!r} runs on one rank only: mlx-lm does not split {architecture!r} over several")
    try:
        model.shard(group)
    except ValueError as problem:
        raise ValueError(f"{name!r} cannot be split over {group.size()} ranks: {problem}") from problem
    mx.eval(model.parameters())
