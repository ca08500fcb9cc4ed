"""Makes a workload smaller by its structure, while something stays true of it.

Hypothesis shrinks the bytes from which a workload was made. Here settings are dropped and numbers lowered one by one,
which the bytes cannot do each for itself. Every candidate is smaller in a fixed order, so that this ends.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workbench.analysis.hunt.workloads import length_of

SECONDS = 6.0
"""Limit of processor time."""

_DROPPED = (
    "watermark",
    "scheduler_reserve_full_isl",
    "long_prefill_token_threshold_adaptive",
    "long_prefill_token_threshold",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "prefix_cache_retention_interval",
    "disable_lookahead_block_hashes",
    "async_scheduling",
    "policy",
    "kv_cache_groups",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "enable_chunked_prefill",
    "max_model_len",
)
"""Settings that may be left out."""

_DROPPED_OF_A_REQUEST = (
    "grammar",
    "remote",
    "abort_step",
    "stop_at",
    "priority",
    "accepts",
    "cache_salt",
    "arrival_step",
    "arrival_time",
)
"""Fields of a request that may be left out."""

_LOWERED = {
    "num_speculative_tokens": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "block_size": 1,
    "num_blocks": 2,
}
"""Settings whose numbers are lowered, and their smallest values."""


def shrink(
    workload: dict[str, Any],
    still: Callable[[dict[str, Any]], bool],
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Any]:
    """A small workload of which something is still true.

    Args:
        workload: The workload; it is left as it is.
        still: Tells whether it is true of a workload.
        seconds: Limit of the time; None for SECONDS.
        clock: Tells the time.
    """
    until = clock() + (SECONDS if seconds is None else seconds)
    shrinks = True
    while shrinks and clock() < until:
        shrinks = False
        for smaller in _smaller(workload):
            if size(smaller) < size(workload) and still(smaller):
                workload, shrinks = smaller, True
                break
            if clock() > until:
                break
    return workload


def size(workload: dict[str, Any]) -> tuple[int, ...]:
    """The order of workloads: fewer requests, fewer settings, fewer tokens, smaller numbers."""
    config, requests = workload["config"], workload["requests"]
    tokens = [length_of(request["prompt"]) + request["max_tokens"] for request in requests]
    numbers = [value for value in config.values() if type(value) is int]
    steps = [request.get(name, 0) for request in requests for name in ("arrival_step", "abort_step", "priority")]
    settings = len(config) + sum(len(request) + ("parts" in request["prompt"]) for request in requests)
    settings += sum(len(group) for group in config.get("kv_cache_groups", ()))
    settings += bool(config.get("enable_prefix_caching", True))
    return (len(requests), settings, sum(tokens), sum(numbers) + sum(map(abs, steps)), len(json.dumps(workload)))


def _smaller(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    config, requests = workload["config"], workload["requests"]
    for index in range(len(requests)):
        if len(requests) > 1:
            yield {**workload, "requests": requests[:index] + requests[index + 1 :]}
    for name in _DROPPED:
        if name in config:
            yield _with(workload, config={name: None})
    if config.get("enable_prefix_caching", True):
        yield _with(workload, config={"enable_prefix_caching": False, "prefix_cache_retention_interval": None})
    if config.get("num_speculative_tokens"):
        names = ("num_speculative_tokens", "spec_method", "disable_lookahead_block_hashes")
        yield _with(workload, config=dict.fromkeys(names))
    for index, group in enumerate(groups := config.get("kv_cache_groups", ())):
        rest = [*groups[:index], *groups[index + 1 :]]
        if rest:
            yield _with(workload, config={"kv_cache_groups": rest})
        for name in ("block_size", "eagle"):
            if name in group:
                plain = {key: value for key, value in group.items() if key != name}
                yield _with(workload, config={"kv_cache_groups": [*groups[:index], plain, *groups[index + 1 :]]})
    for index, request in enumerate(requests):
        for name in _DROPPED_OF_A_REQUEST:
            if name in request:
                yield _with(workload, index, {name: None})
        yield from _smaller_request(workload, index, request)
    for name, least in _LOWERED.items():
        for less in _less(config.get(name) or least, least):
            yield _with(workload, config={name: less})
    if len(requests) > 1:
        yield from _smaller_with_its_blocks(workload)


def _smaller_with_its_blocks(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A request and some of its blocks less, so that the pool is as short as before."""
    config, requests = workload["config"], workload["requests"]
    for index, request in enumerate(requests):
        rest = {**workload, "requests": requests[:index] + requests[index + 1 :]}
        most = -(-(length_of(request["prompt"]) + request["max_tokens"]) // config["block_size"])
        for fewer in range(1, min(most, config["num_blocks"] - 2) + 1):
            yield _with(rest, config={"num_blocks": config["num_blocks"] - fewer})


def _smaller_request(workload: dict[str, Any], index: int, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    length = length_of(request["prompt"])
    if "parts" in request["prompt"]:
        for seed in (request["id"], "A"):
            yield _with(workload, index, {"prompt": {"len": length, "seed": seed}})
        parts = request["prompt"]["parts"]
        for place, part in enumerate(parts):
            rest = [*parts[:place], *parts[place + 1 :]]
            yield _with(workload, index, {"prompt": {"parts": rest} if len(rest) > 1 else rest[0]})
            for shorter in _less(part["len"]):
                changed = [*parts[:place], {**part, "len": shorter}, *parts[place + 1 :]]
                yield _with(workload, index, {"prompt": {"parts": changed}})
    else:
        for shorter in _less(length):
            yield _with(workload, index, {"prompt": {**request["prompt"], "len": shorter}})
    for fewer in _less(request["max_tokens"]):
        yield _with(workload, index, {"max_tokens": fewer, "stop_at": None})
    for name in ("arrival_step", "abort_step"):
        for earlier in _less(request.get(name, 0), 0):
            yield _with(workload, index, {name: earlier or None})


def _less(value: int, least: int = 1) -> list[int]:
    """Smaller numbers to try, the smallest first."""
    return sorted(less for less in {least, value // 2, value - 1} if least <= less < value)


def _with(
    workload: dict[str, Any],
    index: int = 0,
    request: Mapping[str, Any] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A copy with other settings; None leaves one out."""
    made = copy.deepcopy(workload)
    for target, values in ((made["config"], config or {}), (made["requests"][index], request or {})):
        for name, value in values.items():
            target.pop(name, None)
            if value is not None:
                target[name] = value
    return made
