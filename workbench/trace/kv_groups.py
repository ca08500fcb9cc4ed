"""KV cache groups: layers that share a block table, and how a configuration describes them.

Most models have one group, of full attention. A model with windows or recurrent state has several, which take their
blocks from one pool. A group of recurrent state ("mamba") holds one block per request when nothing is cached; with
prefix caching it holds the state at block boundaries.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.trace.fields import MAX_TOKENS

KINDS = ("full_attention", "sliding_window", "mamba")
MAX_GROUPS = 256
_KEYS = ("kind", "block_size", "sliding_window", "num_layers", "eagle")


@dataclass(frozen=True)
class KVCacheGroup:
    """One group.

    Attributes:
        kind: One of KINDS.
        block_size: Tokens per block.
        sliding_window: Tokens that a row attends to, itself included; 0 for other kinds.
        num_layers: Layers of the group. The scheduler does not use it.
        eagle: The group holds the layers of an EAGLE drafter.
    """

    kind: str = "full_attention"
    block_size: int = 16
    sliding_window: int = 0
    num_layers: int = 1
    eagle: bool = False

    @property
    def is_attention(self) -> bool:
        """Whether each token has its slot."""
        return self.kind != "mamba"


def read_groups(config: Mapping[str, Any]) -> tuple[KVCacheGroup, ...]:
    """The groups of a configuration in its order, with their block sizes; one of full attention without the field.

    Raises:
        ValueError: The message names field, value and range.
    """
    block_size = config.get("block_size") or KVCacheGroup.block_size
    given = config.get("kv_cache_groups")
    if given is None:
        return (KVCacheGroup(block_size=block_size),)
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence) or not 1 <= len(given) <= MAX_GROUPS:
        raise ValueError(f"kv_cache_groups must be a list of 1 to {MAX_GROUPS} groups, or None, got {given!r}")
    return tuple(_read_group(f"kv_cache_groups[{index}]", group, config) for index, group in enumerate(given))


def _read_group(place: str, given: Any, config: Mapping[str, Any]) -> KVCacheGroup:
    if not isinstance(given, Mapping):
        raise ValueError(f'{place} must be like {{"kind": "full_attention"}}, got {given!r}')
    if unknown := [key for key in given if key not in _KEYS]:
        raise ValueError(f"{place} has an unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    kind = given.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{place}.kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    window = given.get("sliding_window")
    if (window is not None) is not (kind == "sliding_window"):
        only = "is needed for" if window is None else "is only for"
        raise ValueError(f'{place}.sliding_window {only} a group of kind "sliding_window", got {window!r} for {kind!r}')
    if window is not None:
        _check(f"{place}.sliding_window", window, MAX_TOKENS)
    num_layers, eagle = given.get("num_layers", 1), given.get("eagle", False)
    _check(f"{place}.num_layers", num_layers, MAX_GROUPS * MAX_GROUPS)
    if not isinstance(eagle, bool):
        raise ValueError(f"{place}.eagle must be True or False, got {eagle!r}")
    size = config.get("block_size") or KVCacheGroup.block_size
    if kind == "mamba" and not config.get("enable_prefix_caching", True):
        size = config.get("max_model_len") or sys.maxsize
    if (own := given.get("block_size")) is not None:
        _check(f"{place}.block_size", own, 65536)
        if kind == "mamba" and own != size:
            raise ValueError(
                f"{place}.block_size must be left out for a group of kind 'mamba', got {own}: with prefix caching it "
                "is the block_size of the configuration, without it max_model_len"
            )
        size = own
    return KVCacheGroup(kind, size, window or 0, num_layers, eagle)


def _check(place: str, value: Any, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise ValueError(f"{place} must be an integer from 1 to {high}, got {value!r}")
