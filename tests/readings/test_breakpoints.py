"""Breakpoints: each form stops after the right step, and the run continues from there."""

import time

import pytest

from workbench import Engine, EngineConfig, SamplingParams, simulate
from workbench.trace.readings.breakpoints import Breakpoints

WORKLOAD = {
    "config": {"max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 14, "max_num_seqs": 4},
    "requests": [{"id": f"q{i}", "prompt": {"len": 10}, "max_tokens": 14, "arrival_step": i} for i in range(4)],
}


@pytest.fixture(scope="module")
def trace():
    return simulate(WORKLOAD)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("preemption", lambda r: len(r.preempted) > 0),
        ("free_blocks < 3", lambda r: r.free_blocks < 3),
        ("num_kv_computed[q1] >= 12", lambda r: r.num_kv_computed.get("q1", 0) == 12),
        ("block 5", lambda r: any(5 in c.new_block_ids for c in r.chunks)),
        ("finish", lambda r: r.finished != ()),
        ("finish q2", lambda r: "q2" in r.finished),
    ],
)
def test_a_written_condition_holds_where_it_says(trace, text, expected):
    found = [record.step for record in trace if Breakpoints().add(text).condition(record)]
    assert found == [record.step for record in trace if expected(record)]
    assert 0 < len(found) < len(trace)


@pytest.mark.parametrize("text", ["", "preempt", "free_blocks > 3", "block x", "__import__('os')"])
def test_what_is_not_understood_is_refused_with_the_forms(text):
    with pytest.raises(ValueError, match="free_blocks < 8"):
        Breakpoints().add(text)
    with pytest.raises(ValueError, match="condition must be"):
        Breakpoints().add(17)


def test_a_run_stops_and_goes_on(tiny_llama):
    config = EngineConfig(max_num_batched_tokens=8, block_size=4, num_blocks=32, max_model_len=64)
    engine = Engine(tiny_llama, config)
    name = engine.add_request(list(range(3, 30)), SamplingParams(max_tokens=6, ignore_eos=True))
    engine.break_when(lambda record: record.chunks[0].sampled is not None, "first token")
    assert engine.run(progress=False) == []
    assert engine.stopped_by == "'first token' at step 3" and engine.state == "paused"
    engine.breakpoints.clear()
    engine.break_when(f"num_kv_computed[{name}] >= 30")
    engine.start()
    while engine.state == "running":
        time.sleep(0.005)
    assert engine.trace[-1].num_kv_computed[name] == 30
    engine.breakpoints.clear()
    [output] = engine.run(progress=False)
    assert len(output.token_ids) == 6 and engine.breakpoints.stopped_by is None
