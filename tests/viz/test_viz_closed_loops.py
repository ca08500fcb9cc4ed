"""The dashboard's "what if" lets follow-ups wait for the answers that they contain, and says so."""

import random

import pytest
from closed_loops import conversations, run

from workbench.analysis.values import values_of
from workbench.viz.changed_run import changed_run


def test_a_changed_run_is_a_closed_loop():
    arrivals = conversations(random.Random("page"), count=8)
    trace, expected = run(arrivals), values_of(run(arrivals, max_num_seqs=2))
    changed, facts = changed_run(trace, None, 0, {"max_num_seqs": 2})
    assert values_of(changed)["ttft_mean"] == pytest.approx(expected["ttft_mean"], rel=0.05)
    assert facts["error"] < 0.05 and "are follow-ups" in facts["loops"] and "--open-loop" not in facts["loops"]
