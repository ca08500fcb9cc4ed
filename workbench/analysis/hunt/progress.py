"""The smallest change of a configuration that frees requests that wait forever."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from workbench.analysis.hunt.workloads import length_of
from workbench.config import EngineConfig
from workbench.scheduler.admission import check_servable
from workbench.simulation.workload import read_workload

_FIELDS = ("num_blocks", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
_LARGEST = 64

UNSERVABLE = "a request that no schedule can serve is accepted"
"""The obstacle of a request that will wait forever because the whole pool or the budget is too small for it."""

Ends = Callable[[dict[str, Any]], bool]
"""Whether a workload runs to its end."""


def obstacle(workload: dict[str, Any], ends: Ends, expected: str = "", *, all_free: bool = False) -> str:
    """The obstacle of a run that makes no progress, in a few words that tell faults apart.

    Args:
        workload: The workload.
        ends: Tells whether a workload runs to its end.
        expected: The words to try first.
        all_free: Nobody holds a block: a larger pool only changes the order of events, unless nothing else helps.
    """
    if _only_unservable_wait(workload, ends):
        return UNSERVABLE
    who = "requests wait forever"
    if (without := _without_states(workload)) is not None and ends(without):
        who = "requests with recurrent layers wait forever"
    for field in sorted(_FIELDS, key=lambda field: (field not in expected, all_free and field == "num_blocks")):
        if ends(_enlarged(workload, field, _LARGEST)):
            is_below = field == "max_num_batched_tokens" and _budget_below_drafts(workload["config"])
            return f"{who}, {field} is {'below 1 + drafts' if is_below else 'too small'}"
    return who


def _budget_below_drafts(config: Mapping[str, Any]) -> bool:
    inputs = config.get("max_num_batched_tokens", 512) - (config.get("spec_method") == "draft_model")  # it takes a slot
    budget = min(inputs, config.get("max_num_scheduled_tokens") or 512)
    return bool(budget < 1 + (config.get("num_speculative_tokens") or 0))


def smallest_change(workload: dict[str, Any], ends: Ends) -> str:
    """The smallest change that lets the run end, as a sentence; "" if none of those tried does."""
    found = []
    for field in _FIELDS:
        for more in range(1, _LARGEST + 1):
            if ends(_enlarged(workload, field, more)):
                found.append((more, field, _enlarged(workload, field, more)["config"]))
                break
    if ends(without := _without_drafts(workload)):
        found.append((0, "num_speculative_tokens", without["config"]))
    if not found:
        return ""
    more, field, config = min(found, key=lambda each: (each[0], _FIELDS.index(each[1]) if each[1] in _FIELDS else 0))
    if not more:
        return "Without drafts the run ends."
    unit = {"num_blocks": "block", "max_num_seqs": "seat"}.get(field, "token of budget")
    return f"With {more} more {unit}{'s' * (more > 1)} ({field}={config.get(field)}) the run ends."


def _enlarged(workload: dict[str, Any], field: str, more: int) -> dict[str, Any]:
    made = copy.deepcopy(workload)
    config = made["config"]
    if field == "long_prefill_token_threshold":
        if config.get(field):
            config[field] += more
        return made
    config[field] = config.get(field, {"num_blocks": 512, "max_num_seqs": 16}.get(field, 512)) + more
    if field == "max_num_batched_tokens" and config.get("max_num_scheduled_tokens"):
        config["max_num_scheduled_tokens"] += more
    if field == "max_num_seqs" and config.get("max_num_active_seqs"):
        config["max_num_active_seqs"] += more
    return made


def _without_drafts(workload: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(workload)
    for name in ("num_speculative_tokens", "spec_method", "speculative", "disable_lookahead_block_hashes"):
        made["config"].pop(name, None)
    return made


def _without_states(workload: dict[str, Any]) -> dict[str, Any] | None:
    """With full attention instead of recurrent layers; None if there are none."""
    groups = workload["config"].get("kv_cache_groups", ())
    if all(group["kind"] != "mamba" for group in groups):
        return None
    other = [{"kind": "full_attention"} if group["kind"] == "mamba" else group for group in groups]
    return {**workload, "config": {**workload["config"], "kv_cache_groups": other}}


def _only_unservable_wait(workload: dict[str, Any], ends: Ends) -> bool:
    """Whether, by our scheduler's rules, no schedule can serve a request, and the others end without it.

    An unservable request that is aborted may be gone when the run stops.
    """
    requests = workload["requests"]
    try:
        config = read_workload({"config": workload["config"], "requests": []})[0]
    except ValueError:
        return False
    refused = [request for request in requests if not _is_servable(config, request)]
    if any(request.get("abort_step") is None for request in refused):
        return True
    rest = [request for request in requests if request not in refused]
    return bool(refused) and (not rest or ends({**workload, "requests": rest}))


def _is_servable(config: EngineConfig, request: Mapping[str, Any]) -> bool:
    try:
        check_servable(config, length_of(request["prompt"]), request.get("max_tokens", 16))
    except ValueError:
        return False
    return True
