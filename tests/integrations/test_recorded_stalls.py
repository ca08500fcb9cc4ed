"""Stalls planted into a process that records: each is named as one, with its cause if the machine counts it.

The process makes its clock, so a busy machine stalls nothing. benchmarks/bench_stalls.py takes the machine's.
"""

import pytest
from planted_stalls import judge, run
from stalled_process import KINDS

from workbench.simulation.costs.stalls import causes_of

CASES = [(seed, kind) for seed in range(5) for kind in (*KINDS, "none")]


@pytest.mark.repeats(step=9)
@pytest.mark.parametrize(("seed", "kind"), CASES)
def test_a_planted_stall_is_named_and_nobody_is_blamed(seed, kind, tmp_path):
    said, trace = run(seed, kind, tmp_path, "made")
    judged = judge(said, trace)
    assert judged.named and not judged.blamed, judged
    assert ("garbage was collected for" in judged.cause) is (kind == "gc")
    assert not judged.claimed
    assert bool(judged.num_hit) is (kind != "none")


def test_causes_are_told_from_facts_of_any_file():
    assert causes_of({}) == causes_of({"collecting": "long", "steal": None, "cpu_wait": 0.001}) == ""
    assert causes_of({"steal": 1.5, "cpu_wait": 0.5}).count(",") == 1
