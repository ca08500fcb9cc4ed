"""Recipes: small families of workloads around corners that chance rarely reaches.

A recipe changes a drawn workload so that its corner is near, and leaves the rest to chance. It leaves seats and limits
that are not part of its corner wide, so that no other fault ends the run first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from workbench.config import EVICTIONS


class Draw(Protocol):
    """Choices, such as `workbench.analysis.hunt.workloads.Bytes`."""

    def pick(self, *options: Any) -> Any:
        """One of the options."""

    def upto(self, most: int, least: int = 0) -> int:
        """A number from ``least`` to ``most``."""


class Recipe(NamedTuple):
    """A family of workloads.

    Attributes:
        needs: Features that the scheduler must have.
        config: Changes a configuration.
        request: Changes the request with an index.
        spare: Draws the number of blocks beyond those of the largest request; None for any.
    """

    needs: frozenset[str]
    config: Callable[[Draw, dict[str, Any]], None]
    request: Callable[[Draw, int, dict[str, Any], dict[str, Any]], None]
    spare: Callable[[Draw, int], int] | None = None


_SEATS = 8
_CAPS = (
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "enable_chunked_prefill",
)
_DRAFTS = ("num_speculative_tokens", "spec_method", "disable_lookahead_block_hashes")
_GROUPS = ("kv_cache_groups", "prefix_cache_retention_interval")


def _without(config: dict[str, Any], *names: str) -> None:
    for name in names:
        config.pop(name, None)


def _short_pool(draw: Draw, config: dict[str, Any]) -> None:
    _without(config, *_CAPS, *_DRAFTS, *_GROUPS, "watermark")
    config |= {"policy": "priority", "enable_prefix_caching": True, "max_num_seqs": _SEATS, "max_model_len": 64}
    config |= {"block_size": draw.pick(1, 2, 4), "max_num_batched_tokens": draw.pick(16, 12, 32)}
    if cap := draw.pick(0, 2, 3, 4) * config["block_size"]:
        config["long_prefill_token_threshold"] = cap


def _urgent_later(draw: Draw, index: int, config: dict[str, Any], request: dict[str, Any]) -> None:
    """Requests lose blocks to later, more urgent ones, or to one that knocked earlier; the first in mid-prompt."""
    length, num_tokens = draw.upto(2 * config["block_size"], 1), draw.upto(12, 4)
    if index == 0 and (cap := config.get("long_prefill_token_threshold")):
        length, num_tokens = min(32, draw.upto(6, 2) * cap), draw.upto(4, 1)
    request |= {"prompt": {"len": length, "seed": f"u{index}"}, "max_tokens": num_tokens}
    _without(request, "priority", "arrival_step", "abort_step", "stop_at", "accepts")
    if priority := draw.pick(2, 1, 1, 0, 0) if index == 0 else draw.pick(0, 1, 0, 1, 2):
        request["priority"] = priority
    if arrival := min(index, draw.pick(0, 1, 2, 3, 5)):
        request["arrival_step"] = arrival
    if (knocked := draw.pick(None, None, 0, 1, 2, 4)) is not None:
        request["arrival_time"] = knocked


def _async_short_pool(draw: Draw, config: dict[str, Any]) -> None:
    _short_pool(draw, config)
    _without(config, "long_prefill_token_threshold")
    config |= {"async_scheduling": True, "block_size": draw.pick(1, 2)}


def _least_urgent_ends(draw: Draw, index: int, config: dict[str, Any], request: dict[str, Any]) -> None:
    """The least urgent request was admitted first and has its last token on the way when another one needs a block."""
    request |= {"prompt": {"len": draw.upto(4, 1), "seed": f"u{index}"}}
    request |= {"max_tokens": draw.upto(4, 1) if index == 0 else draw.upto(12, 4)}
    _without(request, "priority", "arrival_step", "abort_step", "stop_at")
    if priority := 2 if index == 0 else draw.pick(0, 0, 1):
        request["priority"] = priority


def _drafts_at_a_cap(draw: Draw, config: dict[str, Any]) -> None:
    _without(config, *_CAPS, *_DRAFTS, *_GROUPS, "watermark")
    drafts = draw.upto(4, 1)
    method = "eagle" if config.get("async_scheduling") else draw.pick("ngram", "eagle")
    config |= {"num_speculative_tokens": drafts, "spec_method": method, "max_num_seqs": draw.pick(2, 3, 4)}
    config |= {"max_num_batched_tokens": draw.pick(4 * (1 + drafts), 2 * (1 + drafts), 3 * (1 + drafts) - 1)}
    config |= {"max_model_len": 64, "block_size": draw.pick(4, 2, 1, 8)}
    limit = draw.pick("long_prefill_token_threshold", "long_prefill_token_threshold", "max_num_scheduled_tokens")
    config[limit] = draw.pick(drafts, drafts + 1, 1, max(1, drafts - 1))


def _one_token_left(draw: Draw, index: int, config: dict[str, Any], request: dict[str, Any]) -> None:
    """While a request decodes, others arrive with one token to compute: all of the prompt, or behind a hit."""
    cached = draw.pick(0, 0, 1, 2) * config["block_size"]
    request |= {"prompt": {"len": cached + 1, "seed": "A"}, "max_tokens": draw.upto(8, 2)}
    _without(request, "arrival_step", "abort_step", "stop_at", "priority")
    if index:
        request["arrival_step"] = draw.pick(1, 2, 3, 5)


def _small_blocks(draw: Draw, config: dict[str, Any]) -> None:
    _without(config, *_CAPS, *_DRAFTS, *_GROUPS, "watermark", "policy", "async_scheduling")
    config |= {"enable_prefix_caching": True, "block_size": draw.pick(2, 4), "max_num_batched_tokens": 64}
    config |= {"max_num_seqs": draw.pick(1, 2, 4), "max_model_len": 64}


def _same_block_behind_others(draw: Draw, index: int, config: dict[str, Any], request: dict[str, Any]) -> None:
    """Prompts have the same tokens in a later block, behind other prefixes: only the whole prefix may decide a hit."""
    size = config["block_size"]
    parts = [{"len": size, "seed": draw.pick("A", "B")}, {"len": size, "seed": draw.pick("C", "C", "D")}]
    request |= {
        "prompt": {"parts": [*parts, {"len": draw.pick(1, 1, size), "seed": "E"}]},
        "max_tokens": draw.upto(3, 1),
    }
    _without(request, "cache_salt", "abort_step", "stop_at", "priority")
    request["arrival_step"] = 2 * index


def _states_in_long_blocks(draw: Draw, config: dict[str, Any]) -> None:
    _without(config, *_CAPS, *_DRAFTS, *_GROUPS, "watermark", "policy")
    drafts, budget = draw.upto(4), draw.pick(16, 8, 4, 24)
    if drafts:
        method = draw.pick("eagle" if config.get("async_scheduling") else "ngram", "draft_model")
        config |= {"num_speculative_tokens": drafts, "spec_method": method}
    config |= {"kv_cache_groups": [{"kind": kind} for kind in draw.pick(("mamba",), ("mamba", "full_attention"))]}
    config |= {"max_num_batched_tokens": budget, "block_size": draw.pick(budget, budget - 1, budget // 2, budget + 1)}
    config |= {"enable_prefix_caching": True, "max_num_seqs": draw.pick(1, 2, 4), "max_model_len": 128}


def _prompts_of_whole_blocks(draw: Draw, index: int, config: dict[str, Any], request: dict[str, Any]) -> None:
    """States are kept where a block ends, and a step reaches about one such end: prompts end near it."""
    length = draw.pick(1, 1, 2, 3) * config["block_size"] + draw.pick(0, 0, 1, 2) - draw.pick(0, 0, 1, 2)
    request |= {"prompt": {"len": max(1, length), "seed": draw.pick("A", f"u{index}")}, "max_tokens": draw.upto(6, 1)}
    _without(request, "abort_step", "stop_at", "priority")


def _evicts(draw: Draw, config: dict[str, Any]) -> None:
    _without(config, *_CAPS, *_DRAFTS, *_GROUPS, "watermark", "policy", "async_scheduling")
    config |= {"enable_prefix_caching": True, "block_size": draw.pick(1, 2), "max_num_batched_tokens": 64}
    config |= {"max_num_seqs": draw.pick(1, 2), "max_model_len": 64, "eviction": draw.pick(*EVICTIONS)}


def _few_prompts_again(draw: Draw, index: int, config: dict[str, Any], request: dict[str, Any]) -> None:
    """A few prompts come again and again, whole or in part, and the pool cannot keep them all."""
    size = config["block_size"]
    first = {"len": draw.pick(2, 1, 3, 6) * size, "seed": draw.pick("A", "B", "C", "D")}
    request |= {
        "prompt": {"parts": [first, {"len": draw.pick(1, size, 3 * size), "seed": draw.pick("E", "F", "G")}]},
        "max_tokens": draw.upto(2, 1),
    }
    _without(request, "cache_salt", "abort_step", "stop_at", "priority")
    request["arrival_step"] = 2 * index


def _overcommitted(draw: Draw, config: dict[str, Any]) -> None:
    config |= {"block_size": draw.pick(1, 1, 2, 4), "max_num_batched_tokens": draw.pick(8, 4, 16, 64)}
    config |= {"max_num_seqs": draw.pick(4, 3), "max_model_len": 128}


def _replies_outgrow_the_pool(draw: Draw, index: int, config: dict[str, Any], request: dict[str, Any]) -> None:
    """Short prompts with long replies are admitted on credit, and the first of them is aborted in mid-prompt or not."""
    length = (
        draw.pick(2, 1, 3, config["block_size"]) if index else draw.pick(2, 5, 3 * config["max_num_batched_tokens"])
    )
    request |= {"prompt": {"len": length, "seed": draw.pick(f"u{index}", "A")}, "max_tokens": draw.upto(24, 12)}
    _without(request, "abort_step", "arrival_step", "priority")
    if arrival := draw.pick(0, 0, 1, 2) * index:
        request["arrival_step"] = arrival
    if length > config["max_num_batched_tokens"] and (abort := draw.pick(1, 2, 3, 0)):
        request |= {"abort_step": abort, "max_tokens": 1}


RECIPES = (
    Recipe(
        frozenset({"priority", "caching", "pools"}),
        _short_pool,
        _urgent_later,
        lambda draw, one: draw.pick(1, 0, 2, 3, one // 2, one),
    ),
    Recipe(
        frozenset({"priority", "async", "pools"}),
        _async_short_pool,
        _least_urgent_ends,
        lambda draw, one: draw.pick(1, 0, 2, 3, 4, one // 2, one),
    ),
    Recipe(frozenset({"drafts", "caching", "caps"}), _drafts_at_a_cap, _one_token_left),
    Recipe(frozenset({"caching"}), _small_blocks, _same_block_behind_others, lambda draw, one: draw.pick(0, 1, 2, one)),
    Recipe(
        frozenset({"states", "drafts", "caching", "groups"}),
        _states_in_long_blocks,
        _prompts_of_whole_blocks,
        lambda draw, one: draw.pick(one, 2 * one, 4),
    ),
    Recipe(
        frozenset({"caching", "evictions", "pools"}),
        _evicts,
        _few_prompts_again,
        lambda draw, one: draw.pick(0, 1, 2, 4, 8, one // 2, one),
    ),
    Recipe(
        frozenset({"pages"}),
        _overcommitted,
        _replies_outgrow_the_pool,
        lambda draw, one: draw.pick(one // 2, one // 3, 8, one),
    ),
)
"""Every recipe."""
