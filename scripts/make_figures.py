"""Draw the figures of the documentation with the project's views: ``python scripts/make_figures.py``.

Each figure is a simulated run, so a machine without the model draws the same bytes. ``--check`` draws and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generated_files import write_or_check
from lanes import lanes
from roles import roles

from workbench import simulate
from workbench.scheduler.policies import Deadline, DecodeFirst, ShortestRemainingFirst
from workbench.scheduler.policy import SchedulingPolicy
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz import reprs, svg
from workbench.viz.image import standalone

FOLDER = Path(__file__).parent.parent / "docs" / "images"

MANY = {
    "config": {"max_num_batched_tokens": 128, "num_blocks": 400, "max_num_seqs": 16},
    "requests": [
        {"id": "stream", "prompt": {"len": 8}, "max_tokens": 24},
        {"id": "long A", "prompt": {"len": 1000}, "max_tokens": 3},
        {"id": "long B", "prompt": {"len": 900}, "max_tokens": 3},
        {"id": "short 1", "prompt": {"len": 20}, "max_tokens": 5, "arrival_step": 2},
        {"id": "short 2", "prompt": {"len": 20}, "max_tokens": 5, "arrival_step": 4},
        {"id": "medium", "prompt": {"len": 150}, "max_tokens": 5, "arrival_step": 5},
        {"id": "short 3", "prompt": {"len": 20}, "max_tokens": 5, "arrival_step": 9},
    ],
}
LIMITS = {"max_num_partial_prefills": 3, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 200}
ORDERS: dict[str, tuple[str, dict[str, int], SchedulingPolicy | None]] = {
    "vllm": ("vLLM V1's order", {}, None),
    "limits": ("max_num_partial_prefills=3, max_long_partial_prefills=1", LIMITS, None),
    "shortest": ("ShortestRemainingFirst(aging=64)", {}, ShortestRemainingFirst(aging=64)),
    "decode-first": ("DecodeFirst(max_prefill_tokens=64)", {}, DecodeFirst(max_prefill_tokens=64)),
    "deadline": ("Deadline(base=0.3, per_prompt_token=0.002)", {}, Deadline(base=0.3, per_prompt_token=0.002)),
}
"""The pictures of one workload: title, configuration and policy."""


def figures() -> Iterator[tuple[str, str]]:
    """Name and SVG of every figure."""
    mixed = simulate(
        {
            "config": {"max_num_batched_tokens": 64, "num_blocks": 64},
            "requests": [
                {"id": "short", "prompt": {"len": 5}, "max_tokens": 12},
                {"id": "long", "prompt": {"len": 180}, "max_tokens": 6},
                {"id": "late", "prompt": {"len": 4}, "max_tokens": 6, "arrival_step": 2},
            ],
        }
    )
    step = mixed[2]
    focus = reprs.focus_of(mixed.requests)
    yield "packed-batch", svg.packed_batch(step, focus)
    yield "block-tables", svg.block_tables(step, focus)
    yield "timeline", svg.timeline(list(mixed))
    requests = {"chat": (5, 9, 0), "document": (90, 3, 0), "question": (12, 3, 1), "book": (200, 3, 1)}
    unified = simulate(
        {
            "config": {"max_num_batched_tokens": 64, "num_blocks": 64},
            "requests": [
                {"id": name, "prompt": {"len": length}, "max_tokens": output, "arrival_step": arrival}
                for name, (length, output, arrival) in requests.items()
            ],
        }
    )
    yield "unified-step", roles(unified, unified[1])
    chunked = {
        "config": {"max_num_batched_tokens": 64, "num_blocks": 64},
        "requests": [
            {"id": "chat", "prompt": {"len": 12}, "max_tokens": 20},
            {"id": "long", "prompt": {"len": 500}, "max_tokens": 8, "arrival_step": 4},
        ],
    }
    yield "chunked-prefill", lanes("500 tokens arrive while chat decodes; budget 64", simulate(chunked), 25)
    whole = {**chunked["config"], "max_num_batched_tokens": 512}
    yield "whole-prefill", lanes("The same with a budget of 512", simulate(chunked, config=whole), 25)
    tight = simulate(
        {
            "config": {"max_num_batched_tokens": 64, "num_blocks": 13, "block_size": 8, "enable_prefix_caching": False},
            "requests": [{"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 24} for i in range(3)],
        }
    )
    yield "preemption", lanes("12 blocks of 8 tokens for three requests that grow to 44", tight, 35)
    shared = simulate(
        {
            "config": {"max_num_batched_tokens": 128, "num_blocks": 48},
            "requests": [
                {
                    "id": f"question {i}",
                    "prompt": {"parts": [{"len": 64, "seed": "common"}, {"len": 20}]},
                    "max_tokens": 8,
                    "arrival_step": 2 * i,
                }
                for i in range(4)
            ],
        }
    )
    yield "prefix-cache", svg.block_tables(shared[7], reprs.focus_of(shared.requests))
    for name, (title, limits, policy) in ORDERS.items():
        yield (
            f"policy-{name}",
            lanes(title, simulate(MANY, config=limits, policy=policy, cost_model=CostModel(fixed=0.1)), 25),
        )


def main() -> int:
    """Draw the figures or check them."""
    files = ((FOLDER / f"{name}.svg", standalone(figure)) for name, figure in figures())
    return write_or_check(__doc__.splitlines()[0], files, "the views")


if __name__ == "__main__":
    raise SystemExit(main())
