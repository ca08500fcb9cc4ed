"""Workloads in which a block that a step in flight computes is published with a chunk that is taken back."""


def prompt(length, seed):
    return {"len": length, "seed": seed}


FILLED_BY_A_STEP_IN_FLIGHT = [
    (
        {"block_size": 2, "num_blocks": 5, "max_num_seqs": 2, "max_num_batched_tokens": 2},
        [
            {"id": "a", "prompt": prompt(2, "a"), "priority": 1, "max_tokens": 4},
            {"id": "b", "prompt": prompt(1, "b"), "arrival_step": 1, "max_tokens": 3},
        ],
        {"a": 4},
    ),
    (
        {"block_size": 4, "num_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 8},
        [
            {"id": "b", "prompt": prompt(7, "b"), "arrival_step": 1, "max_tokens": 7},
            {"id": "a", "prompt": prompt(6, "a"), "arrival_time": 2, "max_tokens": 8},
        ],
        {"a": 12},
    ),
    (
        {
            "block_size": 1,
            "num_blocks": 20,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 6,
            "num_speculative_tokens": 2,
            "spec_method": "eagle",
            "disable_lookahead_block_hashes": True,
        },
        [
            {"id": "a", "prompt": prompt(1, "a"), "arrival_step": 1, "priority": 1, "accepts": [1, 2], "max_tokens": 7},
            {"id": "b", "prompt": prompt(1, "b"), "arrival_step": 2, "max_tokens": 3},
        ],
        {"a": 3},
    ),
]
