"""A recording of vLLM says why the head of its queue waits: the numbers are those of vLLM's rules, in every view."""

from pathlib import Path

import pytest

from workbench import Trace, simulate
from workbench.analysis.explain import Explainer
from workbench.apps.cli import main
from workbench.trace.follower import TraceFollower
from workbench.trace.reasons import UNKNOWN

DATA = Path(__file__).parents[1] / "data"
NAMES = ["d3_preempt_priority", "d4_admission_full_isl", "d5_admission_no_full_isl", "d7_too_big", "d_preempt"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("follows", [False, True], ids=["loaded", "followed"])
def test_reasons_are_those_of_a_simulation(name, follows):
    """A request that lacks blocks has the same number of needed and of free ones as in the run of vLLM's rules."""
    path = DATA / "vllm-recorded" / "sync" / f"{name}.jsonl.gz"
    recorded = Trace.load(path)
    if follows:
        follower = TraceFollower(path)
        follower.stop()
        recorded = follower.trace
    simulated = {step.step: step for step in simulate(DATA / "vllm" / "workloads" / f"{name}.json", as_vllm=True)}
    compared = 0
    for step in recorded:
        theirs = simulated[step.step].not_scheduled if step.step in simulated else {}
        for request_id, reason in step.not_scheduled.items():
            expected = theirs.get(request_id)
            if expected is None or not reason.needed or expected.rule:
                continue
            assert (reason.kind, reason.front, reason.behind) == (expected.kind, expected.front, expected.behind)
            assert (reason.limit, reason.value, reason.needed) == (expected.limit, expected.value, expected.needed)
            assert (reason.available, reason.num_tokens) == (expected.available, expected.num_tokens)
            compared += 1
    assert compared
    assert not [step.step for step in recorded if step.waiting_reason == UNKNOWN]


def test_explain_narrate_and_why_have_one_reason(capsys):
    trace = Trace.load(DATA / "vllm-recorded" / "sync" / "d4_admission_full_isl.jsonl.gz")
    kinds = {part.kind for name in trace.requests for part in Explainer(trace).explain(name).parts}
    assert "kv_blocks" in kinds and "unknown" not in kinds
    path = DATA / "vllm-recorded" / "sync" / "d_preempt.jsonl.gz"
    trace = Trace.load(path)
    assert main(["trace", "narrate", str(path)]) == 0
    assert "p2 waits: no free KV blocks: needs 3 more for 9 tokens, 2 free" in capsys.readouterr().out
    part = trace[:4]
    waiter = next(waiter for waiter in part.why().waiters if waiter.request_id == "p2")
    assert waiter.reason == part[3].not_scheduled["p2"]


def test_an_engine_of_our_own_keeps_its_reasons(tmp_path):
    trace = simulate(DATA / "vllm" / "workloads" / "d_preempt.json")
    trace.save(tmp_path / "run.jsonl")
    assert [step.not_scheduled for step in Trace.load(tmp_path / "run.jsonl")] == [step.not_scheduled for step in trace]
