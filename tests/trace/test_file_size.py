"""The size of a trace file, against that of the same run in version 3 of the format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.config import EngineConfig, SamplingParams
from workbench.simulation.arrivals import Arrival
from workbench.simulation.simulate import next_token, simulate_requests
from workbench.trace import Trace, TraceError

RECORDED = Path(__file__).parents[1] / "data" / "vllm-recorded"
RECORDED_IN_VERSION_3 = (359_359, 114_154)
"""Bytes of all recorded files, plain and gzipped, saved by the last commit that wrote version 3."""

MAX_GROWTH = 1.05

SATURATED = {
    "seats": ({"max_num_seqs": 8}, 20, 770_008, 26_449),
    "blocks": ({"num_blocks": 200, "max_num_seqs": 64}, 20, 877_050, 50_207),
    "preemptions": ({"num_blocks": 120, "max_num_seqs": 64, "scheduler_reserve_full_isl": False}, 20, 832_058, 40_277),
    "long prompts": (
        {"max_num_partial_prefills": 4, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 64},
        400,
        5_175_991,
        287_152,
    ),
}
"""Limits on 1,000 requests of which nearly all wait, tokens of the shortest prompt, and the bytes in version 3."""


def saturated(name: str) -> Trace:
    limits, shortest, _, _ = SATURATED[name]
    spread = 50 if shortest < 400 else 1
    base = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "num_blocks": 2000, "block_size": 16}
    workload = [
        Arrival(
            f"r{i}",
            [3 + (i * 7 + p * 13) % 900 for p in range(shortest + i % spread)],
            SamplingParams(max_tokens=4 + i % 30),
        )
        for i in range(1000)
    ]
    return simulate_requests(EngineConfig(**base | limits), workload, next_token, max_steps=60)


def sizes(trace: Trace, folder: Path) -> tuple[int, int]:
    plain, gzipped = folder / "t.jsonl", folder / "t.jsonl.gz"
    trace.save(plain)
    trace.save(gzipped)
    return plain.stat().st_size, gzipped.stat().st_size


def test_recordings_of_vllm_grow_by_no_more_than_5_percent(tmp_path):
    found = [sizes(Trace.load(path), tmp_path) for path in sorted(RECORDED.glob("*/*.gz"))]
    assert len(found) == 32
    for now, before in zip(map(sum, zip(*found, strict=True)), RECORDED_IN_VERSION_3, strict=True):
        assert now <= MAX_GROWTH * before


@pytest.mark.parametrize("name", SATURATED)
def test_saturated_runs_grow_by_no_more_than_5_percent(tmp_path, name):
    trace = saturated(name)
    assert max(len(step.waiting) for step in trace) > 900
    for now, before in zip(sizes(trace, tmp_path), SATURATED[name][2:], strict=True):
        assert now <= MAX_GROWTH * before
    loaded = Trace.load(tmp_path / "t.jsonl.gz")
    assert list(loaded) == list(trace)
    for step in loaded:
        assert len({id(why) for why in step.passed_over.values()}) == len(set(step.passed_over.values()))


def test_a_number_of_a_reason_that_does_not_exist_is_refused(tmp_path):
    saturated("long prompts")[:1].save(path := tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    step = next(line for line in lines if line["kind"] == "step")
    assert 0 in step["passed_over"].values()
    step["passed_over"][step["waiting"][-1]] = 99
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match="reason number 99 of 1 stated before it"):
        Trace.load(path)
