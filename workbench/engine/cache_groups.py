"""KV cache groups of a model: its layers, as vLLM puts them into groups that share a block table each."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from workbench.base.compatibility import GROUPS, ONE_TABLE, STATES, check_compatible, excluded
from workbench.config import EngineConfig
from workbench.models.layer_cache import LayerKV
from workbench.models.state_cache import LayerState

log = logging.getLogger("workbench")

ONE_GROUP = [("full_attention", 0)]
"""Kind and window of the only group, if all layers share one block table and keep every token."""


def choose_groups(
    config: EngineConfig, caches: Sequence[LayerKV | LayerState], *, one_table: bool
) -> tuple[EngineConfig, list[int]]:
    """Put the layers of a model into KV cache groups.

    Args:
        config: The configuration. ``kv_cache_groups`` None takes the groups that vLLM makes of these layers; one group
            of full attention keeps every token in every layer.
        caches: The caches that the model uses.
        one_table: The runner is handed one block table per request.

    Returns:
        The configuration with the groups, and the index of each cache's group.

    Raises:
        ValueError: The groups of the configuration are not those of the model, or a setting does not work with its
            recurrent state.
    """
    if any(isinstance(cache, LayerState) for cache in caches):
        check_compatible(config, "engine", STATES, *([ONE_TABLE] if one_table else []))
    kinds = [_kind(cache, config.max_model_len) for cache in caches]
    groups = _split(kinds)
    needed = [kind for kind, _ in groups]
    given = [(group.kind, group.sliding_window) for group in config.cache_groups]
    has_states = ("mamba", 0) in needed
    if given == ONE_GROUP and not has_states:
        off = next(excluded(config, "off", GROUPS, *([ONE_TABLE] if one_table else [])), None)
        if config.kv_cache_groups is not None or needed == ONE_GROUP or off is not None:
            if off is not None and needed != ONE_GROUP:
                log.info("sliding windows become full attention: %s", off.sentence(config))
            return config, [0] * len(caches)
    elif config.kv_cache_groups is not None and (given != needed or one_table):
        hint = "" if has_states else ', or give [{"kind": "full_attention"}] to keep every token in every layer'
        raise ValueError(
            f"kv_cache_groups={config.kv_cache_groups} are not the groups of this model as it is served here: leave it "
            f"out{hint}"
        )
    made = [
        {"kind": kind, "num_layers": len(members), **({"sliding_window": window} if window else {})}
        for (kind, window), members in groups
    ]
    group_of = {layer: index for index, (_, members) in enumerate(groups) for layer in members}
    return config.replace(kv_cache_groups=made), [group_of[index] for index in range(len(caches))]


def _kind(layer: LayerKV | LayerState, max_model_len: int | None) -> tuple[str, int]:
    """Kind of a layer's cache, and its window; a window that no sequence can leave is full attention."""
    if isinstance(layer, LayerState):
        return "mamba", 0
    if layer.reach > 0 and (max_model_len is None or layer.reach < max_model_len):
        return "sliding_window", layer.reach
    return "full_attention", 0


def _split(kinds: Sequence[tuple[str, int]]) -> list[tuple[tuple[str, int], list[int]]]:
    """Groups of layers of the same kind and of about the same size.

    The rule is vLLM 0.33.0's ``_get_kv_cache_groups_uniform_page_size``: the kind with the fewest layers sets the size
    of a group, or the one with the most, if it has less than one and a half times as many.
    """
    same: dict[tuple[str, int], list[int]] = {}
    for index, kind in enumerate(kinds):
        same.setdefault(kind, []).append(index)
    fewest, most = min(map(len, same.values())), max(map(len, same.values()))
    size = most if most < 1.5 * fewest else fewest
    groups = []
    for kind, members in same.items():
        num_groups = -(-len(members) // size)
        groups += [(kind, members[index::num_groups]) for index in range(num_groups)]
    return groups
