"""The repr of a record fits a screen, whatever the record holds."""

import pytest
from msgspec.structs import replace

from workbench import CostModel, Keyframe, RequestInfo, StepRecord, TraceMeta, simulate

LONG = {
    "config": {"max_num_batched_tokens": 4000, "num_blocks": 2000},
    "requests": [{"id": f"r{i}", "prompt": {"len": 3000, "seed": i}, "max_tokens": 3} for i in range(40)],
}


@pytest.fixture(scope="module")
def trace():
    return simulate(LONG)


def test_the_repr_of_a_record_is_short(trace):
    records = [*trace, *(chunk for step in trace for chunk in step.chunks), *trace.requests.values(), trace.meta]
    records += [trace.keyframe_before(5), *trace.arrivals()]
    assert {type(record) for record in records} >= {Keyframe, RequestInfo, TraceMeta}
    for record in records:
        assert len(repr(record)) < 2500, repr(record)[:300]


def test_a_repr_has_what_differs_from_the_defaults(trace):
    chunk = trace[len(trace) // 2].chunks[0]
    assert "sampled_before" not in repr(chunk) and "cached" not in repr(chunk)
    assert f"start={chunk.start}, num_tokens={chunk.num_tokens}" in repr(chunk)
    assert repr(chunk).endswith(f"limited_by={chunk.limited_by!r})") == (not chunk.new_block_ids)
    assert repr(RequestInfo("a", 3)) == "RequestInfo(request_id='a', num_prompt_tokens=3)"
    assert repr(RequestInfo("a", 3, prompt="x" * 500)).count("x") < 100


def test_the_repr_of_a_step_is_one_line(trace):
    assert repr(trace[0]) == "StepRecord(step 0: 4,000 of 4,000 tokens for r0, r1; 38 waiting)"
    requests = [{"id": f"r{i}" * 40, "prompt": {"len": 3}, "max_tokens": 2} for i in range(5)]
    timed = simulate({"requests": requests}, cost_model=CostModel(fixed=0.0125))
    names = ", ".join(f"{(f'r{i}' * 40)[:32]}..." for i in range(3))
    assert repr(timed[0]) == f"StepRecord(step 0: 15 of 512 tokens for {names} and 2 more; 12.5 ms)"
    for count in (2, 3, 4):
        (first, *_) = simulate({"requests": [{"id": f"r{i}", "prompt": {"len": 3}} for i in range(count)]})
        named = {2: "r0, r1", 3: "r0, r1, r2", 4: "r0, r1, r2 and 1 more"}[count]
        assert repr(first) == f"StepRecord(step 0: {3 * count} of 512 tokens for {named})"
    bare = StepRecord(7, chunks=(replace(trace[0].chunks[0], request_id="a\nb", num_tokens=1),), waiting=("c",))
    assert repr(bare) == "StepRecord(step 7: 1 token for a\\nb; 1 waiting)" and repr(StepRecord(0)).endswith(
        "0: 0 tokens)"
    )
    assert all("\n" not in repr(step) and len(repr(step)) < 200 for step in (*trace, *timed))
