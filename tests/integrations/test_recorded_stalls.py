"""Stalls planted into a real process that records: each is named as one, with its cause if the machine counts it."""

import pytest
from planted_stalls import judge, run
from stalled_process import KINDS

from workbench.simulation.costs.stalls import causes_of

CASES = [(seed, kind) for seed in range(5) for kind in (*KINDS, "none")]


@pytest.mark.repeats(step=9)
@pytest.mark.parametrize(("seed", "kind"), CASES)
def test_a_planted_stall_is_named_and_nobody_is_blamed(seed, kind, tmp_path):
    """benchmarks/bench_stalls.py takes 400 cases."""
    said, trace = run(seed, kind, tmp_path)
    judged = judge(said, trace)
    assert judged.named and not judged.blamed, judged
    assert ("garbage was collected for" in judged.cause) is (kind == "gc")
    assert all(is_real for _, is_real in judged.claimed), judged.claimed  # a busy machine stalls by itself
    assert bool(judged.num_hit) is (kind != "none")


def test_causes_are_told_from_facts_of_any_file():
    assert causes_of({}) == causes_of({"collecting": "long", "steal": None, "cpu_wait": 0.001}) == ""
    assert causes_of({"steal": 1.5, "cpu_wait": 0.5}).count(",") == 1
