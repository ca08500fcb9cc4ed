"""Random small workloads around the limits at which a scheduler may find no next step.

Budgets, drafts, chunk caps, blocks and pools are drawn close to each other: a budget of about ``1 + drafts``, a block
of about the budget, a pool of about one request.
"""

import random
from typing import Any


def limit_workload(rng: random.Random) -> dict[str, Any]:
    """A workload whose limits are close to each other. Its configuration is valid; its requests may be refused."""
    drafts = rng.choice([0, 0, 1, 1, 2, 3, 4, 5])
    budget = max(1, rng.choice([1, 2, drafts, drafts + 1, drafts + 2, 4, 7, 8, 16, 17]))
    block_size = rng.choice([1, 2, 4, 8, 16, max(1, budget - drafts), budget, budget])
    config: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice([1, 1, 2, 3, 4]),
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.6,
        "max_model_len": rng.choice([8, 16, 17, 32, 64, 128]),
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "watermark": rng.choice([0.0, 0.0, 0.1, 0.5]),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "async_scheduling": rng.random() < 0.4,
        "num_speculative_tokens": drafts,
    }
    if rng.random() < 0.4:
        cap = max(1, rng.choice([1, drafts, drafts + 1, block_size, block_size - 1, budget - 1]))
        config["long_prefill_token_threshold"] = min(cap, config["max_model_len"])
        config["long_prefill_token_threshold_adaptive"] = rng.random() < 0.2
    if rng.random() < 0.3:
        config["max_num_scheduled_tokens"] = rng.randint(1, budget)
    if rng.random() < 0.15:
        config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    if rng.random() < 0.1:
        config |= {"enable_chunked_prefill": False, "long_prefill_token_threshold": 0}
        config["max_model_len"] = rng.choice([None, config.get("max_num_scheduled_tokens") or budget])
    if drafts:
        methods = ["eagle", "draft_model"] if config["async_scheduling"] else ["ngram", "draft_model", "eagle"]
        method = rng.choice(methods if budget > 1 else ["eagle"])
        config["speculative"] = {"method": method}
        if method == "eagle":
            config["speculative"]["disable_lookahead_block_hashes"] = rng.random() < 0.3
    elif rng.random() < 0.15 and not config["async_scheduling"]:
        config["max_num_partial_prefills"] = rng.randint(1, min(3, config.get("max_num_scheduled_tokens") or budget))
        if not config.get("enable_chunked_prefill", True):
            config["max_num_partial_prefills"] = 1
        if rng.random() < 0.5:
            config["max_long_partial_prefills"] = 1
    if "max_num_partial_prefills" not in config and rng.random() < 0.5:
        kinds = [["mamba", "full"], ["mamba"], ["window", "full"], ["window"], ["mamba", "window", "full"]]
        config["kv_cache_groups"] = [_group(kind, rng) for kind in rng.choice(kinds)]
    longest = rng.choice([budget - 1, budget, budget + 1, block_size, block_size + 1, 2 * block_size, 12, 30])
    if rng.random() < 0.95:  # a prompt may be longer than max_model_len in a simulation
        longest = min(longest, (config["max_model_len"] or 64) - 1)
    longest = max(1, longest)
    requests = _requests(rng, longest, config)
    # From a pool that is too small for the longest request to one for several.
    groups = len(config.get("kv_cache_groups", [0]))
    most = max(request["prompt"]["len"] + request["max_tokens"] for request in requests)
    most = min(most, config["max_model_len"] or most) - 1
    per_request = groups * -(-most // block_size) + rng.choice([0, 0, drafts, groups * (1 + drafts)])
    config["num_blocks"] = max(2, 1 + per_request + rng.choice([-2, -1, 0, 0, 0, 1, 1, 2, per_request]))
    return {"config": config, "requests": requests}


def _group(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind == "window":
        return {"kind": "sliding_window", "sliding_window": rng.choice([1, 2, 4, 8, 16])}
    return {"kind": "mamba" if kind == "mamba" else "full_attention"}


def _requests(rng: random.Random, longest: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    drafts = config["num_speculative_tokens"]
    requests = []
    for index in range(rng.randint(1, 5)):
        length = rng.choice([1, longest, longest, rng.randint(1, longest)])
        request: dict[str, Any] = {
            "id": f"r{index}",
            "prompt": {"len": length, "seed": rng.choice(["A", "A", f"u{index}"])},
            "max_tokens": rng.choice([1, 2, 5, rng.randint(1, 20)]),
            "arrival_step": rng.choice([0, 0, 0, rng.randint(0, 12)]),
            "priority": rng.randint(0, 2),
        }
        if drafts:
            request["accepts"] = [rng.randint(0, drafts) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.15:
            request["stop_at"] = rng.randint(1, 6)
        if rng.random() < 0.08:
            request["abort_step"] = request["arrival_step"] + rng.randint(0, 8)
        requests.append(request)
    return requests
