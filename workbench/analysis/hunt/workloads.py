"""Workloads that reach the corners of a scheduler, made from a few bytes.

Drawing bytes is cheap, and Hypothesis shrinks them: a smaller byte means a simpler choice, and bytes of 0 leave every
feature out. A feature draws limits close to each other, because faults live where two limits meet: budgets around
``1 + drafts``, chunk caps around a block, pools of exactly one request and one block more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from workbench.analysis.hunt.recipes import RECIPES, Recipe
from workbench.config import EVICTIONS

CONFIG_BYTES = 45
REQUEST_BYTES = 25
MAX_REQUESTS = 8
WORKLOAD_BYTES = CONFIG_BYTES + MAX_REQUESTS * REQUEST_BYTES
RECIPE_SHARE = 0.36
"""Share of the workloads that follow a recipe."""

FEATURES = (
    "caching",
    "priority",
    "drafts",
    "async",
    "groups",
    "states",
    "caps",
    "pools",
    "unchunked",
    "too_large",
    "partial_prefills",
    "evictions",
    "grammars",
    "loads",
    "adapters",
)
"""Features of schedulers. ``too_large``: it accepts requests that its whole pool cannot hold. ``loads``: KV of a prompt
may come from elsewhere."""

PAGES = "pages"
"""A limit that a scheduler may name beside its features: a budget of whole blocks, and for each request a few tokens
of ``max_model_len`` and a block of the pool more than it needs."""

SPARE_TOKENS = 6


class Bytes:
    """Choices made by bytes, one each; behind the last byte all are 0."""

    def __init__(self, content: bytes) -> None:
        self._bytes = iter(content)

    def pick(self, *options: Any) -> Any:
        """One of the options; 0 picks the first."""
        return options[next(self._bytes, 0) * len(options) >> 8]

    def upto(self, most: int, least: int = 0) -> int:
        """A number from ``least`` to ``most``."""
        return least + (next(self._bytes, 0) * (max(most, least) - least + 1) >> 8)

    def chance(self, share: float) -> bool:
        """True for the given share of all bytes, never for 0."""
        return next(self._bytes, 0) >= 256 - round(256 * share)


def make_workload(choices: bytes, features: Collection[str]) -> dict[str, Any]:
    """A workload in the format of ``simulate()``.

    Args:
        choices: WORKLOAD_BYTES of them: those of the configuration, then those of each request.
        features: The features of the scheduler, of FEATURES, and PAGES.
    """
    draw = Bytes(choices[:CONFIG_BYTES])
    num_requests = draw.upto(MAX_REQUESTS, 1)
    recipe = _recipe(draw, features)
    made = _config(draw, features)
    if recipe:
        recipe.config(draw, made)
    longest = _longest(draw, made)
    waits = {name for name in ("grammars", "loads") if draw.chance(0.1) and name in features}
    prompts: list[Any] = []
    listed, rest = [], []
    for index in range(num_requests):
        own = Bytes(choices[CONFIG_BYTES + index * REQUEST_BYTES :][:REQUEST_BYTES])
        rest.append(own)
        listed.append(_request(own, index, made, longest, prompts))
        if recipe:
            recipe.request(own, index, made, listed[-1])
        _add_waits(own, made, listed[-1], waits)
    made["num_blocks"] = _num_blocks(draw, made, listed, features, recipe)
    if "evictions" in features and made["enable_prefix_caching"] and draw.chance(0.2):
        made["eviction"] = draw.pick(*EVICTIONS)
    if "adapters" in features and draw.chance(0.1):
        _add_adapters(draw, made, listed, rest)
    if PAGES in features:
        _fit_pages(made, listed)
    defaults = {"long_prefill_token_threshold": 0, "num_speculative_tokens": 0, "policy": "fcfs", "watermark": 0.0}
    defaults["eviction"] = "lru"
    return {
        "config": {name: value for name, value in made.items() if defaults.get(name) != value},
        "requests": listed,
    }


def _recipe(draw: Bytes, features: Collection[str]) -> Recipe | None:
    known = [recipe for recipe in RECIPES if recipe.needs <= set(features)]
    return draw.pick(*known) if draw.chance(RECIPE_SHARE) and known else None


def _config(draw: Bytes, features: Collection[str]) -> dict[str, Any]:
    has = set(features)
    drafts = draw.upto(5, 1) if draw.chance(0.5) and "drafts" in has else draw.upto(0)
    sizes = (1 + drafts, 8, 16, 4, 7, 12, 16, 24, 32, 2 + drafts, 17, 64, drafts or 3, 2)
    budget = max(1, draw.pick(*sizes))
    seats = min(budget, draw.pick(1, 2, 2, 3, 4, 4, 6))
    block = draw.pick(4, 1, 2, 4, 8, 16, budget, max(1, budget - drafts), 16)
    config: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": seats,
        "block_size": block,
        "max_model_len": draw.pick(512, 512, 64, 128, 48, 32, 17, 2 * block, 16),
        "enable_prefix_caching": draw.chance(0.6) and "caching" in has,
    }
    if draw.chance(0.35) and "priority" in has:
        config["policy"] = "priority"
    if draw.chance(0.35) and "async" in has:
        config["async_scheduling"] = True
    if draw.chance(0.3) and "pools" in has:
        config["watermark"] = draw.pick(0.0, 0.05, 0.1, 0.2, 0.5)
    if draw.chance(0.4) and "pools" in has:
        config["scheduler_reserve_full_isl"] = False
    _add_caps(draw, config, drafts, has)
    _add_drafts(draw, config, drafts)
    _add_groups(draw, config, has)
    return config


def _add_caps(draw: Bytes, config: dict[str, Any], drafts: int, has: set[str]) -> None:
    budget, block = config["max_num_batched_tokens"], config["block_size"]
    if draw.chance(0.3) and "caps" in has:
        cap = draw.pick(1, drafts, drafts + 1, block, block - 1, budget - 1, draw.upto(budget, 1))
        config["long_prefill_token_threshold"] = min(max(1, cap), config["max_model_len"])
        if draw.chance(0.25):
            config["long_prefill_token_threshold_adaptive"] = True
    if draw.chance(0.2) and "caps" in has:
        config["max_num_scheduled_tokens"] = min(budget, max(1, draw.pick(drafts + 1, drafts, draw.upto(budget, 1))))
    if draw.chance(0.1) and "caps" in has:
        config["max_num_active_seqs"] = draw.upto(config["max_num_seqs"], 1)
    if draw.chance(0.07) and budget > 3 and "unchunked" in has and "long_prefill_token_threshold" not in config:
        config["enable_chunked_prefill"] = False
        config["max_model_len"] = min(config["max_model_len"], budget)
        config.pop("max_num_scheduled_tokens", None)
    if draw.chance(0.1) and "partial_prefills" in has and not (drafts or config.get("async_scheduling")):
        config["max_num_partial_prefills"] = 1 if config.get("enable_chunked_prefill") is False else draw.upto(3, 1)
        if draw.chance(0.5):
            config["max_long_partial_prefills"] = 1


def _add_drafts(draw: Bytes, config: dict[str, Any], drafts: int) -> None:
    if not drafts:
        return
    config["num_speculative_tokens"] = drafts
    if config.get("async_scheduling"):
        method = draw.pick("eagle", "draft_model")
    else:
        method = draw.pick("ngram", "draft_model", "eagle")
    config["spec_method"] = method
    if method == "eagle" and draw.chance(0.3):
        config["disable_lookahead_block_hashes"] = True


def _add_groups(draw: Bytes, config: dict[str, Any], has: set[str]) -> None:
    if not draw.chance(0.35) or "groups" not in has or "max_num_partial_prefills" in config:
        return
    kinds = draw.pick("w", "wf", "m", "mf", "fw", "wwf", "mwf", "mmf", "wff")
    if "states" not in has:
        kinds = kinds.replace("m", "w")
    block, caching = config["block_size"], config["enable_prefix_caching"]
    groups: list[dict[str, Any]] = []
    for kind in kinds:
        group: dict[str, Any] = {"kind": {"w": "sliding_window", "m": "mamba", "f": "full_attention"}[kind]}
        if kind == "w":
            group["sliding_window"] = draw.pick(4, 1, 2, 3, 6, 8, 12, 16, 24)
        if kind != "m" and len(kinds) > 1 and draw.chance(0.2) and "m" not in kinds:
            group["block_size"] = draw.pick(block * 2, max(1, block // 2))
        if config.get("spec_method") == "eagle" and draw.chance(0.25):
            group["eagle"] = True
        groups.append(group)
    config["kv_cache_groups"] = groups
    if caching:
        unit = max(block, *(group.get("block_size", 0) for group in groups))
        config["prefix_cache_retention_interval"] = draw.pick(0, 0, "dense", unit, 2 * unit)


def _longest(draw: Bytes, config: dict[str, Any]) -> int:
    """Longest prompt: around the limits, and short of ``max_model_len``."""
    budget, block = config["max_num_batched_tokens"], config["block_size"]
    longest = draw.pick(1, budget - 1, budget, budget + 1, block, block + 1, 2 * block, 12, 24, 40, 60)
    return int(max(1, min(longest, config["max_model_len"] - 2)))


def _request(draw: Bytes, index: int, config: dict[str, Any], longest: int, prompts: list[Any]) -> dict[str, Any]:
    block = config["block_size"]
    length = max(1, min(longest, draw.pick(1, longest, longest, block, block + 1, draw.upto(longest, 1))))
    shared = min(length, draw.pick(0, length, length - 1, length // 2, block, block - 1, draw.upto(length)))
    request: dict[str, Any] = {"id": f"r{index}", "prompt": _prompt(index, length, shared)}
    if prompts and draw.chance(0.2):
        request["prompt"] = prompts[-1]
    prompts.append(request["prompt"])
    room = config["max_model_len"] - length
    request["max_tokens"] = max(1, min(room, draw.pick(1, 2, 5, draw.upto(20, 1))))
    if arrival := draw.pick(0, 0, 0, 1, 2, 3, 5, 8, 13):
        request["arrival_step"] = arrival
    if config.get("policy") == "priority" and (priority := draw.pick(0, 0, 1, 2, -1)):
        request["priority"] = priority
    if draw.chance(0.15):
        request["stop_at"] = draw.upto(request["max_tokens"], 1)
    if draw.chance(0.12):
        request["abort_step"] = arrival + draw.pick(0, 1, 2, 3, 5, 8)
    if drafts := config.get("num_speculative_tokens"):
        accepts = [draw.upto(drafts), draw.upto(drafts)]
        if any(accepts):
            request["accepts"] = accepts
    elif draw.chance(0.06) and config["enable_prefix_caching"]:
        request["cache_salt"] = "s"
    return request


def _add_waits(draw: Bytes, config: dict[str, Any], request: dict[str, Any], waits: set[str]) -> None:
    """Let a request wait for its grammar, or for KV of its prompt from elsewhere."""
    arrival, length, block = request.get("arrival_step", 0), length_of(request["prompt"]), config["block_size"]
    if "grammars" in waits and not (config.get("num_speculative_tokens") and config.get("async_scheduling")):
        if draw.chance(0.6):
            request["grammar"] = {"ready_step": arrival + draw.pick(0, 1, 2, 4, 8)}
    elif "loads" in waits and length > block and "kv_cache_groups" not in config and draw.chance(0.6):
        request["remote"] = {
            "num_tokens": block * draw.upto((length - 1) // block, 1),
            "num_steps": draw.pick(1, 2, 3, 6, 0),
        }
        if draw.chance(0.3) and request["remote"]["num_steps"]:
            request["remote"]["fails"] = True


def _add_adapters(draw: Bytes, config: dict[str, Any], requests: list[dict[str, Any]], rest: Sequence[Bytes]) -> None:
    """Give requests adapters, of which one or two may run at once."""
    config["max_loras"] = draw.pick(1, 1, 2)
    for request, own in zip(requests, rest):
        if adapter := own.pick("", "a", "b", "c"):
            request["adapter"] = adapter


def _fit_pages(config: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """Raise the limits that a scheduler of pages would refuse, by as little as it takes."""
    block = config["block_size"]
    needed = SPARE_TOKENS + max(length_of(request["prompt"]) + request["max_tokens"] for request in requests)
    config["max_num_batched_tokens"] += -config["max_num_batched_tokens"] % block
    config["max_model_len"] = max(config["max_model_len"], needed)
    config["num_blocks"] = max(config["num_blocks"], 2 + -(-needed // block))


def _prompt(index: int, length: int, shared: int) -> dict[str, Any]:
    """A prompt whose first tokens are those of others."""
    if shared in (0, length):
        return {"len": length, "seed": "A" if shared else f"u{index}"}
    return {"parts": [{"len": shared, "seed": "A"}, {"len": length - shared, "seed": f"u{index}"}]}


def _num_blocks(
    draw: Bytes,
    config: dict[str, Any],
    requests: list[dict[str, Any]],
    features: Collection[str],
    recipe: Recipe | None,
) -> int:
    """A pool of about one request, of several, or too small for one."""
    block, drafts = config["block_size"], config.get("num_speculative_tokens", 0)
    most = max((length_of(request["prompt"]) + request["max_tokens"] for request in requests), default=1)
    one = 0
    for group in config.get("kv_cache_groups") or [{"kind": "full_attention"}]:
        one += -(-(most + 2 * drafts) // group.get("block_size", block))
        one += 1 + drafts if group["kind"] == "mamba" else 0
    extra = draw.pick(3 * one, one, one // 2, 2, 1, 0, 0, 2 * one)
    if recipe and recipe.spare:
        extra = recipe.spare(draw, one)
    elif "too_large" in features and draw.chance(0.08):
        extra = -draw.upto(max(1, one // 2), 1)
    return max(2, 1 + one + extra)


def length_of(prompt: Any) -> int:
    """Number of tokens of a prompt."""
    if isinstance(prompt, list):
        return len(prompt)
    return sum(map(length_of, prompt["parts"])) if "parts" in prompt else prompt["len"]
