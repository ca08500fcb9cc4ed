"""The repr of a record fits a screen, whatever the record holds."""

import pytest

from workbench import Keyframe, RequestInfo, TraceMeta, simulate

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
    first, later = trace[0], trace[len(trace) // 2]
    assert repr(first).startswith("StepRecord(step=0, chunks=(Chunk(request_id='r0', start=0, num_tokens=3000, ")
    assert "sampled_before" not in repr(first) and "preempted" not in repr(first)
    chunk = later.chunks[0]
    assert f"start={chunk.start}, num_tokens={chunk.num_tokens}" in repr(chunk)
    assert repr(chunk).endswith(f"limited_by={chunk.limited_by!r})") == (not chunk.new_block_ids)
    assert repr(RequestInfo("a", 3)) == "RequestInfo(request_id='a', num_prompt_tokens=3)"
    assert repr(RequestInfo("a", 3, prompt="x" * 500)).count("x") < 100
