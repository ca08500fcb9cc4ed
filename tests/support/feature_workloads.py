"""Random small workloads under pressure, with asynchronous steps, speculation and several KV cache groups."""

import random
from typing import Any

KINDS = (
    "async",
    "spec",
    "async_spec",
    "window_only",
    "hybrid_window",
    "hybrid_window_prefix",
    "hybrid_mamba",
    "spec_hybrid",
    "grammar",
    "async_grammar",
    "spec_grammar",
    "async_spec_grammar",
    "adapter",
    "async_adapter",
    "spec_adapter",
    "async_spec_adapter",
    "hybrid_window_prefix_adapter",
)


def random_workload(kind: str, rng: random.Random) -> dict[str, Any]:
    """A workload of one kind; what the kind does not fix is random."""
    block_size = rng.choice([1, 2, 4, 8, 16])
    budget = rng.choice([4, 8, 12, 16, 24, 32, 64])
    config: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice([1, 2, 3, 4, 4, 6, 6]),
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.6,
        "max_model_len": rng.choice([48, 64, 128, 512]),
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "watermark": rng.choice([0.0, 0.0, 0.05, 0.2]),
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "async_scheduling": kind.startswith("async"),
    }
    if rng.random() < 0.3:
        config["long_prefill_token_threshold"] = min(rng.randint(1, budget), config["max_model_len"])
        config["long_prefill_token_threshold_adaptive"] = rng.random() < 0.3
    if rng.random() < 0.15:
        config["max_num_scheduled_tokens"] = rng.randint(1, budget)
    if rng.random() < 0.1:
        config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    if "hybrid" in kind or "window" in kind:
        config["async_scheduling"] = rng.random() < 0.4
        config["kv_cache_groups"] = _groups(kind, rng, config)
        config["prefix_cache_retention_interval"] = _interval(rng, config)
    if "spec" in kind:
        config["num_speculative_tokens"] = rng.randint(1, 4)
        methods = ["eagle", "draft_model"] if config["async_scheduling"] else ["ngram", "draft_model", "eagle"]
        config["spec_method"] = rng.choice(methods)
        if config["spec_method"] == "eagle":
            config["disable_lookahead_block_hashes"] = rng.random() < 0.4
            for group in config.get("kv_cache_groups", ()):
                if rng.random() < 0.3:
                    group["eagle"] = True
        config["max_num_batched_tokens"] = max(budget, 2)
    if "adapter" in kind:
        config["max_loras"] = rng.choice([1, 1, 2, 2, 3])
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_num_seqs"])
    longest = min(config["max_model_len"] - 2, rng.choice([8, 24, 60]))
    if config["policy"] == "priority" and config["enable_prefix_caching"]:
        # vLLM keeps hashes of a chunk that it takes back in the same step; Workbench withdraws them.
        config["policy"] = "fcfs"
    per_request = -(-(longest + 18) // block_size) + rng.randint(0, 1)
    num_groups = len(config.get("kv_cache_groups", [0]))
    config["num_blocks"] = 1 + num_groups * int(per_request * rng.choice([1.0, 1.2, 1.5, rng.uniform(1.0, 3.0)]))
    return {"config": config, "requests": _requests(rng, longest, config, kind)}


def _groups(kind: str, rng: random.Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    block_size = config["block_size"]

    def window() -> dict[str, Any]:
        group = {"kind": "sliding_window", "sliding_window": rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24])}
        return group | ({"block_size": rng.choice(sizes)} if rng.random() < 0.3 else {})

    def full() -> dict[str, Any]:
        return {"kind": "full_attention"} | ({"block_size": rng.choice(sizes)} if rng.random() < 0.2 else {})

    def mamba() -> dict[str, Any]:
        return {"kind": "mamba"}

    sizes = [block_size, block_size * 2, max(1, block_size // 2)]
    if kind == "window_only":
        groups = [window() for _ in range(rng.choice([1, 1, 2, 3]))]
        if len(groups) == 1:
            groups[0].pop("block_size", None)
        return groups
    with_mamba = kind == "hybrid_mamba" or (kind == "spec_hybrid" and rng.random() < 0.4)
    if kind.startswith("hybrid_window_prefix"):
        config["enable_prefix_caching"] = True
    if with_mamba:
        sizes = [block_size, block_size * 2]
        groups = [mamba() for _ in range(rng.randint(1, 2))]
        groups += [full() for _ in range(rng.choice([int(not config["enable_prefix_caching"]), 1, 1, 2]))]
        groups += [window() for _ in range(rng.choice([0, 0, 1]))]
    else:
        groups = [window() for _ in range(rng.randint(1, 3))] + [full() for _ in range(rng.choice([1, 1, 2]))]
    rng.shuffle(groups)
    return groups


def _interval(rng: random.Random, config: dict[str, Any]) -> Any:
    if not config["enable_prefix_caching"] or not any(
        group["kind"] != "full_attention" for group in config["kv_cache_groups"]
    ):
        return 0
    largest = max(group.get("block_size", 0) for group in config["kv_cache_groups"])
    unit = max(largest, config["block_size"])
    return rng.choice([0, 0, "dense", unit, 2 * unit, 4 * unit])


def _grammar(rng: random.Random, arrival_step: int, drafts: int) -> dict[str, Any]:
    grammar: dict[str, Any] = {"ready_step": arrival_step + rng.choice([0, 0, 1, 2, rng.randint(3, 25)])}
    if rng.random() < 0.15:
        grammar["fails"] = True
    if drafts and rng.random() < 0.7:
        grammar["valid_drafts"] = [rng.randint(0, drafts) for _ in range(rng.randint(1, 5))]
    return grammar


def _requests(rng: random.Random, longest: int, config: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    requests = []
    drafts = config.get("num_speculative_tokens", 0)
    previous: list[Any] = []
    for index in range(rng.randint(2, 8)):
        length = rng.randint(1, longest)
        shared = rng.choice([0, length // 2, length - 1, length])
        prompt: Any = {"parts": [{"len": shared, "seed": "A"}, {"len": length - shared, "seed": f"u{index}"}]}
        if not 0 < shared < length:
            prompt = {"len": length, "seed": "A" if shared else f"v{index}"}
        if previous and rng.random() < 0.25:
            prompt = rng.choice(previous)
        previous.append(prompt)
        request: dict[str, Any] = {
            "id": f"r{index}",
            "prompt": prompt,
            "max_tokens": rng.randint(1, 16),
            "arrival_step": rng.choice([0, 0, 0, rng.randint(0, 20)]),
            "priority": rng.randint(0, 3),
        }
        if rng.random() < 0.25:
            request["stop_at"] = rng.randint(1, 8)
        if rng.random() < 0.12:
            request["abort_step"] = request["arrival_step"] + rng.choice([0, 1, 2, rng.randint(1, 15)])
        if drafts:
            request["accepts"] = [rng.randint(0, drafts) for _ in range(rng.randint(1, 6))]
        if kind.endswith("grammar") and rng.random() < 0.6:
            request["grammar"] = _grammar(rng, request["arrival_step"], drafts)
        if kind.endswith("adapter") and rng.random() < 0.75:
            request["adapter"] = rng.choice("abcd")
        requests.append(request)
    return requests
