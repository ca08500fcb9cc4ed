"""The dashboard's "what if" lets follow-ups wait for the answers that they contain, and says so."""

import random
from types import SimpleNamespace

import pytest
from closed_loops import conversations, run

from workbench import simulate
from workbench.analysis.values import values_of
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.viz.changed_run import changed_run
from workbench.viz.feed import Feed


def test_a_changed_run_is_a_closed_loop():
    arrivals = conversations(random.Random("page"), count=8)
    trace, expected = run(arrivals), values_of(run(arrivals, max_num_seqs=2))
    changed, facts = changed_run(trace, None, 0, {"max_num_seqs": 2})
    assert values_of(changed)["ttft_mean"] == pytest.approx(expected["ttft_mean"], rel=0.05)
    assert facts["error"] < 0.05 and "are follow-ups" in facts["loops"] and "--open-loop" not in facts["loops"]


def test_a_run_whose_times_vary_is_answered_in_steps_with_one_plain_sentence():
    class Unrelated(CostModel):
        number = 0

        def step_seconds(self, chunks):
            self.number += 1
            return (0.01, 3.0, 0.2)[self.number * self.number % 7 % 3]

    rows = [{"id": f"r{i}", "prompt": {"len": 20 + 7 * i}, "max_tokens": 5 + i} for i in range(12)]
    trace = simulate({"config": {"max_num_batched_tokens": 32}, "requests": rows}, cost_model=Unrelated(fixed=1))
    _, facts = changed_run(trace, lambda at_step, **changes: trace, 0, {"max_num_seqs": 2})
    assert facts == {"no_times": "the times of this run vary too much to predict seconds"}
    feed = Feed(trace)
    feed._in_background = lambda work: work()
    feed.handle({"id": 1, "name": "tune", "args": {"slo": "ttft_p99=1s"}})
    said = feed.status()["tuned"]["verdict"]
    assert said.startswith("The times of this run vary too much to predict seconds: no setting can be chosen")
    for word in ("median", "fit", "trace 0"):
        assert word not in said
    assert feed.status()["tuning"] is None


def test_a_page_that_loads_marks_the_steps_that_it_disturbs():
    """From the step in progress when a view opens to the one in progress when it is there; a recording has none."""
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 9}]})
    growing = Trace(trace.meta)
    growing.add_request(trace.requests["a"])
    engine = SimpleNamespace(trace=growing, state="running", name="e")
    for record in trace[:3]:
        growing.append(record)
    feed = Feed(engine)
    for record in trace[3:5]:
        growing.append(record)
    feed.confirm()
    feed.confirm()
    growing.append(trace[5])
    assert growing.disturbed == {3, 4, 5}
    Feed(trace).confirm()
    assert trace.disturbed == set()
